"""A linear layer between normalised rows: the head that LessBN can put at the end of a network."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["NormalizedLinear"]

SMALLEST_SQUARE = 1e-4


class NormalizedLinear(nn.Linear):
    """Linear layer whose input and weight rows have length one, with a trainable factor.

    ``y = multiplier * (x^ w^T + bias)`` with ``v^ = v / sqrt(max(sum v^2, 1e-4))`` per row. Without bias every
    output is a cosine, so its size does not depend on that of the features. Lengths are computed in at least
    float32; the product follows autocast. Cost: two reductions more than ``nn.Linear``.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the output.
        bias: Whether there is a bias; it is multiplied as well.
        multiplier: Start value of the factor, a parameter of shape ``(1,)``.

    Example:
        >>> import torch
        >>> from torchboost.core.normalized_linear import NormalizedLinear
        >>> NormalizedLinear(4, 3)(torch.randn(5, 4)).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        multiplier: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.multiplier = nn.Parameter(torch.full((1,), float(multiplier), device=device, dtype=dtype))

    @classmethod
    def of(cls, linear: nn.Linear, *, multiplier: float = 1.0) -> Self:
        """Return the normalised form of a layer; it holds the very same weight and bias parameters."""
        head = cls(linear.in_features, linear.out_features, bias=False, multiplier=multiplier, device="meta")
        head.weight = linear.weight
        head.bias = linear.bias
        weight = linear.weight
        head.multiplier = nn.Parameter(torch.full((1,), float(multiplier), device=weight.device, dtype=weight.dtype))
        return head

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        product = functional.linear(_unit_rows(input), _unit_rows(self.weight), self.bias)
        return product * self.multiplier.to(product.dtype)


def _unit_rows(rows: Tensor) -> Tensor:
    exact = rows if rows.dtype == torch.float64 else rows.float()
    length = exact.square().sum(-1, keepdim=True).clamp_min(SMALLEST_SQUARE).sqrt()
    return (exact / length).to(rows.dtype)
