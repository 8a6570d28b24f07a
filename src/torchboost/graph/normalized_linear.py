"""The fully normalised head: a linear layer of cosines. It is in ``graph`` because several algorithms recognise it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Self

__all__ = ["NormalizedLinear"]


class NormalizedLinear(nn.Module):
    """A last layer whose logits depend only on directions: ``multiplier * (x/|x| (w/|w|)^T + bias)``.

    Input rows and weight rows are L2-normalised, so the logits are bounded and need no normalisation layer before them;
    ``multiplier`` is a trainable factor of shape ``(1,)`` (FSDP2 shards no scalars). Norms below 0.01 count as 0.01.
    Cost: one more pass over input and weight.

    Args:
        in_features: Size of an input row.
        out_features: Size of an output row.
        bias: Whether a bias is added before the multiplication.
        device: Device of the parameters.
        dtype: Type of the parameters.
    """

    __constants__ = ("smallest_norm",)
    smallest_norm = 1e-2

    if TYPE_CHECKING:  # TorchScript reads class annotations and does not accept strings
        bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        linear = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias if bias else None)
        self.multiplier = nn.Parameter(torch.ones(1, device=linear.weight.device, dtype=linear.weight.dtype))

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        """Build the normalised form of ``linear``; weight and bias are the same parameters, the multiplier is new.

        No random number is drawn.
        """
        head = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        head.weight = linear.weight
        head.register_parameter("bias", linear.bias)
        head.multiplier = nn.Parameter(torch.ones(1, device=linear.weight.device, dtype=linear.weight.dtype))
        return head.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        smallest = self.smallest_norm
        cosines = F.linear(F.normalize(x, dim=-1, eps=smallest), F.normalize(self.weight, dim=-1, eps=smallest))
        return self.multiplier * (cosines if self.bias is None else cosines + self.bias)

    def extra_repr(self) -> str:
        """Return the sizes, for ``repr``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
