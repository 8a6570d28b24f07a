"""The module in place of a removed BatchNorm: it returns its input and records what it replaced."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torchboost.core.torch_private import buffer_slots, child_slots, parameter_slots
from torchboost.graph.structure import norm_tail

__all__ = ["NORM_TENSORS", "RemovedNorm"]

_COPYING = 4
"""The protocol of ``copy``, and the lowest one of ``pickle`` itself. ``torch.save`` takes 2."""

NORM_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class RemovedNorm(nn.Module):
    """The identity in place of a BatchNorm; its type marks the removal, also in a wrapped or sharded model.

    It has the settings of the BatchNorm (``num_features``, ``eps``, ``momentum``, ``affine``,
    ``track_running_stats`` and any other attribute that was set), but none of its tensors. If a subclass of BatchNorm
    runs modules after the normalisation, such as an activation, it runs them too, under the same names. It works with
    TorchScript, tracing and ``torch.export``.

    Args:
        norm: The BatchNorm; see :func:`~torchboost.graph.structure.norm_tail` for the kinds that can be removed.
        copies: Return a copy of the input. Needed if the input is used elsewhere and something may write to the output
            in place.
        layer: The layer before it, if this BatchNorm is its only consumer; the BatchNorm can then be folded into it.
        behind: ``layer`` is the one after it instead.

    Attributes:
        copies: As given.
        tail: Names of the modules that the input passes through; they are the first children, in this order.
        behind: As given.
        adds_bias: Whether ``layer`` had no bias; if it has one now, that bias holds the shift of the BatchNorm.
        batches: Number of batches that the BatchNorm had counted; None if it had no counter.

    Raises:
        ValueError: It is not known what the BatchNorm computes.
    """

    __jit_unused_properties__ = ("layer", "is_identity")

    def __init__(
        self, norm: nn.Module, *, copies: bool = True, layer: nn.Module | None = None, behind: bool = False
    ) -> None:
        super().__init__()
        tail = norm_tail(norm)
        if tail is None:
            raise ValueError(f"this {type(norm).__name__} computes more than a BatchNorm, so it cannot be removed.")
        own = vars(self).keys()
        vars(self).update({name: value for name, value in vars(norm).items() if name not in own})
        for name in dict.fromkeys((*tail, *child_slots(norm))):
            self.add_module(name, child_slots(norm)[name])
        count = buffer_slots(norm)["num_batches_tracked"]
        self.batches = None if count is None else 0 if count.is_meta else int(count)
        self.copies = copies
        self.behind = behind
        self.tail = tail
        self.adds_bias = layer is not None and parameter_slots(layer).get("bias") is None
        self._layer = () if layer is None else (layer,)  # in a tuple it is not registered as a submodule
        self.training = norm.training

    @property
    def layer(self) -> nn.Module | None:
        """The adjacent layer, as given."""
        return self._layer[0] if self._layer else None

    @property
    def is_identity(self) -> bool:
        """Whether the output is the input itself."""
        return not self.tail and not self.copies

    def forward(self, input: Tensor) -> Tensor:
        """Return the input or a copy of it, passed through the tail."""
        output = input.clone() if self.copies else input
        for at, child in enumerate(self.children()):  # the only form of indexing modules that TorchScript accepts
            if at < len(self.tail):
                output = child(output)
        return output

    def __getattr__(self, name: str) -> Any:
        if name in NORM_TENSORS:
            raise AttributeError(
                f"this BatchNorm over {vars(self).get('num_features')} channels was removed by less_bn, so it has no "
                f"'{name}'; check isinstance(module, nn.BatchNorm2d) first, or keep it (docs/algorithms/less_bn.md)."
            )
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Warn if the model is written by ``torch.save``: what was removed is a class of this package."""
        if protocol < _COPYING:
            warnings.warn(
                "the whole model is saved, and less_bn removed BatchNorms from it. The file loads only if torchboost "
                "is installed, with torch.load(file, weights_only=False). For a file that loads anywhere, save "
                "torchboost.plain_state_dict(model), which fits the original architecture.",
                UserWarning,
                stacklevel=2,
            )
        return super().__reduce_ex__(protocol)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if f"{prefix}running_mean" in state_dict:
            error_msgs.append(
                f"'{prefix[:-1]}' is a BatchNorm in this state dict, and less_bn removed it from the model; load a "
                "state dict of the original architecture with torchboost.load_plain_state_dict(model, state)."
            )

    def extra_repr(self) -> str:
        """Return the width and what happens to the input, for ``repr``."""
        return f"{self.num_features}{', copies' * self.copies}"
