"""Check that a fused optimizer kernel of torch computes its rule; some do not, in some precisions."""

from __future__ import annotations

from functools import cache

import torch
from torch.optim import Optimizer

__all__ = ["miscomputes"]

_ENTRIES = 67
"""Several full vectors on every processor, and a remainder."""


def miscomputes(kind: type[Optimizer], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether two fused steps give other weights than two ordinary steps.

    torch 2.13's fused SGD does so in bfloat16 and float16 on the CPU: half of each vector gets the update of other
    weights. So each kernel is tried once per precision and device.

    Args:
        kind: An optimizer class of torch that takes ``fused``.
        dtype: Floating-point precision of the weights.
        device: Device of the weights.

    Returns:
        False if the kernel is right or cannot be tried; in the second case torch raises when it is used.
    """
    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            return _differs(kind, dtype, device)
    except RuntimeError:
        return False


@cache
def _differs(kind: type[Optimizer], dtype: torch.dtype, device: torch.device) -> bool:
    fused, plain = (_moved(kind, dtype, device, fused=fused) for fused in (True, False))
    return not torch.allclose(fused, plain, rtol=0.1, atol=0.1)


def _moved(kind: type[Optimizer], dtype: torch.dtype, device: torch.device, *, fused: bool) -> torch.Tensor:
    """Return weights after two steps of about 1 each."""
    weights = torch.linspace(-2, 2, _ENTRIES, device=device).to(dtype).requires_grad_()
    optimizer = kind([weights], lr=1.0, fused=fused)  # pyright: ignore[reportCallIssue]
    for _ in range(2):
        weights.grad = torch.linspace(1.5, 0.5, _ENTRIES, device=device).to(dtype)
        optimizer.step()
    return weights.detach().float()
