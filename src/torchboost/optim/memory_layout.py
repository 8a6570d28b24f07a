"""Tensors that walk through memory as another tensor does."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["aligned", "is_dense", "same_layout", "writable"]


def is_dense(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor fill a stretch of memory, in any order of the axes."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((t, s) for t, s in zip(tensor.stride(), tensor.shape, strict=True) if s > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(value: Tensor, model: Tensor) -> bool:
    """Whether both, of equal shape, have equal strides; those of axes of length one mean nothing."""
    if value.stride() == model.stride():
        return True
    axes = zip(model.shape, value.stride(), model.stride(), strict=True)
    return all(own == wanted for size, own, wanted in axes if size > 1)


def aligned(value: Tensor, model: Tensor) -> Tensor:
    """Return ``value``, or a copy of it, in the memory layout of ``model``, whose shape it has.

    Kernels that take lists of tensors walk through all of them in the order of the first: a gradient in another layout
    would be read at the wrong places.
    """
    if same_layout(value, model):
        return value
    return torch.empty_like(model, dtype=value.dtype, memory_format=torch.preserve_format).copy_(value)


def writable(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy of one whose numbers share memory, as in gradients that ``autograd.grad`` expands.

    torch refuses to change such a tensor in place. Sparse tensors are returned as they are.
    """
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return tensor
    shared = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.contiguous() if shared else tensor
