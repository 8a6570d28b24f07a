"""Names of MindSpore that this package does not have, and what takes their place."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["ELSEWHERE"]

_STEP = "a training step: torchboost.boost(model, optimizer).step(loss_fn), or torchboost.BoostTrainOneStepCell"

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "Cell": "torch.nn.Module",
        "FixedLossScaleUpdateCell": "torchboost.FixedLossScale(scale)",
        "DynamicLossScaleUpdateCell": "torchboost.DynamicLossScale(init_scale, factor=2, window=1000)",
        "Model": "your own loop, or a trainer. boost_level and boost_config_dict are the level and the config of "
        "torchboost.boost(model, optimizer, level, config=...)",
        "TrainOneStepCell": _STEP,
        "TrainOneStepWithLossScaleCell": "torchboost.BoostTrainOneStepWithLossScaleCell",
        "WithLossCell": "torchboost.WithLoss(backbone, loss_fn)",
        "set_train": "model.train(), and model.eval() for set_train(False)",
        "trainable_params": "model.parameters()",
    }
)
"""Name in MindSpore -> the counterpart."""
