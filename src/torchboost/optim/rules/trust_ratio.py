"""LARS and LAMB: each layer's gradient, or update, scaled to the size of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchboost.core.arguments import check_flag, check_number
from torchboost.core.torch_private import foreach, foreach_norm
from torchboost.optim.pipeline import Gradients, refuse_sparse
from torchboost.optim.rules.adam import adam_directions, rooted_directions
from torchboost.optim.rules.base import Batch, UpdateRule
from torchboost.optim.rules.options import Common, rule_arguments
from torchboost.optim.rules.sgd import SGD, Forms
from torchboost.optim.tensors import places_by


@dataclass(frozen=True, kw_only=True)
class TrustRatio:
    """Replace each gradient by ``c (g + weight_decay w)``, ``c = coefficient |w| / (|g| + weight_decay |w| + eps)``.

    Works with any optimizer, whose own weight decay must then be 0. If ``|w|`` or ``|g|`` is 0, ``c`` is 1.
    Groups with ``adapt=False`` are skipped, including the decay.
    Cost: one read of weights and gradients for the norms, then one read of both and one write of the gradients.

    Source: Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks", arXiv 1708.03888.

    Args:
        coefficient: Trust coefficient, above 0.
        weight_decay: At least 0. None takes the param group's.
        eps: Added to the denominator, at least 0.
        clip: Limit the rate of a layer, ``c * lr``, to the group's: ``c = min(c / lr, 1)``.
        vectors: Also adapt parameters of one axis (biases, norms). If False they are skipped, including the decay.

    Raises:
        TypeError, ValueError: A setting has the wrong type or is out of range.
    """

    scale_free = False
    coefficient: float = 0.001
    weight_decay: float | None = 0.0
    eps: float = 1e-8
    clip: bool = False
    vectors: bool = False

    def __post_init__(self) -> None:
        check_number("coefficient", self.coefficient, above=True)
        if self.weight_decay is not None:
            check_number("weight_decay", self.weight_decay)
        check_number("eps", self.eps)
        for name in ("clip", "vectors"):
            check_flag(name, getattr(self, name))

    def check(self, gradients: Gradients) -> None:
        """Refuse sparse gradients."""
        refuse_sparse(self, gradients)

    def __call__(self, gradients: Gradients) -> None:
        """Scale in place."""
        params, grads, groups = gradients.params, gradients.grads, gradients.groups
        for places in places_by(map(id, groups)).values():
            chosen = [at for at in places if self.vectors or params[at].ndim > 1]
            group = groups[places[0]]
            if chosen and group.get("adapt", True):
                self._scale([params[at] for at in chosen], [grads[at] for at in chosen], group)

    def _scale(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        decay = group["weight_decay"] if self.weight_decay is None else self.weight_decay
        factor = partial(self._factor, decay=decay, group=group)
        factors = together(factor, foreach_norm(params), foreach_norm(grads))
        if decay:
            # An optimizer with maximize=True negates the gradient, but the decay must still shrink the weights.
            foreach.add_(grads, params, alpha=-decay if group.get("maximize") else decay)
        foreach.mul_(grads, factors)

    def _factor(self, size: Tensor, slope: Tensor, decay: float, group: dict[str, Any]) -> Tensor:
        ratio = self.coefficient * size / (slope + decay * size + self.eps)
        if self.clip:
            ratio = (ratio / group["lr"]).clamp(max=1.0)
        return torch.where((size > 0) & (slope > 0), ratio, torch.ones_like(ratio))


class LARS(SGD):
    """SGD with momentum and :class:`TrustRatio`: layer-wise adaptive rates for large batches.

    ``coefficient``, ``eps``, ``clip`` and ``vectors`` are those of :class:`TrustRatio`. Other arguments, and errors,
    are those of :class:`~torchboost.optim.SGD`, but with ``foreach=None`` and a number as learning rate, lists of
    tensors are updated. A group may set ``adapt=False``. ``transforms`` run before the trust ratio.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = LARS(model.parameters(), lr=1.0, weight_decay=1e-4)
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        momentum: float = 0.9,
        weight_decay: Any = 0.0,
        *,
        coefficient: float = 0.001,
        eps: float = 1e-8,
        clip: bool = False,
        vectors: bool = False,
        nesterov: bool = False,
        **options: Unpack[Forms],
    ) -> None:
        ratio = TrustRatio(coefficient=coefficient, weight_decay=None, eps=eps, clip=clip, vectors=vectors)
        options["transforms"] = (*options.get("transforms", ()), ratio)
        super().__init__(params, lr, momentum, 0.0, weight_decay, nesterov, **options)

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """Update in place. The gradients already contain the decay."""
        lists = group["foreach"] is None and not group["fused"] and not isinstance(group["lr"], Tensor)
        super().update({**group, "weight_decay": 0.0, "foreach": True if lists else group["foreach"]}, batch)


class Lamb(UpdateRule):
    """``u = m^ / (sqrt(v^) + eps) + weight_decay * w``, ``w -= lr * ratio * u`` with ``ratio = |w| / |u|`` per tensor.

    The ratio is at most ``max_ratio``. If ``|w|`` or ``|u|`` is 0, the ratio is 1. State: ``step``, ``exp_avg``,
    ``exp_avg_sq``: 8 bytes per float32 weight. Cost: three more reads of the weights than Adam.

    Source: Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962,
    algorithm 2.

    Other arguments, and errors, are those of :class:`~torchboost.optim.UpdateRule`.

    Args:
        params: A group with ``adapt=False`` has ratio 1.
        betas: Decay rates of the moments, each at least 0 and below 1.
        eps: Added to the root of the second moment.
        max_ratio: Largest ratio.
        eps_in_root: Take the norm of ``m^ / sqrt(v^ + eps) + weight_decay * w`` for the ratio, as MindSpore does.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Lamb(model.parameters(), lr=1e-3, weight_decay=0.01)
    """

    in_pieces = real_only = True

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: Any = 0.0,
        *,
        max_ratio: float = 10.0,
        eps_in_root: bool = False,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**rule_arguments(locals(), adapt=True))

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the entries of the state."""
        return ("step", "exp_avg", "exp_avg_sq")

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """Update in place."""
        if group["maximize"]:
            batch.grads[:] = foreach.neg(batch.grads)
        directions = adam_directions(group, batch)
        measured = rooted_directions(group, batch) if group["adapt"] and group["eps_in_root"] else directions
        for changed in (directions,) if measured is directions else (directions, measured):
            if group["weight_decay"]:
                foreach.add_(changed, batch.params, alpha=float(group["weight_decay"]))
        if group["adapt"]:
            ratio = partial(_ratio, most=float(group["max_ratio"]))
            foreach.mul_(directions, together(ratio, foreach_norm(batch.params), foreach_norm(measured)))
        foreach.add_(batch.params, directions, alpha=-float(group["lr"]))


def _ratio(size: Tensor, steepness: Tensor, most: float) -> Tensor:
    usable = (size > 0) & (steepness > 0)
    return torch.where(usable, (size / steepness).clamp(max=most), torch.ones_like(size))


def together(function: Callable[..., Tensor], *lists: Sequence[Tensor]) -> list[Tensor]:
    """Apply an elementwise function to lists of tensors of shape ``()``, and return such a list.

    If they are of one type, device and precision, a few operations serve all of them instead of a few each.
    """
    kinds = {(type(number), number.device, number.dtype) for numbers in lists for number in numbers}
    if [kind for kind, _, _ in kinds] == [Tensor]:
        return list(function(*(torch.stack(list(numbers)) for numbers in lists)).unbind())
    return [function(*numbers) for numbers in zip(*lists, strict=True)]
