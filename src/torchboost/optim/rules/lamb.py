"""LAMB: Adam's direction with two transforms, the decay and the scale of each layer's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import Unpack

from torchboost.core.torch_private import foreach
from torchboost.optim.rules.adam import adam_directions, as_real, rooted_directions
from torchboost.optim.rules.base import Batch, UpdateRule
from torchboost.optim.rules.options import Common, rule_arguments
from torchboost.optim.transforms import AddDecay, ScaleByTrustRatio, Updates

__all__ = ["Lamb"]


class Lamb(UpdateRule):
    """``u = m^ / (sqrt(v^) + eps) + weight_decay * w``, ``w -= lr * ratio * u`` with ``ratio = |w| / |u|`` per tensor.

    The ratio is at most ``max_ratio``; if ``|w|`` or ``|u|`` is 0, it is 1. State: ``step``, ``exp_avg``,
    ``exp_avg_sq``: 8 bytes per float32 weight. Cost: three more reads of the weights than Adam.

    Source: Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962,
    algorithm 2.

    Args:
        params: Parameters, named parameters or groups; a group with ``adapt=False`` has ratio 1.
        lr: Learning rate: a float, a tensor with one element, a list with one per update, or a function of the update.
        betas: Decay rates of the moments, each at least 0 and below 1.
        eps: Added to the root of the second moment.
        weight_decay: At least 0; also a list or function, as ``lr``.
        max_ratio: Largest ratio.
        eps_in_root: Take the norm of ``m^ / sqrt(v^ + eps) + weight_decay * w`` for the ratio, as MindSpore does.
        **common: See :class:`~torchboost.optim.UpdateRule`.

    Raises:
        TypeError, ValueError: An option is invalid.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Lamb(model.parameters(), lr=1e-3, weight_decay=0.01)
    """

    in_pieces = True

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
        batch = as_real(batch, ("exp_avg", "exp_avg_sq"))
        if group["maximize"]:
            batch.grads[:] = foreach.neg(batch.grads)
        updates = Updates(batch.params, adam_directions(group, batch), batch.grads, group)
        if group["adapt"] and group["eps_in_root"]:
            updates.measured = rooted_directions(group, batch)
        for transform in (AddDecay(), ScaleByTrustRatio(max_ratio=None)):
            transform(updates)
        foreach.add_(batch.params, updates.updates, alpha=-float(group["lr"]))
