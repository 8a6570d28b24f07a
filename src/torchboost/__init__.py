"""torchboost: faster training of PyTorch models within a stated accuracy budget, measured on the user's own model.

Names load on first use, so that importing the package costs next to nothing beside torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchboost.lazy import exports

if TYPE_CHECKING:
    from torchboost.algorithms.accumulation import Accumulation, Accumulator
    from torchboost.algorithms.adasum import AdaptiveSum, sum_adaptively
    from torchboost.algorithms.autocast import Autocast, autocast_forward
    from torchboost.algorithms.centralization import Centralization, centralize_gradients
    from torchboost.algorithms.compilation import Compile
    from torchboost.algorithms.dim_reduce import SubspaceDescent
    from torchboost.algorithms.freeze import BlockFreeze, freeze_blocks
    from torchboost.algorithms.fused_optimizer import FusedOptimizer, fuse
    from torchboost.algorithms.host_memory import HostMemory, retain_host_memory
    from torchboost.algorithms.less_bn import LessBatchNorm, reduce_batch_norm
    from torchboost.algorithms.loss_scale import GroupGradScaler, GroupLossScale
    from torchboost.algorithms.memory_format import ChannelsLast, channels_last
    from torchboost.compat.adasum import AdaSum
    from torchboost.compat.auto_boost import AutoBoost
    from torchboost.compat.cells import BoostTrainOneStepCell, WithLoss
    from torchboost.compat.dim_reduce import DimReduce
    from torchboost.compat.freeze import FreezeOpt, GradientFreeze, freeze_cell
    from torchboost.compat.loss_scale import BoostTrainOneStepWithLossScaleCell, GroupLossScaleManager
    from torchboost.compat.process import OptimizerProcess, ParameterProcess
    from torchboost.compat.wrappers import GradientAccumulation, LessBN
    from torchboost.config import BoostConfig
    from torchboost.core.algorithm import Algorithm, Attached, Attachment, Target, Traits, attach_all
    from torchboost.core.folding import fold_batch_norms
    from torchboost.core.loss_scale import DynamicLossScale, FixedLossScale
    from torchboost.core.plain_state import load_plain_state_dict, plain_state_dict
    from torchboost.core.scale_rule import ScaleRule
    from torchboost.core.step import StepOutput, TrainStep
    from torchboost.distributed.topology import NodeGroups, Topology
    from torchboost.errors import ConfigError, IncompatibleError, NoEffectWarning, ScaleCollapseWarning
    from torchboost.optim.pipeline import GradientPipeline
    from torchboost.plan import Plan, boost
    from torchboost.registry import LEVELS, REGISTRY, Facts

__version__ = "0.1.0"

__all__ = [
    "LEVELS",
    "REGISTRY",
    "Accumulation",
    "Accumulator",
    "AdaSum",
    "AdaptiveSum",
    "Algorithm",
    "Attached",
    "Attachment",
    "AutoBoost",
    "Autocast",
    "BlockFreeze",
    "BoostConfig",
    "BoostTrainOneStepCell",
    "BoostTrainOneStepWithLossScaleCell",
    "Centralization",
    "ChannelsLast",
    "Compile",
    "ConfigError",
    "DimReduce",
    "DynamicLossScale",
    "Facts",
    "FixedLossScale",
    "FreezeOpt",
    "FusedOptimizer",
    "GradientAccumulation",
    "GradientFreeze",
    "GradientPipeline",
    "GroupGradScaler",
    "GroupLossScale",
    "GroupLossScaleManager",
    "HostMemory",
    "IncompatibleError",
    "LessBN",
    "LessBatchNorm",
    "NoEffectWarning",
    "NodeGroups",
    "OptimizerProcess",
    "ParameterProcess",
    "Plan",
    "ScaleCollapseWarning",
    "ScaleRule",
    "StepOutput",
    "SubspaceDescent",
    "Target",
    "Topology",
    "TrainStep",
    "Traits",
    "WithLoss",
    "attach_all",
    "autocast_forward",
    "boost",
    "centralize_gradients",
    "channels_last",
    "fold_batch_norms",
    "freeze_blocks",
    "freeze_cell",
    "fuse",
    "load_plain_state_dict",
    "plain_state_dict",
    "reduce_batch_norm",
    "retain_host_memory",
    "sum_adaptively",
]

_HOMES = {
    "torchboost.algorithms.accumulation": ("Accumulation", "Accumulator"),
    "torchboost.algorithms.adasum": ("AdaptiveSum", "sum_adaptively"),
    "torchboost.algorithms.autocast": ("Autocast", "autocast_forward"),
    "torchboost.algorithms.centralization": ("Centralization", "centralize_gradients"),
    "torchboost.algorithms.compilation": ("Compile",),
    "torchboost.algorithms.dim_reduce": ("SubspaceDescent",),
    "torchboost.algorithms.freeze": ("BlockFreeze", "freeze_blocks"),
    "torchboost.algorithms.fused_optimizer": ("FusedOptimizer", "fuse"),
    "torchboost.algorithms.host_memory": ("HostMemory", "retain_host_memory"),
    "torchboost.algorithms.less_bn": ("LessBatchNorm", "reduce_batch_norm"),
    "torchboost.algorithms.loss_scale": ("GroupGradScaler", "GroupLossScale"),
    "torchboost.algorithms.memory_format": ("ChannelsLast", "channels_last"),
    "torchboost.compat.adasum": ("AdaSum",),
    "torchboost.compat.auto_boost": ("AutoBoost",),
    "torchboost.compat.cells": ("BoostTrainOneStepCell", "WithLoss"),
    "torchboost.compat.dim_reduce": ("DimReduce",),
    "torchboost.compat.freeze": ("FreezeOpt", "GradientFreeze", "freeze_cell"),
    "torchboost.compat.loss_scale": ("BoostTrainOneStepWithLossScaleCell", "GroupLossScaleManager"),
    "torchboost.compat.process": ("OptimizerProcess", "ParameterProcess"),
    "torchboost.compat.wrappers": ("GradientAccumulation", "LessBN"),
    "torchboost.config": ("BoostConfig",),
    "torchboost.core.algorithm": ("Algorithm", "Attached", "Attachment", "Target", "Traits", "attach_all"),
    "torchboost.core.folding": ("fold_batch_norms",),
    "torchboost.core.loss_scale": ("DynamicLossScale", "FixedLossScale"),
    "torchboost.core.plain_state": ("load_plain_state_dict", "plain_state_dict"),
    "torchboost.core.scale_rule": ("ScaleRule",),
    "torchboost.core.step": ("StepOutput", "TrainStep"),
    "torchboost.distributed.topology": ("NodeGroups", "Topology"),
    "torchboost.errors": ("ConfigError", "IncompatibleError", "NoEffectWarning", "ScaleCollapseWarning"),
    "torchboost.optim.pipeline": ("GradientPipeline",),
    "torchboost.plan": ("Plan", "boost"),
    "torchboost.registry": ("Facts", "LEVELS", "REGISTRY"),
}
__getattr__, _names = exports(__name__, _HOMES)


def __dir__() -> list[str]:
    return [*globals(), *_names()]
