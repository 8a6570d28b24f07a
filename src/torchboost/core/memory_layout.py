"""Tensors that walk through memory as another tensor does."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["aligned", "same_layout"]


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
