"""Names of MindSpore that this package does not have, and their replacements."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_STEP = "a training step: torchboost.boost(model, optimizer).step(loss_fn), or torchboost.BoostTrainOneStepCell"

_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "Cell": "torch.nn.Module",
        "DynamicLossScaleManager": "torchboost.DynamicLossScale(init_scale, factor=2, window=2000)",
        "FixedLossScaleManager": "torchboost.FixedLossScale(scale)",
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


def counterpart(owner: str, name: str) -> str | None:
    """Return the replacement of a name that ``owner`` does not have, or None if it is not a name of MindSpore."""
    if name not in _ELSEWHERE:
        return None
    return f"{owner} has no {name}; use {_ELSEWHERE[name]}. docs/compat.md lists the names of MindSpore."
