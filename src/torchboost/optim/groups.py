"""Param groups: keys that have a meaning here, and the forms in which parameters may be given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["CENTRALIZE", "ORDER", "ParamGroup", "bare", "listed", "without_order"]

ParamGroup = dict[str, Any]

ORDER = "order_params"
"""Key of an entry that gives only the order of the parameters (MindSpore's convention)."""

CENTRALIZE = "grad_centralization"
"""Key of a group that says whether its gradients are centralised: True, False, or absent (MindSpore's convention)."""


def without_order(params: Any) -> Any:
    """Check MindSpore's entry ``{"order_params": parameters}`` and return the groups without it.

    The entry says in which order MindSpore keeps the parameters of all groups. No update depends on it here, and torch
    keeps parameters by group, so the entry has no effect beyond the check. Without such an entry the groups are
    returned unchanged.

    Raises:
        ValueError: More than one such entry, an entry that also has ``params``, or one that does not list every
            parameter once.
    """
    if isinstance(params, (Tensor, Mapping)) or not isinstance(params, Iterable):
        return params
    entries: list[Any] = list(params)
    orders = [entry for entry in entries if isinstance(entry, Mapping) and ORDER in entry]
    if not orders:
        return entries
    if len(orders) > 1 or "params" in orders[0]:
        raise ValueError(
            f"{ORDER}: found {len(orders)} entries with the keys {sorted(set().union(*orders))}; give one entry, "
            f"{{'{ORDER}': parameters}}, in addition to the groups."
        )
    groups = [{**e, "params": listed(e["params"])} if isinstance(e, Mapping) and "params" in e else e for e in entries]
    groups = [group for group in groups if not (isinstance(group, Mapping) and ORDER in group)]
    members = [bare(p) for group in groups for p in (group["params"] if isinstance(group, Mapping) else [group])]
    order = [bare(param) for param in listed(orders[0][ORDER])]
    if len(order) != len(members) or set(map(id, order)) != set(map(id, members)):
        missing, foreign = len(set(members) - set(order)), len(set(order) - set(members))
        raise ValueError(
            f"{ORDER}: found {len(order)} parameters, the groups hold {len(members)}: {missing} are missing and "
            f"{foreign} are in no group. List each parameter once, in any order, or leave the entry out."
        )
    return groups


def bare(param: Any) -> Any:
    """Return the parameter of an entry, which may be ``(name, parameter)``."""
    return param[1] if isinstance(param, tuple) else param


def listed(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters of a group as a list; torch allows a single tensor and any iterable."""
    return [params] if isinstance(params, Tensor) else list(params)
