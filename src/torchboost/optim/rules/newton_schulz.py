"""Newton-Schulz iteration: the nearest orthogonal matrices of a batch of matrices, by matrix products only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchboost.core.hardware import half_precision_is_fast

__all__ = ["QUINTIC", "Polynomial", "faster_dtype", "orthogonalized"]

Polynomial = tuple[float, float, float]
"""Coefficients ``(a, b, c)`` of one iteration: ``X <- a X + b (X X') X + c (X X')^2 X``."""

QUINTIC: Polynomial = (3.4445, -4.7750, 2.0315)
"""K. Jordan's coefficients, for any number of iterations."""

RESTART = 3
"""Iterations on one Gram matrix. After more, the rounding of small singular values grows too large."""

ELONGATED = 2
"""Ratio of the sides from which the Gram form needs fewer operations."""


def orthogonalized(matrices: Tensor, polynomials: Sequence[Polynomial], *, eps: float = 1e-7) -> Tensor:
    """Return ``U V'`` of the singular value decomposition of each matrix, approximately.

    With five iterations of :data:`QUINTIC` the singular values of the result are between about 0.7 and 1.2, for all
    that are at least 0.003 times the Frobenius norm of the matrix.

    Cost: per iteration ``2 m^2 n + m^3`` multiplications for a matrix of ``m <= n``. If ``n >= 2 m``, iterations work
    on the ``m x m`` Gram matrix, and the matrix itself is read twice per three iterations. In float32 both forms agree
    with float64 to 1e-5 of the norm of the result.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), for the iteration; the
    Gram form with restarts is that of "Gram Newton-Schulz" (Dao-AILab, 2026).

    Args:
        matrices: Shape ``(..., m, n)``, float32 or bfloat16; not changed.
        polynomials: One per iteration.
        eps: Smallest norm by which a matrix is divided.

    Returns:
        Same shape and precision as ``matrices``.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if tall else matrices
    # Row by row first: over millions of entries torch's norm in float32 is wrong in the fifth digit.
    norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True, dtype=torch.float32)
    norm = torch.linalg.vector_norm(norms, dim=-2, keepdim=True).clamp(min=eps)
    unit = (wide / norm).to(matrices.dtype)
    flat = unit.reshape(-1, *unit.shape[-2:])
    rows, columns = flat.shape[-2:]
    turned = _by_gram(flat, polynomials) if columns >= ELONGATED * rows else _plainly(flat, polynomials)
    result = turned.reshape(wide.shape)
    return result.mT if tall else result


@torch.compiler.disable()
def faster_dtype(device: torch.device) -> torch.dtype:
    """Return the precision in which products of matrices are fast: bfloat16, except on CPUs that are slow in it.

    On a CPU this is measured (:func:`~torchboost.core.hardware.half_precision`); the processor's flags are not asked.
    Several processes on CPUs take float32 without a measurement, because all of them must use one precision.

    Cost: on a CPU 0.1 s, once per machine.
    """
    if device.type != "cpu":
        return torch.bfloat16
    alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
    return torch.bfloat16 if alone and half_precision_is_fast(device, 0) else torch.float32


def _plainly(x: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    for a, b, c in polynomials:
        gram = x @ x.mT
        inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, inner, x, beta=a)
    return x


def _by_gram(x: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    """Iterate on ``X X'``, and apply the product of the polynomials to ``X`` every few iterations."""
    for start in range(0, len(polynomials), RESTART):
        part = polynomials[start : start + RESTART]
        gram, product = x @ x.mT, None
        for position, (a, b, c) in enumerate(part):
            inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            if position + 1 < len(part):  # X X' of the next iterate: all of these matrices commute
                half = torch.baddbmm(gram, inner, gram, beta=a)
                gram = torch.baddbmm(half, half, inner, beta=a)
            if product is None:
                product = inner
                product.diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                product = torch.baddbmm(product, inner, product, beta=a)
        if product is not None:
            x = product @ x
    return x
