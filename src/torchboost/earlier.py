"""Checkpoints of earlier versions: up to version 0.7, level O1 removed BatchNorms and centralised gradients."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchboost.algorithms.gradient_centralization import GradientCentralization
from torchboost.algorithms.less_bn import LessBn
from torchboost.core.algorithm import Attachment

O1_HAD: Mapping[str, Any] = {LessBn.name: {"keep": "narrowest", "keep_every": 1}, GradientCentralization.name: {}}
"""The algorithms that O1 had in addition to the switches, with their settings."""


def check_against_o1(state: Mapping[str, Any], model: nn.Module, known: Collection[str]) -> None:
    """Refuse the state of a run with a part of the former O1 that is off here, neither on nor withdrawn."""
    off = [name for name in O1_HAD if name in state and name not in known]
    if LessBn.name in off and LessBn().applied(model):
        off.remove(LessBn.name)
    if off:
        verb = "is" if len(off) == 1 else "are"
        raise ValueError(f"the checkpoint was written with {' and '.join(off)}, which {verb} off here. {_remedy(off)}")


def watch_for_o1(optimizers: Iterable[Optimizer], norms: int) -> Attachment:
    """Let the optimizers of a model with ``norms`` BatchNorms refuse a state without their parameters, and say why."""

    def look(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        theirs, ours = ([len(group["params"]) for group in of["param_groups"]] for of in (state, vars(optimizer)))
        saved, here = sum(theirs), sum(ours)
        if len(theirs) == len(ours) and 0 < here - saved <= 2 * norms:
            remedy = _remedy(O1_HAD)
            raise ValueError(
                f"the checkpoint has the optimizer state of {saved} parameters, and this optimizer has {here}. If both "
                f"are of the same model and nothing was frozen, {remedy[0].lower()}{remedy[1:]}"
            )

    return Attachment(*(optimizer.register_load_state_dict_pre_hook(look) for optimizer in optimizers))


def _remedy(names: Iterable[str]) -> str:
    config = json.dumps({"extra": {name: O1_HAD[name] for name in names}})
    return (
        "Boost with the level and the configuration that it was written with, then load it; for level O1 of version "
        f"0.7 or earlier, which removed BatchNorms and centralised gradients, pass config={config}."
    )
