"""Param groups: split one by structure, rebuild them over other parameters, number parameters for communication."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchboost.core.arguments import is_integer

__all__ = ["FusionIndex", "ParamGroup", "rebuild_groups", "split_group"]

ParamGroup = dict[str, Any]

ORDER = "order_params"
"""Key of an entry that carries no parameters of its own, only their order (MindSpore's convention)."""

CENTRALIZE = "grad_centralization"
"""Key of a group that says whether its gradients are centralised: True, False, or nothing (MindSpore's convention)."""


@dataclass(frozen=True, slots=True)
class FusionIndex:
    """One number per parameter: neighbours that share a number may travel in one collective.

    Kept beside the parameters, not on them. Communication code reads it through :meth:`segments`; by itself it
    changes nothing.

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
        """Number ``count`` parameters from ``first``, one higher from each position in ``points`` on.

        Args:
            count: Number of parameters.
            points: Rising positions in ``[0, count)``.
            first: Number of a parameter before the first point.

        Raises:
            TypeError: A point is not a whole number.
            ValueError: Points fall, repeat or lie outside.
        """
        if any(not is_integer(p) for p in points):
            raise TypeError(f"split points: found {list(points)}; give whole numbers.")
        if list(points) != sorted(set(points)) or any(not 0 <= p < count for p in points):
            raise ValueError(f"split points: found {list(points)}; give increasing positions from 0 to {count - 1}.")
        return cls(tuple(first + sum(p <= i for p in points) for i in range(count)))

    def segments(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the parameters with equal index together, in the order in which the indices appear.

        Raises:
            ValueError: Another number of parameters than indices.
        """
        if len(parameters) != len(self.indices):
            raise ValueError(f"found {len(parameters)} parameters for {len(self.indices)} indices; give one each.")
        runs: dict[int, list[Tensor]] = {}
        for index, param in zip(self.indices, parameters, strict=True):
            runs.setdefault(index, []).append(param)
        return list(runs.values())


def split_group(group: Mapping[str, Any], chosen: Collection[Tensor], options: Mapping[str, Any]) -> list[ParamGroup]:
    """Split a group into its parameters in ``chosen``, which get ``options``, and the rest, which loses these keys.

    Both parts keep the other options of the group and the order of its parameters; an empty part is left out.
    """
    params = listed(group["params"])
    inside = [param for param in params if param in chosen]
    outside = [param for param in params if param not in chosen]
    plain = {key: value for key, value in group.items() if key not in options}
    parts = ((inside, {**plain, **options}), (outside, plain))
    return [_over(part, members, _names([group])) for members, part in parts if members]


def rebuild_groups(parameters: Sequence[Tensor], origin: Sequence[Tensor | Mapping[str, Any]]) -> list[ParamGroup]:
    """Build groups over ``parameters`` with the options of the groups in ``origin``.

    Every origin group keeps its options and those of its parameters that are in ``parameters``, so groups may become
    empty but keep their position. Parameters in no origin group form one more group, with the options of the origin
    group that has the most. A plain list of parameters as ``origin`` gives one group without options.

    Args:
        parameters: The new list; replaces the order entry where ``origin`` has one.
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
    """Return the groups without the entry ``{"order_params": parameters}`` (MindSpore's), checked.

    It says in which order MindSpore keeps the parameters of all groups. No update depends on it here, and torch keeps
    them by group, so the entry has no effect beyond the check. Whatever has no such entry is returned as it is.

    Raises:
        ValueError: More than one such entry, one with parameters of its own, or not all parameters, each once.
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
    held = [_bare(p) for group in groups for p in (group["params"] if isinstance(group, Mapping) else [group])]
    order = [_bare(param) for param in listed(orders[0][ORDER])]
    if len(order) != len(held) or set(map(id, order)) != set(map(id, held)):
        missing, foreign = len(set(held) - set(order)), len(set(order) - set(held))
        raise ValueError(
            f"{ORDER}: found {len(order)} parameters, the groups hold {len(held)}: {missing} are missing and {foreign} "
            "are in no group. List each parameter once, in any order, or leave the entry out."
        )
    return groups


def _bare(param: Any) -> Any:
    return param[1] if isinstance(param, tuple) else param  # (name, parameter), as torch takes them


def listed(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters of a group as a list; torch allows a single tensor and any iterable."""
    return [params] if isinstance(params, Tensor) else list(params)


def _names(groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, str]:
    """Names by parameter, where the groups were built from ``named_parameters()``."""
    return {
        param: name
        for group in groups
        if "param_names" in group
        for param, name in zip(listed(group["params"]), group["param_names"], strict=True)
    }


def _over(group: Mapping[str, Any], members: list[Tensor], names: Mapping[Tensor, str]) -> ParamGroup:
    """Copy the group over other members; torch wants either all groups with names or none."""
    options = {key: value for key, value in group.items() if key != "param_names"}
    named = {"param_names": [names[param] for param in members]} if names else {}
    return {**options, "params": members, **named}
