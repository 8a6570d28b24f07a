"""LAMB: Adam with each layer's step scaled to the size of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchboost.core.torch_private import foreach
from torchboost.optim.gradients import GradientTransform
from torchboost.optim.rules.base import Batch, Nonfinite, UpdateRule
from torchboost.optim.tensor_lists import together

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
        maximize: Maximize the objective instead of minimizing it.
        master_weights: Keep a float32 copy of bfloat16 and float16 parameters, and their moments in float32.
        transforms: See :class:`~torchboost.optim.rules.base.UpdateRule`.
        nonfinite: See :class:`~torchboost.optim.rules.base.UpdateRule`.

    Raises:
        TypeError, ValueError: An option is invalid.

    Example:
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
        maximize: bool = False,
        master_weights: bool = False,
        transforms: Sequence[GradientTransform] = (),
        nonfinite: Nonfinite = "ignore",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_ratio": max_ratio,
            "eps_in_root": eps_in_root,
            "adapt": True,
            "maximize": maximize,
            "master_weights": master_weights,
        }
        super().__init__(params, defaults, transforms=transforms, nonfinite=nonfinite)

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the entries of the state."""
        return ("step", "exp_avg", "exp_avg_sq")

    def init_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a step of 0 and moments of 0."""
        moments = {
            key: torch.zeros_like(param, memory_format=torch.preserve_format) for key in ("exp_avg", "exp_avg_sq")
        }
        return {"step": torch.zeros((), dtype=torch.float32), **moments}

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """Update in place."""
        beta1, beta2 = (float(beta) for beta in group["betas"])
        mean, square, steps = batch.state("exp_avg"), batch.state("exp_avg_sq"), batch.state("step")
        params, grads, mean, square = (_real(tensors) for tensors in (batch.params, batch.grads, mean, square))
        if group["maximize"]:
            grads = list(foreach.neg(grads))
        foreach.add_(steps, 1)
        foreach.lerp_(mean, grads, 1 - beta1)
        foreach.mul_(square, beta2)
        foreach.addcmul_(square, grads, grads, 1 - beta2)
        counts = [float(step) for step in steps]
        first = foreach.div(mean, [1 - beta1**count for count in counts])
        second = foreach.div(square, [1 - beta2**count for count in counts])
        eps, measured = float(group["eps"]), None
        if group["adapt"] and group["eps_in_root"]:
            root = foreach.add(second, eps)
            foreach.sqrt_(root)
            measured = _decayed(group, params, foreach.div(first, root))
        foreach.sqrt_(second)
        foreach.add_(second, eps)
        foreach.div_(first, second)
        directions = _decayed(group, params, first)
        if group["adapt"]:
            ratio = partial(_ratio, most=float(group["max_ratio"]))
            steepness = foreach.norm(directions if measured is None else measured)
            foreach.mul_(directions, together(ratio, foreach.norm(params), steepness))
        foreach.add_(params, directions, alpha=-float(group["lr"]))


def _decayed(group: Mapping[str, Any], params: Sequence[Tensor], directions: Sequence[Tensor]) -> list[Tensor]:
    """Add the decay in place."""
    if group["weight_decay"]:
        foreach.add_(directions, params, alpha=float(group["weight_decay"]))
    return list(directions)


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


def _ratio(size: Tensor, steepness: Tensor, most: float) -> Tensor:
    usable = (size > 0) & (steepness > 0)
    return torch.where(usable, (size / steepness).clamp(max=most), torch.ones_like(size))
