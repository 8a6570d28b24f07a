"""Gradient accumulation."""

from __future__ import annotations

from torchboost.algorithms.grad_accumulation.algorithm import Accumulator, GradAccumulation

__all__ = ["Accumulator", "GradAccumulation"]
