"""Tensors of a step: their memory layouts, sparse values, and figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from torchboost.core.torch_private import foreach, sparse_values
from torchboost.core.wrapping import living

__all__ = [
    "aligned",
    "all_finite",
    "holds_a_part",
    "is_dense",
    "merge_sparse",
    "same_layout",
    "stand_in",
    "values_of",
    "writable",
]


def holds_a_part(optimizer: Optimizer) -> bool:
    """Whether an optimizer is inside a ``ZeroRedundancyOptimizer``, which gives each rank some of the parameters.

    torch gives the inner optimizer no reference to it. So the objects of this process are searched
    (:func:`~torchboost.core.wrapping.living`). Cost: tens of milliseconds, nothing in a run of one process. FSDP2
    does not need this, because a DTensor knows its ranks.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    # If there is such an optimizer, its module is imported already; importing it here would raise warnings.
    kind: Any = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    outers: Any = () if kind is None else torch.compiler.disable(living)(kind)
    return any(getattr(outer, "optim", None) is optimizer for outer in outers)


def all_finite(grads: Sequence[Tensor]) -> bool:
    """Whether all gradients are finite, including sparse ones. Cost: one read, and one synchronisation per device."""
    norms: dict[torch.device, list[Tensor]] = {}
    filled = [values for grad in grads if (values := values_of(grad)).numel()]
    for norm in foreach.norm(filled, float("inf")) if filled else ():
        norms.setdefault(norm.device, []).append(norm)
    return all(bool(torch.stack([norm.float() for norm in of_one]).isfinite().all()) for of_one in norms.values())


def values_of(grad: Tensor) -> Tensor:
    """Return the values of a gradient; of a sparse one, those of its stored rows."""
    return sparse_values(grad) if grad.layout is torch.sparse_coo else grad


def merge_sparse(grads: list[Tensor]) -> None:
    """Merge duplicate rows of sparse gradients; dense gradients are not changed."""
    for position, grad in enumerate(grads):
        if grad.layout is torch.sparse_coo:
            grads[position] = grad.coalesce()


def stand_in(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a dense tensor with the shape of ``like``, for checks; it holds one undefined number in memory."""
    return torch.empty((), dtype=dtype, device=like.device).expand(like.shape)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in any order of the axes."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((t, s) for t, s in zip(tensor.stride(), tensor.shape, strict=True) if s > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(value: Tensor, model: Tensor) -> bool:
    """Whether two tensors of equal shape have equal strides, axes of length one aside."""
    if value.stride() == model.stride():
        return True
    axes = zip(model.shape, value.stride(), model.stride(), strict=True)
    return all(stride == expected for size, stride, expected in axes if size > 1)


def aligned(value: Tensor, model: Tensor) -> Tensor:
    """Return ``value``, or a copy of it, in the memory layout of ``model``, which has the same shape.

    Kernels that take lists of tensors read all of them in the memory order of the first. A gradient in another layout
    would be read at the wrong places.
    """
    if same_layout(value, model):
        return value
    return torch.empty_like(model, dtype=value.dtype, memory_format=torch.preserve_format).copy_(value)


def writable(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy if its entries share memory, as in gradients that ``autograd.grad`` expands.

    torch refuses to change such a tensor in place. Sparse tensors are returned as they are.
    """
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return tensor
    shared = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.contiguous() if shared else tensor
