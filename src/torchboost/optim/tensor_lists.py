"""An operation on lists of numbers, as torch has for lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["together"]


def together(function: Callable[..., Tensor], *lists: Sequence[Tensor]) -> list[Tensor]:
    """Apply an elementwise function to lists of scalars, in a few operations instead of a few per scalar.

    Args:
        function: Elementwise; given tensors of equal shape, returns one of that shape.
        lists: Tensors of shape ``()``; all lists have the same length.

    Returns:
        Tensors of shape ``()``. Scalars that differ in type, device or precision are processed one by one.
    """
    kinds = {(type(number), number.device, number.dtype) for numbers in lists for number in numbers}
    if [kind for kind, _, _ in kinds] == [Tensor]:
        return list(function(*(torch.stack(list(numbers)) for numbers in lists)).unbind())
    return [function(*numbers) for numbers in zip(*lists, strict=True)]
