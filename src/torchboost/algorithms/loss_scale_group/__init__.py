"""Loss scaling: one scale for all gradients, or one per group."""

from torchboost.algorithms.loss_scale_group.algorithm import GroupGradScaler as GroupGradScaler
from torchboost.algorithms.loss_scale_group.algorithm import LossScaleGroup as LossScaleGroup
