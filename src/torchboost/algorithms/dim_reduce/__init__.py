"""Training in a subspace of a few directions."""

from torchboost.algorithms.dim_reduce.algorithm import DimReduction as DimReduction
