"""Training in a subspace of a few directions."""

from __future__ import annotations

from torchboost.algorithms.dim_reduce.algorithm import DimReduction

__all__ = ["DimReduction"]
