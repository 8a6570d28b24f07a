"""MindSpore's names of optimizer arguments, and their equivalents here."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from difflib import get_close_matches

__all__ = ["HERE", "check_group_names", "check_names"]

HERE = {
    "learning_rate": "lr",
    "beta1": "betas=(beta1, beta2)",
    "beta2": "betas=(beta1, beta2)",
    "epsilon": "eps",
    "decay": "alpha",
    "initial_accum": "initial_accumulator_value",
    "use_nesterov": "nesterov",
    "use_amsgrad": "amsgrad",
    "use_clip": "clip",
    "lars_filter": "a group with adapt=False",
    "use_lazy": "the class LazyAdam",
    "use_offload": "the class AdamOffload",
    "use_locking": "nothing: an update is one operation; leave it out",
    "loss_scale": "transforms=(Unscale(loss_scale),), or torch.amp.GradScaler",
}
"""MindSpore's name -> ours. The page ``compat.md`` shows it."""


def check_names(kind: type, given: Iterable[str]) -> None:
    """Refuse unknown keyword arguments, and say which name the class takes instead.

    Args:
        kind: The class about to be constructed.
        given: Names of keyword arguments.

    Raises:
        TypeError: The class does not take one of the names.
    """
    taken = inspect.signature(kind).parameters.values()
    if any(argument.kind is argument.VAR_KEYWORD for argument in taken):
        return  # the class checks its options itself, and its base class is checked in turn
    names = [argument.name for argument in taken]
    for name in given:
        if name not in names:
            raise TypeError(f"{kind.__name__} takes no {name!r}{_hint(name, names)}")


def check_group_names(group: Iterable[str], taken: Collection[str]) -> None:
    """Refuse MindSpore's names as keys of a param group; torch would keep and ignore them.

    Args:
        group: Its keys.
        taken: Options of the rule.

    Raises:
        TypeError: A key is an argument of MindSpore and not an option of the rule.
    """
    for name in group:
        if name in HERE and name not in taken:
            raise TypeError(f"param_group: found the key {name!r}{_hint(name, sorted(taken))}")


def _hint(name: str, names: Collection[str]) -> str:
    if name in HERE:
        return f", which is MindSpore's name; here it is {HERE[name]}."
    near = get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(names)}."
