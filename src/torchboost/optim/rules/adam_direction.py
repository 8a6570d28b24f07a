"""Adam's direction from lists of tensors, for all forms that torch has no kernel for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchboost.core.torch_private import foreach
from torchboost.core.torch_versions import foreach_lerp
from torchboost.optim.rules.base import Batch
from torchboost.optim.updates import Updates, UpdateTransform

__all__ = ["adam_directions", "as_real", "moved", "rooted_directions"]


def as_real(batch: Batch, keys: Sequence[str]) -> Batch:
    """Return a batch with complex tensors as views of real ones, the entries ``keys`` of the states included."""
    if not any(param.is_complex() for param in batch.params):
        return batch
    states = [{key: _real(value) if key in keys else value for key, value in state.items()} for state in batch.states]
    return Batch(list(map(_real, batch.params)), list(map(_real, batch.grads)), states)


def adam_directions(group: Mapping[str, Any], batch: Batch) -> list[Tensor]:
    """Update the moments and return ``m^ / (sqrt(v^) + eps)``, or the variant that the group asks for.

    Args:
        group: ``betas``, ``eps``, and, if they are set, ``nesterov``, ``amsgrad``, ``bias_correction`` and
            ``eps_uncorrected``, as in :class:`~torchboost.optim.Adam`.
        batch: Real tensors. ``maximize`` and a coupled decay must be in the gradients already.
    """
    beta1, beta2 = (float(beta) for beta in group["betas"])
    grads, mean, square, steps = batch.grads, batch.state("exp_avg"), batch.state("exp_avg_sq"), batch.state("step")
    foreach.add_(steps, 1)
    foreach.lerp_(mean, grads, 1 - beta1)
    foreach.mul_(square, beta2)
    foreach.addcmul_(square, grads, grads, 1 - beta2)
    if group.get("amsgrad"):
        largest = batch.state("max_exp_avg_sq")
        foreach.maximum_(largest, square)
        square = largest
    first, second = _corrections(group, steps)
    root = foreach.sqrt(square)
    if not group.get("eps_uncorrected"):
        foreach.div_(root, second)
    foreach.add_(root, float(group["eps"]))
    if group.get("nesterov"):
        directions = foreach_lerp(mean, grads, 1 - beta1)
        foreach.div_(directions, root)
    else:
        directions = list(foreach.div(mean, root))
    sizes = [s / f if group.get("eps_uncorrected") else 1 / f for f, s in zip(first, second, strict=True)]
    foreach.mul_(directions, sizes)
    return directions


def rooted_directions(group: Mapping[str, Any], batch: Batch) -> list[Tensor]:
    """Return ``m^ / sqrt(v^ + eps)`` from moments that are up to date."""
    first, second = _corrections(group, batch.state("step"))
    root = foreach.div(batch.state("exp_avg_sq"), [s * s for s in second])
    foreach.add_(root, float(group["eps"]))
    foreach.sqrt_(root)
    directions = list(foreach.div(batch.state("exp_avg"), root))
    foreach.div_(directions, first)
    return directions


def moved(group: dict[str, Any], batch: Batch, transforms: Sequence[UpdateTransform]) -> None:
    """Update the parameters of a batch by Adam's rule, with transforms between the rule and the weights."""
    batch = as_real(batch, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    if group["maximize"]:
        batch.grads[:] = foreach.neg(batch.grads)
    if decay and group["decoupled_weight_decay"]:
        foreach.mul_(batch.params, 1 - lr * decay)
    elif decay:
        batch.grads[:] = foreach.add(batch.grads, batch.params, alpha=decay)
    updates = Updates(batch.params, adam_directions(group, batch), batch.grads, group)
    for transform in transforms:
        transform(updates)
    foreach.add_(batch.params, updates.updates, alpha=-lr)


def _corrections(group: Mapping[str, Any], steps: Sequence[Tensor]) -> tuple[list[float], list[float]]:
    """Return ``1 - beta1^t`` and ``sqrt(1 - beta2^t)`` per parameter, 1 without bias correction."""
    if not group.get("bias_correction", True):
        return [1.0] * len(steps), [1.0] * len(steps)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    counts = [float(step) for step in steps]
    return [1 - beta1**count for count in counts], [(1 - beta2**count) ** 0.5 for count in counts]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
