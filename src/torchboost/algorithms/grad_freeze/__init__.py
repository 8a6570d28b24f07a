"""Gradient freezing."""

from __future__ import annotations

from torchboost.algorithms.grad_freeze.algorithm import GradFreeze, freeze_blocks

__all__ = ["GradFreeze", "freeze_blocks"]
