"""Divide gradients by their scale and look for overflow, in one pass over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchboost.core.torch_private import check_and_unscale_, sparse_values
from torchboost.errors import IncompatibleError

__all__ = ["Part", "check_scaled", "last_bad", "overflow_anywhere", "unscale_"]

Part = tuple[Sequence[Tensor], float]
"""Parameters whose gradients carry the same scale, and that scale."""


def check_scaled(parts: Sequence[Part]) -> None:
    """Refuse gradients that unscaling would ruin, before any is divided.

    Raises:
        IncompatibleError: A gradient in float16: what the scale lifted out of the subnormal numbers would fall back.
    """
    for params, _ in parts:
        for param in params:
            if param.grad is not None and param.grad.dtype is torch.float16:
                raise IncompatibleError(
                    f"a parameter of shape {tuple(param.shape)} has its gradient in float16, which cannot hold it once "
                    "it is unscaled; keep the parameters in float32 and compute in float16 under torch.autocast."
                )


@torch.no_grad()
def unscale_(parts: Sequence[Part]) -> list[Tensor]:
    """Divide all gradients by the scale of their part, in place.

    Args:
        parts: Gradients: dense, sparse or sharded (DTensor), in any precision but float16; None is skipped.

    Returns:
        For each device a tensor with one number per part (float32): 0 if all gradients there are finite.

    Cost: one pass over the gradients; no wait for the device.
    """
    found: dict[torch.device, Tensor] = {}
    for index, (params, scale) in enumerate(parts):
        batches: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for param in params:
            if param.grad is not None:
                numbers = _numbers(param.grad)
                batches.setdefault((numbers.device, numbers.dtype), []).append(numbers)
        for (device, _), grads in batches.items():
            if device not in found:
                found[device] = torch.zeros(len(parts), dtype=torch.float32, device=device)
            inverse = torch.full((), 1.0 / scale, dtype=torch.float32, device=device)
            check_and_unscale_(grads, found[device][index : index + 1], inverse)
    return list(found.values())


def overflow_anywhere(
    found: Sequence[Tensor], parts: int, device: torch.device, *, agree: bool, process_group: Any = None
) -> list[bool]:
    """Return for each part whether a gradient was not finite on any device or, with ``agree``, on any rank.

    Args:
        found: What :func:`unscale_` returned.
        parts: Number of parts.
        device: The device on which the ranks exchange the result.
        agree: Whether to ask the other ranks; all of them must then call this.
        process_group: The ranks; None stands for all.

    Cost: one wait for the device; with several ranks one collective of ``parts`` numbers.
    """
    total = torch.zeros(parts, dtype=torch.float32, device=device)
    for flags in found:
        total += flags.to(device)
    if agree and dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1:
        dist.all_reduce(total, dist.ReduceOp.MAX, group=process_group)
    return [flag > 0 for flag in total.tolist()]


def last_bad(params: Sequence[Tensor]) -> int | None:
    """Return the last parameter whose gradient is not finite: the nearest to the loss in most models."""
    for index in range(len(params) - 1, -1, -1):
        grad = params[index].grad
        if grad is not None and not bool(_numbers(grad).isfinite().all()):
            return index
    return None


def _numbers(grad: Any) -> Tensor:
    """The stored numbers of a gradient; shards of this rank only."""
    if hasattr(grad, "to_local"):
        grad = grad.to_local()
    values = sparse_values(grad) if grad.is_sparse else grad
    if not values.is_complex():
        return values
    # The kernel knows real numbers only; a conjugate that is not worked out yet has the memory of the other one.
    return torch.view_as_real(values.conj() if values.is_conj() else values)
