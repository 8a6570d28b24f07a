"""The rule that adjusts a loss scale after overflows, and the alarm for a collapsing scale."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchboost.core.arguments import check_number, is_integer
from torchboost.errors import ScaleCollapseWarning

__all__ = ["Alarm", "ScaleRule", "ScaleState", "check_scale"]

LARGEST = 2.0**100
"""Scales stay within this and its inverse, so that float32 holds both."""


class ScaleState(NamedTuple):
    """The state of a scale.

    Args:
        scale: The scale.
        clean: Updates without overflow since the scale last moved.
        patience: Overflows that are skipped before the scale falls.
    """

    scale: float
    clean: int = 0
    patience: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRule:
    """The rule that adjusts a scale after overflows: MindSpore's, with bounds and hysteresis.

    On overflow ``scale = max(scale * shrink, floor)`` and the window starts again; after every ``window`` updates
    without one ``scale = min(scale * growth, ceiling)``.

    Args:
        growth: Factor after a clean window, at least 1.
        shrink: Factor at an overflow, above 0 and below 1.
        window: Clean updates per growth.
        floor: Smallest scale.
        ceiling: Largest scale.
        hysteresis: Number of overflows before the scale shrinks; a clean window resets the count.

    Raises:
        TypeError, ValueError: A setting is not valid.

    Example:
        >>> import torchboost
        >>> rule = torchboost.ScaleRule(growth=2.0, shrink=0.5, window=2)
        >>> rule.after(rule.start(8.0), overflow=True).scale
        4.0
    """

    growth: float = 2.0
    shrink: float = 0.5
    window: int = 1000
    floor: float = 1.0
    ceiling: float = 2.0**32
    hysteresis: int = 1

    def __post_init__(self) -> None:
        for name in ("window", "hysteresis"):
            value = getattr(self, name)
            if not is_integer(value) or value < 1:
                raise ValueError(f"{name}: found {value!r}; give an integer of 1 or more.")
        for name in ("growth", "shrink", "floor", "ceiling"):
            check_number(name, getattr(self, name), above=True)
        if self.growth < 1:
            raise ValueError(f"growth: found {self.growth}; a clean window multiplies the scale by it: give 1 or more.")
        if self.shrink >= 1:
            raise ValueError(f"shrink: found {self.shrink}; an overflow multiplies the scale by it: give less than 1.")
        if not 1 / LARGEST <= self.floor <= self.ceiling <= LARGEST:
            raise ValueError(
                f"floor, ceiling: found {self.floor} and {self.ceiling}; the floor must not be above the ceiling, and "
                "both lie between 2**-100 and 2**100."
            )

    def start(self, scale: float, name: str = "init_scale") -> ScaleState:
        """Return the state at the beginning of a run; ``name`` is what the caller calls the scale.

        Raises:
            TypeError, ValueError: The scale is not a number, or outside floor and ceiling.
        """
        check_scale(name, scale)
        if not self.floor <= scale <= self.ceiling:
            raise ValueError(
                f"{name}: found {scale}; allowed are {self.floor} (floor) to {self.ceiling} (ceiling): change the "
                "scale or the bound."
            )
        return ScaleState(float(scale), 0, self.hysteresis - 1)

    def after(self, state: ScaleState, overflow: bool) -> ScaleState:
        """Return the state after an update; ``overflow`` says whether it overflowed."""
        scale, clean, patience = state
        if overflow and patience:
            return ScaleState(scale, 0, patience - 1)
        if overflow:
            return ScaleState(max(scale * self.shrink, self.floor), 0, 0)
        if clean + 1 < self.window:
            return ScaleState(scale, clean + 1, patience)
        return ScaleState(min(scale * self.growth, self.ceiling), 0, self.hysteresis - 1)


class Alarm:
    """Counts the overflows of one scale and warns once if it collapses.

    It collapses when eight updates in a row overflow, or when it is nearer to its floor than to its start (on a
    logarithmic scale).

    Args:
        what: The scale in words, such as ``"the loss scale of group 'stem'"``.
        start: Scale at the beginning.
        floor: Smallest scale.

    Attributes:
        overflows: How many so far.
        in_a_row: Number of consecutive overflows up to the last update.
    """

    ROW = 8

    def __init__(self, what: str, start: float, floor: float) -> None:
        self.overflows = self.in_a_row = 0
        self._what, self._start, self._floor = what, start, floor
        self._low = math.sqrt(start * floor)
        self._warned = False

    def observe(self, scale: float, overflow: bool, where: str | None) -> None:
        """Record an update, with the scale after it and the name of a gradient that was not finite."""
        self.in_a_row = self.in_a_row + 1 if overflow else 0
        self.overflows += overflow
        falls = overflow and (scale < self._low or self.in_a_row >= self.ROW)
        if falls and not self._warned:
            warnings.warn(
                f"{self._what} fell from {self._start:g} to {scale:g} (floor {self._floor:g}): {self.in_a_row} "
                f"overflows in a row, {self.overflows} in all; not finite: {where or 'a gradient of another rank'}. "
                "The run will fail if this continues: lower the learning rate, clip the gradients, or compute this "
                "part in bfloat16 or float32.",
                ScaleCollapseWarning,
                stacklevel=4,
            )
        self._warned = falls or (self._warned and (overflow or scale < self._low))

    def state(self) -> list[int]:
        """Return the counters."""
        return [self.overflows, self.in_a_row, int(self._warned)]

    def load(self, state: Sequence[int]) -> None:
        """Resume from :meth:`state`."""
        self.overflows, self.in_a_row, warned = state
        self._warned = bool(warned)


def check_scale(name: str, value: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``value`` is a number that can scale gradients in float32."""
    check_number(name, value, above=True)
    if not 1 / LARGEST <= value <= LARGEST:
        raise ValueError(f"{name}: found {value}; allowed are 2**-100 to 2**100.")
