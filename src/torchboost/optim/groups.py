"""Param groups: split them, rebuild them over other parameters, number parameters for communication."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchboost.core.arguments import is_integer

__all__ = ["FusionIndex", "ParamGroup", "rebuild_groups", "split_group"]

ParamGroup = dict[str, Any]

ORDER = "order_params"
"""Key of an entry that gives only the order of the parameters (MindSpore's convention)."""

CENTRALIZE = "grad_centralization"
"""Key of a group that says whether its gradients are centralised: True, False, or absent (MindSpore's convention)."""


@dataclass(frozen=True, slots=True)
class FusionIndex:
    """One number per parameter; parameters that share a number may be sent in one collective.

    The numbers are not stored on the parameters. Communication code reads them through :meth:`segments`; on its own
    this object has no effect.

    Args:
        indices: One per parameter, at least 1.
    """

    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(not is_integer(i) for i in self.indices):
            raise TypeError(f"indices: found {self.indices}; give whole numbers.")
        if any(i < 1 for i in self.indices):
            raise ValueError(f"indices: found {self.indices}; give numbers of at least 1.")

    @classmethod
    def split(cls, count: int, points: Sequence[int], *, first: int = 1) -> FusionIndex:
        """Number ``count`` parameters from ``first``; the number grows by one at each position in ``points``.

        Args:
            count: Number of parameters.
            points: Increasing positions in ``[0, count)``.
            first: Number of the parameters before the first point.

        Raises:
            TypeError: A point is not a whole number.
            ValueError: The points are not increasing, or lie outside ``[0, count)``.
        """
        if any(not is_integer(p) for p in points):
            raise TypeError(f"split points: found {list(points)}; give whole numbers.")
        if list(points) != sorted(set(points)) or any(not 0 <= p < count for p in points):
            raise ValueError(f"split points: found {list(points)}; give increasing positions from 0 to {count - 1}.")
        return cls(tuple(first + sum(p <= i for p in points) for i in range(count)))

    def segments(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the parameters grouped by index, in the order in which the indices appear.

        Raises:
            ValueError: The number of parameters is not that of the indices.
        """
        if len(parameters) != len(self.indices):
            raise ValueError(f"found {len(parameters)} parameters for {len(self.indices)} indices; give one each.")
        runs: dict[int, list[Tensor]] = {}
        for index, param in zip(self.indices, parameters, strict=True):
            runs.setdefault(index, []).append(param)
        return list(runs.values())


def split_group(group: Mapping[str, Any], chosen: Collection[Tensor], options: Mapping[str, Any]) -> list[ParamGroup]:
    """Split a group in two: parameters in ``chosen`` get ``options``, and the rest loses these keys.

    Both parts keep the other options of the group and the order of its parameters. An empty part is omitted.
    """
    params = listed(group["params"])
    inside = [param for param in params if param in chosen]
    outside = [param for param in params if param not in chosen]
    plain = {key: value for key, value in group.items() if key not in options}
    parts = ((inside, {**plain, **options}), (outside, plain))
    return [_over(part, members, _names([group])) for members, part in parts if members]


def rebuild_groups(parameters: Sequence[Tensor], origin: Sequence[Tensor | Mapping[str, Any]]) -> list[ParamGroup]:
    """Build groups over ``parameters`` with the options of the groups in ``origin``.

    Every origin group keeps its options and those of its parameters that are in ``parameters``. A group may become
    empty but keeps its position. Parameters in no origin group form one more group, with the options of the origin
    group that has the most. If ``origin`` is a plain list of parameters, the result is one group without options.

    Args:
        parameters: The new list; replaces the order entry if ``origin`` has one.
        origin: Param groups, or a plain list of parameters.
    """
    groups = [entry for entry in origin if isinstance(entry, Mapping)]
    if not groups:
        return [{"params": list(parameters)}]
    names = _names(groups)
    if not all(param in names for param in parameters):
        names = {}
    wanted = set(parameters)
    rebuilt: list[ParamGroup] = []
    placed: set[Tensor] = set()
    richest: Mapping[str, Any] = {}
    for group in groups:
        if ORDER in group:
            rebuilt.append({**group, ORDER: list(parameters)})
            continue
        members = [param for param in listed(group["params"]) if param in wanted]
        placed.update(members)
        rebuilt.append(_over(group, members, names))
        if len(group) > len(richest):
            richest = group
    rest = [param for param in parameters if param not in placed]
    if rest:
        rebuilt.append(_over(richest, rest, names))
    return rebuilt


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
    held = [bare(p) for group in groups for p in (group["params"] if isinstance(group, Mapping) else [group])]
    order = [bare(param) for param in listed(orders[0][ORDER])]
    if len(order) != len(held) or set(map(id, order)) != set(map(id, held)):
        missing, foreign = len(set(held) - set(order)), len(set(order) - set(held))
        raise ValueError(
            f"{ORDER}: found {len(order)} parameters, the groups hold {len(held)}: {missing} are missing and {foreign} "
            "are in no group. List each parameter once, in any order, or leave the entry out."
        )
    return groups


def bare(param: Any) -> Any:
    """Return the parameter of an entry, which may be ``(name, parameter)``."""
    return param[1] if isinstance(param, tuple) else param


def listed(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters of a group as a list; torch allows a single tensor and any iterable."""
    return [params] if isinstance(params, Tensor) else list(params)


def _names(groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, str]:
    """Return the names by parameter, if the groups were built from ``named_parameters()``."""
    return {
        param: name
        for group in groups
        if "param_names" in group
        for param, name in zip(listed(group["params"]), group["param_names"], strict=True)
    }


def _over(group: Mapping[str, Any], members: list[Tensor], names: Mapping[Tensor, str]) -> ParamGroup:
    """Copy the group over other members; torch requires names in all groups or in none."""
    options = {key: value for key, value in group.items() if key != "param_names"}
    named = {"param_names": [names[param] for param in members]} if names else {}
    return {**options, "params": members, **named}
