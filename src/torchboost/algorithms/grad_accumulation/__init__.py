"""Gradient accumulation."""

from __future__ import annotations

from torchboost.algorithms.grad_accumulation.algorithm import AccumulationSteps, Accumulator

__all__ = ["AccumulationSteps", "Accumulator"]
