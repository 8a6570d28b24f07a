"""What stands where a BatchNorm was: it hands its input on and remembers what it replaced."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchboost.core.structure import norm_tail

__all__ = ["RemovedNorm"]

_TENSORS = frozenset({"weight", "bias", "running_mean", "running_var", "num_batches_tracked"})


class RemovedNorm(nn.Module):
    """The identity in place of a BatchNorm; its type tells, also in a wrapped or sharded model, that one is gone.

    It answers the settings of the BatchNorm (``num_features``, ``eps``, ``momentum``, ``affine``,
    ``track_running_stats`` and whatever else was set on it), but none of its tensors. What a subclass of BatchNorm
    does behind the normalisation with modules of its own, such as an activation, it does as well, under the same names.

    Args:
        norm: The BatchNorm; see :func:`~torchboost.core.structure.norm_tail` for the kinds that can go.
        copies: Return a copy of the input. Needed if the input is used elsewhere and something may write to the output
            in place.
        layer: The layer in front, if it feeds this BatchNorm only: what the BatchNorm did can be folded into it.

    Attributes:
        copies: As given.
        tail: Names of the modules that the input passes through.
        adds_bias: Whether ``layer`` had no bias, so that one that it has now holds the shift of the BatchNorm.

    Raises:
        ValueError: It is not known what the BatchNorm computes.
    """

    __jit_unused_properties__ = ("layer", "is_identity")

    num_features: int
    eps: float
    momentum: float | None
    affine: bool
    track_running_stats: bool

    def __init__(self, norm: nn.Module, *, copies: bool = True, layer: nn.Module | None = None) -> None:
        super().__init__()
        tail = norm_tail(norm)
        if tail is None:
            raise ValueError(f"this {type(norm).__name__} computes more than a BatchNorm, so it cannot be left out.")
        own = vars(self).keys()
        vars(self).update({name: value for name, value in vars(norm).items() if name not in own})
        for name, child in norm.named_children():
            self.add_module(name, child)
        self.copies = copies
        self.tail = tail
        self.adds_bias = layer is not None and layer._parameters.get("bias") is None
        self._layer = () if layer is None else (layer,)  # in a tuple it is not registered as a part of this module
        self.train(norm.training)

    @staticmethod
    def of(norm: nn.Module, *, copies: bool = True, layer: nn.Module | None = None) -> RemovedNorm:
        """Build the kind that ``norm`` needs."""
        kind = _RemovedNormWithTail if norm_tail(norm) else RemovedNorm
        return kind(norm, copies=copies, layer=layer)

    @property
    def layer(self) -> nn.Module | None:
        """The layer in front, as given."""
        return self._layer[0] if self._layer else None

    @property
    def is_identity(self) -> bool:
        """Whether the output is the input itself."""
        return not self.tail and not self.copies

    def forward(self, input: Tensor) -> Tensor:
        """Return the input or a copy of it."""
        return input.clone() if self.copies else input

    def __getattr__(self, name: str) -> Any:
        if name in _TENSORS:
            raise AttributeError(
                f"this BatchNorm over {vars(self).get('num_features')} channels was removed by less_bn, so it has no "
                f"'{name}'; look for isinstance(module, nn.BatchNorm2d) first, or keep it (docs/algorithms/less_bn.md)."
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        """Return the width and what happens to the input, for ``repr``."""
        return f"{self.num_features}{', copies' * self.copies}"


class _RemovedNormWithTail(RemovedNorm):
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        for name in self.tail:
            output = self.get_submodule(name)(output)
        return output
