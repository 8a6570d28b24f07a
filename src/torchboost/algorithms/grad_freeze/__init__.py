"""Gradient freezing."""

from torchboost.algorithms.grad_freeze.algorithm import GradFreeze as GradFreeze
from torchboost.algorithms.grad_freeze.algorithm import freeze_blocks as freeze_blocks
