"""Gradient accumulation."""

from __future__ import annotations

from torchboost.algorithms.accumulation.algorithm import AccumulationSteps, Accumulator

__all__ = ["AccumulationSteps", "Accumulator"]
