"""Match saved states with parameters: by name if both sides have names, otherwise by position."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from torchboost.optim.rules.masters import SCALE

__all__ = ["RULE_KEYS", "Pair", "change_entries", "in_order", "paired", "with_memory_renamed"]

RULE_KEYS = frozenset(
    (
        *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "accumulator", "linear"),
        *("square_avg", "grad_avg", "mean_square", "mean_grad", "moment", "master", "last_step", "past"),
        *("z", "weight_sum", "largest_lr"),
    )
)
"""State entries that belong to an update rule, of this package or of torch."""


class Pair(NamedTuple):
    """A parameter, the options it is about to get, and its saved state (empty if there is none)."""

    param: Tensor
    group: dict[str, Any]
    saved: dict[str, Any]


def change_entries(optimizer: Optimizer, state_dict: dict[str, Any], change: Callable[[Tensor, str, Any], Any]) -> None:
    """Replace state entries of parameters in a state dict that torch has just made; the optimizer keeps its own.

    Args:
        optimizer: Not changed.
        state_dict: Its state dict; changed.
        change: Called with a parameter, the name of an entry and the entry, and returns what to write in its place.
    """
    states = state_dict["state"]
    for own, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for param, index in zip(own["params"], saved["params"], strict=True):
            if index in states:
                states[index] = {key: change(param, key, value) for key, value in states[index].items()}


def in_order(state_dict: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state dict with its parameters in the order of ``groups``, if both sides have the same names.

    torch pairs by position only, so a model whose layers were reordered would get the wrong moments.

    Args:
        state_dict: Of an optimizer; not changed.
        groups: The param groups to load it into.
    """
    wanted = [name for group in groups for name in group.get("param_names", ())]
    found: dict[str, int] = {}
    for saved in state_dict["param_groups"]:
        found.update(zip(saved.get("param_names", ()), saved["params"], strict=False))
    sizes = [len(group["params"]) for group in groups]
    if set(found) != set(wanted) or sizes != [len(saved["params"]) for saved in state_dict["param_groups"]]:
        return state_dict
    ordered = [
        {**saved, "params": [found[name] for name in own["param_names"]], "param_names": list(own["param_names"])}
        if "param_names" in own
        else saved
        for own, saved in zip(groups, state_dict["param_groups"], strict=True)
    ]
    return {**state_dict, "param_groups": ordered}


def paired(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
    keys: Callable[[Mapping[str, Any]], Sequence[str]],
) -> list[Pair]:
    """Pair parameters with saved states as torch does; return ``[]`` if torch is going to refuse the state dict.

    Args:
        state_dict: Of an optimizer.
        groups: The param groups to load it into.
        defaults: Options for saved groups that lack them.
        keys: Returns the names of the state entries for the options of a group; their shapes are checked.

    Raises:
        ValueError: An entry is neither a number nor of the shape of its parameter.
    """
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    places = [(param, place) for place, group in enumerate(groups) for param in group["params"]]
    if len(saved) != len(places) or len(state_dict["param_groups"]) != len(groups):
        return []
    pairs = []
    for position, ((param, place), index) in enumerate(zip(places, saved, strict=True)):
        group = {**defaults, **state_dict["param_groups"][place]}
        state = state_dict["state"].get(index, {})
        for key in (*keys(group), "master"):
            value = state.get(key)
            if isinstance(value, Tensor) and value.ndim and value.shape != param.shape:
                raise ValueError(
                    f"the checkpoint's {key!r} of parameter {position} has shape {tuple(value.shape)}, "
                    f"the parameter has {tuple(param.shape)}; give the parameters in the order of the checkpoint."
                )
        pairs.append(Pair(param, group, state))
    return pairs


def with_memory_renamed(
    state_dict: dict[str, Any], names: Sequence[str], keys: Sequence[Collection[str]]
) -> dict[str, Any]:
    """Return the state dict with the memory of transforms under their namespaces.

    Older checkpoints have bare keys, which all transforms shared; each transform gets a copy. A bare key that may be
    an entry of the rule stays, too.

    Args:
        state_dict: Of an optimizer; not changed.
        names: Namespaces of the transforms; if empty, the states are not changed.
        keys: Entries of the rule, per group.
    """
    if not names or any(_is_named(key, names) for state in state_dict["state"].values() for key in state):
        return state_dict
    states = dict(state_dict["state"])
    for group, own in zip(state_dict["param_groups"], keys, strict=False):
        known = {*RULE_KEYS, *own}
        known |= {key + SCALE for key in known}
        for index in group["params"]:
            state = states.get(index, {})
            unknown = [key for key in state if "." not in key and key not in known]
            states[index] = state | {f"{name}.{key}": _copied(state[key]) for name in names for key in unknown}
    return {**state_dict, "state": states}


def _is_named(key: str, names: Sequence[str]) -> bool:
    name, dot, _ = key.partition(".")
    return bool(dot) and name in names


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
