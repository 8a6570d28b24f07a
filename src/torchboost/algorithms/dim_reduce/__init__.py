"""Training in a subspace of a few directions."""

from __future__ import annotations

from torchboost.algorithms.dim_reduce.algorithm import DimReduction
from torchboost.algorithms.dim_reduce.basis import DimReduceBasis
from torchboost.algorithms.dim_reduce.optimizer import DimReduceOptimizer

__all__ = ["DimReduceBasis", "DimReduceOptimizer", "DimReduction"]
