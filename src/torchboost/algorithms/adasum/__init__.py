"""AdaSum: gradients or updates of several nodes, summed by their angle."""

from __future__ import annotations

from torchboost.algorithms.adasum.algorithm import AdaptiveSum, adasum

__all__ = ["AdaptiveSum", "adasum"]
