"""A paired non-inferiority test that may be looked at after every pair, and stops as soon as it can decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from torchboost.measure.evidence import Interval
from torchboost.measure.statistics import LEAST_SPREAD, t_quantile

__all__ = ["Look", "SequentialTest", "State", "critical_values"]

State = Literal["open", "passed", "failed", "futile", "exhausted"]

_PATHS = 100_000
_SAFETY = 0.002
"""Subtracted from the error rate, for the error of the simulation that finds the limits."""

LEAST_ERROR = 0.003
"""The simulation finds no limits for smaller error rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is known after some pairs.

    Args:
        state: ``"passed"``: the mean difference is above minus the margin. ``"failed"``: it is below. ``"futile"``:
            more pairs would hardly show that it is above. ``"exhausted"``: all pairs were made and show neither.
            ``"open"``: make another pair.
        pairs: Number of differences.
        difference: Their mean, with bounds that hold at all looks together. Infinite with fewer than the least pairs.
        detectable: How far the mean must be above minus the margin to be shown with the pairs that are planned, in four
            of five repetitions, at the present spread. Infinite with fewer than two pairs.
    """

    state: State
    pairs: int
    difference: Interval
    detectable: float

    @property
    def decided(self) -> bool:
        """Whether no further pair is needed."""
        return self.state != "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialTest:
    """Test whether a mean difference is above ``-margin``, with looks after ``least`` to ``most`` pairs.

    At each look Student's statistic is compared with a limit that is stricter than that of a single test, and
    strictest at the first looks. For normal differences the probability of a false ``"passed"`` at any look is at most
    ``error``, and so is that of a false ``"failed"``: the limits are found by simulation, in which mean and spread
    cancel. Stopping as ``"futile"`` cannot cause either. With ``margin=0`` it tests superiority. A spread below a third
    of the margin counts as a third, so that equal differences are not taken as certain.

    For differences that are far from normal the rate is higher: a large drop that only a few seeds show is not seen if
    none of them is among the pairs.

    Source: group sequential tests, C. Jennison, B. Turnbull, "Group Sequential Methods with Applications to Clinical
    Trials", 1999, with nominal levels in proportion to the number of pairs.

    Args:
        margin: Largest accepted drop, at least 0, in units of the metric.
        most: Number of pairs after which the test ends.
        least: Number of pairs before the first look, at least 2.
        error: One-sided, from 0.003 to below 0.5.

    Raises:
        ValueError: An argument is out of range.
    """

    margin: float
    most: int = 12
    least: int = 3
    error: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"margin: found {self.margin!r}; give a finite number, at least 0.")
        if not 2 <= self.least <= self.most:
            raise ValueError(f"found least={self.least}, most={self.most}; needed: 2 <= least <= most.")
        if not LEAST_ERROR <= self.error < 0.5:
            raise ValueError(f"error: found {self.error!r}; give a number from {LEAST_ERROR} to below 0.5.")

    def look(self, differences: Sequence[float]) -> Look:
        """Decide after these differences, candidate minus baseline, in the order in which they were made.

        The looks between are made too, because a decision that was reached earlier stands. A difference that is not
        finite, as of a run that diverged, fails the test.

        Args:
            differences: Higher is better; those after the first ``most`` are ignored.
        """
        found = list(differences)[: self.most]
        for count in range(self.least, len(found)):
            look = self._at(found[:count])
            if look.state in ("passed", "failed"):
                return look
        return self._at(found)

    def _at(self, found: Sequence[float]) -> Look:
        count = len(found)
        if not all(map(math.isfinite, found)):
            nothing = Interval(low=-math.inf, mid=-math.inf, high=-math.inf, confidence=1 - self.error)
            return Look(state="failed", pairs=count, difference=nothing, detectable=math.inf)
        mean = sum(found) / count if count else 0.0
        if count < self.least:
            wide = Interval(low=-math.inf, mid=mean, high=math.inf, confidence=1 - self.error)
            return Look(state="open", pairs=count, difference=wide, detectable=math.inf)
        spread = max(float(np.std(found, ddof=1)), LEAST_SPREAD * self.margin)
        limits = critical_values(self.least, self.most, self.error)
        reach = limits[count - self.least] * spread / math.sqrt(count)
        last = spread / math.sqrt(self.most)
        needed = limits[-1] * last
        detectable = needed + t_quantile(0.8, self.most - 1) * last
        difference = Interval(low=mean - reach, mid=mean, high=mean + reach, confidence=1 - self.error)
        state = self._state(difference, spread / math.sqrt(count), needed, count)
        return Look(state=state, pairs=count, difference=difference, detectable=detectable)

    def _state(self, difference: Interval, error: float, needed: float, count: int) -> State:
        if difference.low > -self.margin:
            return "passed"
        if difference.high < -self.margin:
            return "failed"
        if count >= self.most:
            return "exhausted"
        # Even the upper end of an 80 % interval of the mean would not pass the last look.
        best = difference.mid + t_quantile(0.9, count - 1) * error
        return "futile" if best < needed - self.margin else "open"


@lru_cache(maxsize=64)
def critical_values(least: int, most: int, error: float) -> tuple[float, ...]:
    """Return the limits of Student's statistic at the looks after ``least`` to ``most`` pairs.

    The nominal level of a look is in proportion to its number of pairs. The factor is chosen so that a mean of 0
    exceeds any of the limits with probability ``error``, found by simulating 100,000 sequences of normal numbers.
    Cost: under a second, once per process and set of arguments.
    """
    drawn = np.random.default_rng(0).standard_normal((_PATHS, most))
    counts = np.arange(1, most + 1)
    means = np.cumsum(drawn, axis=1) / counts
    squares = np.cumsum(drawn**2, axis=1) - counts * means**2
    looks = counts[least - 1 :]
    spread = np.sqrt(np.maximum(squares[:, least - 1 :], 1e-12) / (looks - 1))
    statistics = means[:, least - 1 :] / (spread / np.sqrt(looks))
    low, high = 0.0, error
    for _ in range(24):
        middle = (low + high) / 2
        crossed = (statistics > np.array(_limits(middle, looks, most))).any(axis=1).mean()
        low, high = (middle, high) if crossed <= error - _SAFETY else (low, middle)
    return tuple(_limits(low, looks, most))


def _limits(level: float, looks: np.ndarray, most: int) -> list[float]:
    return [t_quantile(1 - max(level, 1e-9) * count / most, int(count) - 1) for count in looks]
