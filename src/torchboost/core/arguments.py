"""Checks of arguments that every entry point makes before it changes anything."""

from __future__ import annotations

import itertools
import math
import re
import reprlib
from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchboost.core.wrapping import parameters_of
from torchboost.errors import warn_no_effect

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_SCALER = ("scale", "unscale_", "step", "update", "get_scale")


def check_module(value: Any, name: str = "model") -> None:
    """Raise ``TypeError`` unless ``value`` is a module. ``name`` is the caller's name of the argument."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, found {_found(value)}.")


def check_optimizer(value: Any, name: str = "optimizer") -> None:
    """Raise ``TypeError`` unless ``value`` is an optimizer."""
    if not isinstance(value, Optimizer):
        raise TypeError(f"{name} must be a torch.optim.Optimizer, found {_found(value)}.")


def check_pair(model: Any, optimizer: Any, *, name: str = "model") -> None:
    """Check a model and an optimizer, and that the optimizer holds a parameter of the model.

    Raises:
        TypeError: Not a module, or not an optimizer.
        ValueError: No parameter of the optimizer belongs to the model.
    """
    check_module(model, name)
    check_optimizer(optimizer)
    held = set(parameters_of(optimizer))
    if held.isdisjoint(model.parameters()):
        raise ValueError(
            f"none of the {len(held)} parameters of the optimizer belongs to the {name}, a {type(model).__name__}; "
            f"build the optimizer from the current parameters of this {name}, after fully_shard if that shards it."
        )


def warn_of_foreign_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Warn with :class:`NoEffectWarning` at a step of an optimizer that holds no parameter of the model any more."""
    try:
        check_pair(model, optimizer)
    except ValueError as error:
        warn_no_effect(f"{error} This step trains nothing of it.", above=2)


def check_apart(optimizers: Sequence[Optimizer]) -> None:
    """Raise ``ValueError`` if two of the optimizers hold the same parameter."""
    held = [set(parameters_of(optimizer)) for optimizer in optimizers]
    for (i, one), (j, other) in itertools.combinations(enumerate(held), 2):
        if one & other:
            raise ValueError(
                f"optimizer {i}, a {type(optimizers[i]).__name__}, and optimizer {j}, a "
                f"{type(optimizers[j]).__name__}, both hold {len(one & other)} of the parameters; give each parameter "
                "to one of them."
            )


def in_words(optimizers: Sequence[Optimizer]) -> list[str]:
    """Return the class of each optimizer, and its place if there are several, as in ``"AdamW (second)"``."""
    if len(optimizers) == 1:
        return [type(optimizers[0]).__name__]
    places = ["first", "second", "third", *(f"number {number}" for number in range(4, len(optimizers) + 1))]
    return [f"{type(one).__name__} ({place})" for one, place in zip(optimizers, places, strict=False)]


def check_shapes(model: nn.Module) -> None:
    """Raise ``ValueError`` if a parameter or buffer of a lazy module has no shape yet."""
    lazy = next((n for n, t in [*model.named_parameters(), *model.named_buffers()] if is_lazy(t)), None)
    if lazy is not None:
        raise ValueError(
            f"found '{lazy}' of a lazy module, which has no shape yet; call model.eval(), run the model on one batch, "
            "then call model.train()."
        )


def check_scaler(value: Any) -> None:
    """Raise ``TypeError`` unless ``value`` is None or has the methods of ``GradScaler`` that a step calls."""
    if value is None:
        return
    missing = [name for name in _SCALER if not callable(getattr(value, name, None))]
    if missing or isinstance(value, type):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, or have its methods, found {_found(value)}.")


def check_loss_fn(value: Any) -> None:
    """Raise ``TypeError`` unless ``value`` can be called and is not a class of losses."""
    if not callable(value) or isinstance(value, type):
        remedy = f"; give {value.__name__}()" if callable(value) else ""
        raise TypeError(f"loss_fn must be a function of outputs and targets, found {_found(value)}{remedy}.")


def is_integer(value: Any) -> bool:
    """Whether ``value`` is an ``int`` other than True and False."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number other than True and False."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_count(name: str, value: Any, *, of: str) -> None:
    """Raise ``TypeError`` unless ``value`` is an integer, and ``ValueError`` unless it is at least 1."""
    if not is_integer(value) or value < 1:
        kind = ValueError if is_integer(value) else TypeError
        raise kind(f"{name}: found {value!r}; give an integer, 1 or more: the number of {of}.")


def check_number(name: str, value: Any, *, above: bool = False) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``value`` is a finite number: at least 0, or above 0."""
    allowed = "a finite number above 0" if above else "a finite number, at least 0"
    if not is_number(value):
        raise TypeError(f"{name}: found {value!r}; give {allowed}.")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floats
        number = math.inf
    if not math.isfinite(number) or number < 0 or (above and number == 0):
        raise ValueError(f"{name}: found {value!r}; give {allowed}.")


def check_flag(name: str, value: Any) -> None:
    """Raise ``TypeError`` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: found {value!r}; give True or False.")


def check_sens(value: Any) -> None:
    """Raise ``TypeError`` unless ``value``, which multiplies gradients, is a number."""
    if not is_number(value):
        raise TypeError(f"sens must be a number, found {_found(value)}.")


def _found(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None:
        return "None"
    shown = f" {reprlib.repr(value)}" if isinstance(value, (bool, int, float, str)) else ""
    return f"{type(value).__name__}{shown}"


def seconds_of(budget: float | str, name: str = "budget") -> float:
    """Return a time in seconds: a number, or text such as ``"90s"``, ``"30m"``, ``"2h"``.

    Raises:
        ValueError: It is not a time above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", str(budget))
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not seconds > 0:
        raise ValueError(f"{name}: found {budget!r}; give seconds above 0, or text such as '90s', '30m' or '2h'.")
    return seconds
