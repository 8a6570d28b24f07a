"""Optimizers that are built from a model by name, with one learning rate."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchboost.core.arguments import check_module, check_number
from torchboost.errors import NoEffectWarning, nearest
from torchboost.optim.muon_groups import muon_groups
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.rules.mixed import MixedOptimizer
from torchboost.optim.rules.schedule_free import ScheduleFreeAdamW, warn_of_training_weights

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
    optimizer = ScheduleFreeAdamW(model.parameters(), lr=lr, weight_decay=0.01)
    model.register_forward_pre_hook(_Evaluated(optimizer))
    return optimizer


class _Evaluated:
    """Warns once if a trained model is evaluated on the weights of training. A copy of the model does not warn."""

    def __init__(self, optimizer: ScheduleFreeAdamW) -> None:
        self._optimizer: weakref.ref[ScheduleFreeAdamW] | None = weakref.ref(optimizer)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or module.training or torch.is_grad_enabled() or self._optimizer is None:
            return
        optimizer = self._optimizer()
        if optimizer is not None and warn_of_training_weights(optimizer, "the model is evaluated on", stacklevel=6):
            self._optimizer = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_optimizer": None}


NAMED: dict[str, Callable[[nn.Module, float], UpdateRule]] = {"muon": _muon, "schedule_free_adamw": _schedule_free}


def named_optimizer(name: str, model: nn.Module, lr: float | None = None) -> UpdateRule:
    """Build an optimizer over all trainable parameters of a model.

    ``"muon"`` is a :class:`~torchboost.optim.MixedOptimizer` over :func:`~torchboost.optim.muon_groups`, with the
    scale ``"match_rms_adamw"``, so that one rate, that of AdamW, fits all groups. ``"schedule_free_adamw"`` is
    :class:`~torchboost.optim.ScheduleFreeAdamW`. Both decay weights by 0.01, as torch's AdamW does.

    Args:
        name: See above.
        model: Not changed; with ``"schedule_free_adamw"`` it gets a hook that warns once if the model is evaluated (in
            eval mode, without gradients) while it holds the weights of training.
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
