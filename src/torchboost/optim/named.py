"""Optimizers that are built by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchboost.core.arguments import check_module, check_number
from torchboost.errors import nearest, shown, warn_no_effect
from torchboost.optim.groups import muon_groups
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.rules.mixed import MixedOptimizer
from torchboost.optim.rules.schedule_free import ScheduleFreeAdamW, warn_if_evaluated

_DECAY = 0.01
ADAMW_LR = 1e-3
MUON_LR = 0.02


def _muon(model: nn.Module, lr: float | None, adamw_lr: float | None) -> MixedOptimizer:
    matrices = {"lr": MUON_LR if lr is None else lr, "momentum": 0.9, "weight_decay": _DECAY}
    rest = {"lr": ADAMW_LR if adamw_lr is None else adamw_lr, "weight_decay": _DECAY}
    groups = muon_groups(model, muon=matrices, adamw=rest)
    if all(group["rule"] != "muon" for group in groups):
        warn_no_effect(
            f"Muon found no hidden matrix or filter in this {type(model).__name__}, so AdamW trains all of it at "
            f"{rest['lr']:g}. print(torchboost.optim.muon_groups(model)) shows the reason for each parameter.",
            above=3,
        )
    return MixedOptimizer(groups, lr=rest["lr"], weight_decay=_DECAY)


def _schedule_free(model: nn.Module, lr: float | None, adamw_lr: float | None) -> ScheduleFreeAdamW:
    if adamw_lr is not None:
        raise ValueError(
            f'adamw_lr: found {adamw_lr!r} next to "schedule_free_adamw", which has one rate; give it as lr. adamw_lr '
            'is for "muon".'
        )
    rate: Any = ADAMW_LR if lr is None else lr
    optimizer = ScheduleFreeAdamW(model.parameters(), lr=float(rate), weight_decay=_DECAY)
    warn_if_evaluated(model, optimizer)
    return optimizer


_NAMED: dict[str, Callable[[nn.Module, float | None, float | None], UpdateRule]] = {
    "muon": _muon,
    "schedule_free_adamw": _schedule_free,
}


def named_optimizer(
    name: str, model: nn.Module, lr: float | None = None, *, adamw_lr: float | None = None
) -> UpdateRule:
    """Build an optimizer over all trainable parameters of a model.

    ``"muon"`` is a :class:`~torchboost.optim.MixedOptimizer` over :func:`~torchboost.optim.muon_groups`. The hidden
    matrices follow Muon with ``momentum=0.9``, the rest follows AdamW. For schedules see
    :func:`~torchboost.optim.muon_from`. ``"schedule_free_adamw"`` is :class:`~torchboost.optim.ScheduleFreeAdamW`. Both
    decay weights by 0.01, as torch's AdamW does. Do not use Muon to fine-tune all weights of a model that was trained
    with Adam. To resume, build the optimizer again by the same name and load its state.

    Args:
        name: See above.
        model: With ``"schedule_free_adamw"`` it gets a hook that warns once if the model is evaluated (in eval mode,
            without gradients) while it holds the weights of training.
        lr: Learning rate. With ``"muon"`` it applies to the hidden matrices only, and None takes 0.02. With
            ``"schedule_free_adamw"`` None takes 0.001, torch's default for AdamW.
        adamw_lr: Learning rate of the parameters that ``"muon"`` gives to AdamW. None takes 0.001 for any ``lr``.

    Raises:
        TypeError: ``model`` is not a module, or a rate is not a number.
        ValueError: ``name`` is unknown, a rate is out of range, ``adamw_lr`` is given for another name than ``"muon"``,
            or the model has nothing to train.

    Warns:
        NoEffectWarning: ``"muon"`` has no parameter to train, so that AdamW trains all of them.

    Cost: for ``"muon"`` two forward passes of a copy of the model on a small input.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = named_optimizer("muon", model, lr=0.02, adamw_lr=3e-3)
        >>> optimizer.title
        'Muon at 0.02 and AdamW at 0.003'
    """
    check_module(model)
    if name not in _NAMED:
        raise ValueError(
            f"optimizer: found the name {name!r}; there are {', '.join(_NAMED)}. Give one of these, or an optimizer, "
            "such as torch.optim.AdamW(model.parameters()). "
            f"{nearest(name, list(_NAMED))}".rstrip()
        )
    for argument, rate in (("lr", lr), ("adamw_lr", adamw_lr)):
        if rate is not None:
            check_number(argument, rate, above=True)
    return _NAMED[name](model, lr, adamw_lr)


def check_given(optimizer: Any, **rates: Any) -> None:
    """Require an optimizer, a list of them or a name, and refuse rates next to an optimizer that has its own."""
    if not isinstance(optimizer, (Optimizer, Sequence)):
        names = " or ".join(f'"{name}"' for name in _NAMED)
        raise TypeError(
            f"optimizer: found {shown(optimizer)}; give a torch.optim.Optimizer, such as "
            f"torch.optim.AdamW(model.parameters()), a list of them, or a name: {names}."
        )
    for name, rate in rates.items():
        if rate is not None:
            own = f"{type(optimizer).__name__}, which has its own"
            raise ValueError(f"{name}: found {rate!r} next to {own}; leave {name} out.")
