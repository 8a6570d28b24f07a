"""A loss scaler with a scale for every group of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from torchboost.algorithms.loss_scale_group.borders import Ratios
from torchboost.algorithms.loss_scale_group.rule import Alarm, ScaleRule, ScaleState
from torchboost.algorithms.loss_scale_group.scalers import LossScaler
from torchboost.algorithms.loss_scale_group.unscaling import last_bad

__all__ = ["GROUP_RULE", "GroupScaler", "GroupStatus", "Scales", "checked_scales"]

GROUP_RULE = ScaleRule(growth=2.0 ** (1 / 1000), shrink=2.0**-0.5, window=1, floor=1.0, ceiling=2.0**40)
"""MindSpore's rule for groups, with added bounds."""

Scales = float | Sequence[float]


class GroupStatus(NamedTuple):
    """The status of a group.

    Args:
        name: Of the group.
        scale: Its scale.
        overflows: Updates at which a gradient in it was not finite.
        in_a_row: How many of the last updates without a clean one between.
    """

    name: str
    scale: float
    overflows: int
    in_a_row: int


class GroupScaler(LossScaler):
    """Scales per group: an overflow in any group skips the update, and moves the scales of that group only.

    Args:
        names: Of the groups; the first is the rest of the model, whose scale multiplies the loss.
        scales: At the beginning, one per name.
        ratios: Told the scales in use, for the borders to change between them.
        rule: Moves each scale.
        pinned: Whether the first scale stays 1, as nothing would tell of its overflows.
        exact: Use the scales as they are, and from the start; otherwise the power of two below, between the first
            :meth:`scale` and :meth:`update`.
        agree: See :class:`~torchboost.algorithms.loss_scale_group.scalers.LossScaler`.
        process_group: Likewise.
    """

    def __init__(
        self,
        names: Sequence[str],
        scales: Sequence[float],
        ratios: Ratios,
        *,
        rule: ScaleRule = GROUP_RULE,
        pinned: bool = True,
        exact: bool = False,
        agree: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(len(names), agree=agree, process_group=process_group)
        self.rule = rule
        self._names, self._ratios, self._pinned, self._exact = tuple(names), ratios, pinned, exact
        self._membership: tuple[list[Tensor], list[list[Tensor]]] = ([], [])
        self._restart(scales)

    @property
    def report(self) -> tuple[GroupStatus, ...]:
        """The status of every group, including the rest of the model if its scale moves."""
        first = 1 if self._pinned else 0
        pairs = list(zip(self._names, self._states, self._alarms, strict=True))[first:]
        return tuple(GroupStatus(name, s.scale, alarm.overflows, alarm.in_a_row) for name, s, alarm in pairs)

    def parameters_of(self, group: int) -> Sequence[Tensor]:
        """Return the parameters of a group, counted from 1."""
        raise NotImplementedError

    def name_of(self, param: Tensor) -> str:
        """Name a parameter in messages."""
        return f"a parameter of shape {tuple(param.shape)}"

    def get_scale(self) -> float:
        """Return the smallest scale of a group."""
        return min(status.scale for status in self.report)

    def _restart(self, scales: Sequence[float]) -> None:
        self._states = [self.rule.start(scale) for scale in scales]
        if self._pinned:
            self._states[0] = ScaleState(1.0)
        self._alarms = [
            Alarm(f"the loss scale of group '{name}'", state.scale, self.rule.floor)
            for name, state in zip(self._names, self._states, strict=True)
        ]
        self._settle()

    def _settle(self) -> None:
        if self._in_use is None:
            self._ratios.set(self._applied() if self._exact else None)

    def _applied(self) -> list[float]:
        if self._exact:
            return [state.scale for state in self._states]
        # Powers of two change the exponent of a gradient only, so that unscaling gives back the same bits.
        return [2.0 ** math.floor(math.log2(state.scale)) for state in self._states]

    def _begun(self, scales: Sequence[float]) -> None:
        self._ratios.set(scales)

    def _members(self, optimizer: Optimizer) -> list[list[Tensor]]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        known, members = self._membership
        # Sharding and surgery replace parameters, so the groups are resolved again when the parameters of the optimizer
        # change.
        if len(params) != len(known) or any(a is not b for a, b in zip(params, known, strict=True)):
            owner = {id(p): i for i in range(1, self._count) for p in self.parameters_of(i)}
            members = [[] for _ in range(self._count)]
            for param in params:
                members[owner.get(id(param), 0)].append(param)
            self._membership = (params, members)
        return members

    def _named(self, params: Sequence[Tensor]) -> str | None:
        bad = last_bad(params)
        return None if bad is None else f"the gradient of {self.name_of(params[bad])}"

    def _conclude(self, overflow: Sequence[bool], where: Sequence[str | None]) -> None:
        for i in range(self._pinned, self._count):
            self._states[i] = self.rule.after(self._states[i], overflow[i])
        self._settle()
        for i in range(self._pinned, self._count):
            self._alarms[i].observe(self._states[i].scale, overflow[i], where[i])

    def _own_state(self) -> dict[str, Any]:
        return {
            "names": list(self._names),
            "states": [list(state) for state in self._states],
            "alarms": [alarm.state() for alarm in self._alarms],
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        if list(state["names"]) != list(self._names):
            raise ValueError(
                f"the checkpoint holds the groups {list(state['names'])}, but this scaler has {list(self._names)}; "
                "build it with the groups that it was saved with."
            )
        self._in_use = None
        self._states = [ScaleState(*entry) for entry in state["states"]]
        for alarm, entry in zip(self._alarms, state["alarms"], strict=True):
            alarm.load(entry)
        self._settle()


def checked_scales(scales: Any, groups: int, rule: ScaleRule, name: str = "init_scale") -> list[float]:
    """Return one scale per group.

    Raises:
        TypeError, ValueError: A scale is not a number or out of bounds, or the list has another length.
    """
    if isinstance(scales, (list, tuple)):
        if len(scales) != groups:
            raise ValueError(f"{name}: found {len(scales)} scales for {groups} groups; give one for each, or a number.")
        listed = list(scales)
    else:
        listed = [scales] * groups
    return [rule.start(scale, name).scale for scale in listed]
