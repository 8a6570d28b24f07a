"""Memory layouts of tensors: compare them, match them, make a tensor writable."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["aligned", "is_dense", "same_layout", "writable"]


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
