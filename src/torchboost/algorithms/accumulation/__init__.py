"""Gradient accumulation."""

from __future__ import annotations

from torchboost.algorithms.accumulation.algorithm import Accumulation, Accumulator

__all__ = ["Accumulation", "Accumulator"]
