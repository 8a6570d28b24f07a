"""Match saved states with parameters: by name if both sides have names, otherwise by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Saved", "change_entries", "check_shapes", "hide", "in_order"]


def change_entries(optimizer: Optimizer, state_dict: dict[str, Any], change: Callable[[Tensor, str, Any], Any]) -> None:
    """Replace state entries of parameters in a state dict that torch has just made; the optimizer keeps its own.

    Args:
        optimizer: Not changed.
        state_dict: Its state dict; changed.
        change: Called with a parameter, the name of an entry and the entry, and returns what to write in its place.
    """
    states = state_dict["state"]
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for param, index in zip(group["params"], saved["params"], strict=True):
            if index in states:
                states[index] = {key: change(param, key, value) for key, value in states[index].items()}


def in_order(state_dict: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state dict with its parameters in the order of ``groups``, if both sides have the same names.

    torch pairs by position only, so a model whose layers were reordered would get the wrong moments.

    Args:
        state_dict: Of an optimizer; not changed.
        groups: The param groups to load it into.
    """
    names = {name for group in groups for name in group.get("param_names", ())}
    saved_groups = state_dict["param_groups"]
    indices: dict[str, int] = {}
    for saved in saved_groups:
        indices.update(zip(saved.get("param_names", ()), saved["params"], strict=False))
    sizes = [len(group["params"]) for group in groups]
    if indices.keys() != names or sizes != [len(saved["params"]) for saved in saved_groups]:
        return state_dict
    ordered = [
        {**saved, "params": [indices[name] for name in group["param_names"]], "param_names": list(group["param_names"])}
        if "param_names" in group
        else saved
        for group, saved in zip(groups, saved_groups, strict=True)
    ]
    return {**state_dict, "param_groups": ordered}


def check_shapes(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], keys: Sequence[Sequence[str]]
) -> None:
    """Check that saved entries are numbers or have the shape of their parameter.

    Groups and parameters whose number differs are left to torch, which refuses them.

    Args:
        state_dict: Of an optimizer.
        groups: The param groups to load it into.
        keys: Names of the state entries that are checked, per group.

    Raises:
        ValueError: An entry has another shape.
    """
    position = 0
    for group, saved, names in zip(groups, state_dict["param_groups"], keys, strict=False):
        for param, index in zip(group["params"], saved["params"], strict=False):
            for key in (*names, "master"):
                value = state_dict["state"].get(index, {}).get(key)
                if isinstance(value, Tensor) and value.ndim and value.shape != param.shape:
                    raise ValueError(
                        f"the checkpoint's {key!r} of parameter {position} has shape {tuple(value.shape)}, "
                        f"the parameter has {tuple(param.shape)}; give the parameters in the order of the checkpoint."
                    )
            position += 1


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
