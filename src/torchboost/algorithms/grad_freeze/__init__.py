"""Gradient freezing."""

from __future__ import annotations

from torchboost.algorithms.grad_freeze.algorithm import BlockFreeze, freeze_blocks

__all__ = ["BlockFreeze", "freeze_blocks"]
