"""Gradient accumulation."""

from torchboost.algorithms.grad_accumulation.algorithm import Accumulator as Accumulator
from torchboost.algorithms.grad_accumulation.algorithm import GradAccumulation as GradAccumulation
