"""Optimizers that are built from a model by name, with one learning rate."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from torchboost.core.arguments import check_module, check_number
from torchboost.errors import NoEffectWarning, nearest
from torchboost.optim.muon_groups import muon_groups
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.rules.mixed import MixedOptimizer
from torchboost.optim.rules.schedule_free import ScheduleFreeAdamW

__all__ = ["NAMED", "named_optimizer"]


def _muon(model: nn.Module, lr: float) -> MixedOptimizer:
    """Muon with the scale that takes AdamW's rate, and AdamW, for which a rate of 0.001 means the same."""
    groups = muon_groups(model, muon={"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.01})
    if all(group["rule"] != "muon" for group in groups):
        warnings.warn(
            f"Muon found no hidden matrix or filter in this {type(model).__name__}, so AdamW trains all of it. "
            "print(torchboost.optim.muon_groups(model)) shows the reason for each parameter.",
            NoEffectWarning,
            stacklevel=4,
        )
    return MixedOptimizer(groups, lr=lr)


def _schedule_free(model: nn.Module, lr: float) -> ScheduleFreeAdamW:
    return ScheduleFreeAdamW(model.parameters(), lr=lr, weight_decay=0.01)


NAMED: dict[str, Callable[[nn.Module, float], UpdateRule]] = {"muon": _muon, "schedule_free_adamw": _schedule_free}


def named_optimizer(name: str, model: nn.Module, lr: float | None = None) -> UpdateRule:
    """Build an optimizer over all trainable parameters of a model.

    ``"muon"`` is a :class:`~torchboost.optim.MixedOptimizer` over :func:`~torchboost.optim.muon_groups`, with the
    scale ``"match_rms_adamw"``, so that one rate, that of AdamW, fits all groups. ``"schedule_free_adamw"`` is
    :class:`~torchboost.optim.ScheduleFreeAdamW`. Both decay weights by 0.01, as torch's AdamW does.

    Args:
        name: See above.
        model: Not changed.
        lr: Learning rate; None takes 0.001, torch's default for AdamW.

    Raises:
        TypeError: ``model`` is not a module, or ``lr`` is not a number.
        ValueError: ``name`` is unknown, ``lr`` is out of range, or the model has nothing to train.

    Warns:
        NoEffectWarning: ``"muon"`` has no parameter to train, so that AdamW trains all of them.

    Cost: for ``"muon"`` two forward passes of a copy of the model on a small input.
    """
    check_module(model)
    if name not in NAMED:
        raise ValueError(
            f"optimizer: found the name {name!r}; there are {', '.join(NAMED)}. Give one of these, or an optimizer. "
            f"{nearest(name, list(NAMED))}".rstrip()
        )
    rate: Any = 1e-3 if lr is None else lr
    check_number("lr", rate, above=True)
    return NAMED[name](model, float(rate))
