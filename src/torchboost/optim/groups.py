"""Param groups: split one by structure, rebuild them over other parameters, number parameters for communication."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["FusionIndex", "ParamGroup", "rebuild_groups", "split_group"]

ParamGroup = dict[str, Any]

ORDER = "order_params"
"""Key of an entry that carries no parameters of its own, only their order (MindSpore's convention)."""


@dataclass(frozen=True, slots=True)
class FusionIndex:
    """One number per parameter: neighbours that share a number may travel in one collective.

    Kept beside the parameters, not on them. Communication code reads it through :meth:`segments`; by itself it
    changes nothing.

    Args:
        indices: One per parameter, not falling, the first number at least 1.
    """

    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(isinstance(i, bool) or not isinstance(i, int) for i in self.indices):
            raise TypeError(f"indices: found {self.indices}; give whole numbers.")
        if any(i < 1 for i in self.indices) or list(self.indices) != sorted(self.indices):
            raise ValueError(f"indices: found {self.indices}; give numbers from 1 that never fall.")

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
        if any(isinstance(p, bool) or not isinstance(p, int) for p in points):
            raise TypeError(f"split points: found {list(points)}; give whole numbers.")
        if list(points) != sorted(set(points)) or any(not 0 <= p < count for p in points):
            raise ValueError(f"split points: found {list(points)}; give rising positions from 0 to {count - 1}.")
        return cls(tuple(first + sum(p <= i for p in points) for i in range(count)))

    def segments(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the parameters as runs of equal index.

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
    """Split a group into its parameters in ``chosen``, which get ``options``, and the rest; empty parts are left out.

    Both parts keep all other options of the group and the order of its parameters.
    """
    inside = [param for param in group["params"] if param in chosen]
    outside = [param for param in group["params"] if param not in chosen]
    parts = [({**group, "params": inside, **options}, inside), ({**group, "params": outside}, outside)]
    return [part for part, members in parts if members]


def rebuild_groups(parameters: Sequence[Tensor], origin: Sequence[Tensor | Mapping[str, Any]]) -> list[ParamGroup]:
    """Build groups over ``parameters`` with the options of the groups in ``origin``.

    Every origin group keeps its options and those of its parameters that are in ``parameters``, so groups may become
    empty but keep their position. Parameters in no origin group form one more group, with the options of the origin
    group that has the most. A plain list of parameters as ``origin`` gives one group without options.

    Args:
        parameters: The new list; decides the order entry where ``origin`` has one.
        origin: Param groups, or a plain list of parameters.
    """
    groups = [entry for entry in origin if isinstance(entry, Mapping)]
    if not groups:
        return [{"params": list(parameters)}]
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
        rebuilt.append({**group, "params": members})
        if len(group) > len(richest):
            richest = group
    rest = [param for param in parameters if param not in placed]
    if rest:
        rebuilt.append({**richest, "params": rest})
    return rebuilt


def listed(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters of a group as a list; torch allows a single tensor and any iterable."""
    return [params] if isinstance(params, Tensor) else list(params)
