"""Loss scaling: one scale for all gradients, or one per group."""

from __future__ import annotations

from torchboost.algorithms.loss_scale_group.algorithm import GroupGradScaler, LossScaleGroup

__all__ = ["GroupGradScaler", "LossScaleGroup"]
