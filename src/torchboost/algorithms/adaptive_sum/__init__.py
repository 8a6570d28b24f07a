"""AdaSum: gradients or updates of several nodes, summed by their angle."""

from __future__ import annotations

from torchboost.algorithms.adaptive_sum.algorithm import AdaptiveSum, adasum

__all__ = ["AdaptiveSum", "adasum"]
