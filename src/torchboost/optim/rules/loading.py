"""Checkpoints of rules on their way into an optimizer: the order of parameters, and damaged entries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from torchboost.core.arguments import is_number
from torchboost.errors import shown


def in_order(state_dict: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state dict with its parameters in the order of ``groups``, if both sides have the same names.

    torch pairs by position only, so a model whose layers were reordered would get the wrong moments. If some names
    differ, as in a model with another head, the others must keep their places, or ``ValueError`` is raised.
    """
    names = {name for group in groups for name in group.get("param_names", ())}
    saved_groups = state_dict["param_groups"]
    indices: dict[str, int] = {}
    for saved in saved_groups:
        indices.update(zip(saved.get("param_names", ()), saved["params"], strict=False))
    sizes = [len(group["params"]) for group in groups]
    if sizes != [len(saved["params"]) for saved in saved_groups]:
        return state_dict
    if indices.keys() != names:
        _check_places(groups, saved_groups)
        return state_dict
    ordered = [
        {**saved, "params": [indices[name] for name in group["param_names"]], "param_names": list(group["param_names"])}
        if "param_names" in group
        else saved
        for group, saved in zip(groups, saved_groups, strict=True)
    ]
    return {**state_dict, "param_groups": ordered}


def _check_places(groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    listed = [[*group.get("param_names", [None] * len(group["params"]))] for group in (*groups, *saved_groups)]
    here, there = (list(chain.from_iterable(part)) for part in (listed[: len(groups)], listed[len(groups) :]))
    places = {name: place for place, name in enumerate(here) if name is not None}
    for place, name in enumerate(there):
        if (now := places.get(name, place)) != place:
            raise ValueError(
                f"the checkpoint has {name!r} at place {place}, here it is at place {now}, and other names differ; "
                "give the parameters in the order of the checkpoint."
            )


def is_entry(param: Tensor, value: Any) -> bool:
    """Whether a loaded value can be an entry of the state of a parameter, with a number for each of its own."""
    plain = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return plain and value.shape == param.shape and value.is_complex() == param.is_complex()


def check_entry(param: Tensor, key: str, value: Any, position: int) -> None:
    """Refuse a loaded value that cannot be an entry of the state of the parameter at this position."""
    if isinstance(value, Tensor) and value.ndim and value.shape != param.shape:
        raise ValueError(
            f"the checkpoint's {key!r} of parameter {position} has shape {tuple(value.shape)}, the parameter has "
            f"{tuple(param.shape)}; give the parameters in the order of the checkpoint."
        )
    if not is_entry(param, value):
        raise damaged(param, key, value)


def check_number_entry(param: Tensor, key: str, value: Any) -> None:
    """Refuse a loaded value other than a finite number of at least 0, such as a count of updates."""
    whole = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    number = value.item() if whole and not value.is_meta else 0 if whole else value
    if not is_number(number) or not 0 <= number < math.inf:
        raise damaged(param, key, value)


def damaged(param: Tensor, key: str, value: Any) -> ValueError:
    """Return the error for an entry that cannot be used."""
    return ValueError(
        f"the checkpoint's {key!r} of a parameter of shape {tuple(param.shape)} is damaged: found {shown(value)}; load "
        "a whole file, or begin without it."
    )


@dataclass(frozen=True)
class Saved:
    """A state entry on its way through ``Optimizer.load_state_dict``, which casts and moves bare tensors itself."""

    value: Any


def hide(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Wrap the entries of a state dict, as a hook before it is loaded."""
    known = {index for group in state_dict["param_groups"] for index in group["params"]}
    states = {
        index: {key: Saved(value) for key, value in state.items()} if index in known else state
        for index, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}
