"""Freezing schedules: pure functions of the settings, so a resumed run needs only the step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "MOST_STEPS",
    "Continuous",
    "Interval",
    "Repeated",
    "Schedule",
    "Snapped",
    "Switches",
    "earliest",
    "length_of",
    "progressive",
]

Schedule = Callable[[int], int]
"""Maps an update, counted from 0, to the number of frozen groups."""

MOST_STEPS = 2**53
"""The longest run; beyond it, shares of the run are not exact in float64."""

BACKWARD_SHARE = 2 / 3
"""Share of the backward pass in a training step: it costs two forward passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """A monotone schedule: from ``steps[i]`` on, the first ``indices[i]`` groups are frozen.

    Args:
        steps: Updates before which each switch happens, ascending.
        indices: Groups frozen from then on, ascending.
    """

    steps: tuple[int, ...]
    indices: tuple[int, ...]

    @property
    def prefixes(self) -> int:
        """Number of different values of the schedule, 0 included."""
        return len(self.indices) + 1

    def __call__(self, step: int) -> int:
        """Return the number of frozen groups at an update, counted from 0."""
        at = bisect_right(self.steps, step)
        return self.indices[at - 1] if at else 0


@dataclass(frozen=True, slots=True)
class Repeated:
    """A list of indices, one per update, that repeats.

    Args:
        indices: At least one.
    """

    indices: tuple[int, ...]

    @property
    def prefixes(self) -> int:
        """Number of different values of the schedule."""
        return len(set(self.indices))

    def __call__(self, step: int) -> int:
        """Return the number of frozen groups at an update, counted from 0."""
        return self.indices[step % len(self.indices)]


@dataclass(frozen=True, slots=True)
class Continuous:
    """MindSpore's type 0: full training, then 1, 2, ... groups frozen, repeated.

    Args:
        groups: Number of groups; index k freezes the first k, at most ``groups - 1``.
        full_share: Share p of steps that train everything; a period has ``int(p (n-1) // (1-p) + 0.5)`` of these.

    Example:
        >>> schedule = Continuous(3, 0.5)
        >>> [schedule(step) for step in range(6)]
        [0, 0, 1, 2, 0, 0]
    """

    groups: int
    full_share: float

    @property
    def full(self) -> int:
        """Steps of a period that train everything."""
        return int(self.full_share * (self.groups - 1) // (1 - self.full_share) + 0.5)

    @property
    def period(self) -> int:
        """Length of a period in steps, at least 1."""
        return max(1, self.full + self.groups - 1)

    @property
    def prefixes(self) -> int:
        """Number of different values of the schedule."""
        return self.groups - (self.full == 0 and self.groups > 1)

    def __call__(self, step: int) -> int:
        """Return the number of frozen groups at an update, counted from 0."""
        return max(0, step % self.period - self.full + 1) if self.groups > 1 else 0


class Interval:
    """MindSpore's type 1: random indices that keep the share of frozen steps near ``1 - full_share``.

    The first step trains everything. At each later one, if the share of frozen steps so far is below
    ``1 - full_share``, index k is drawn with a probability proportional to ``groups - k``, otherwise it is 0. The
    numbers are those that MindSpore draws from NumPy's global generator after ``np.random.seed(seed)``. The schedule
    repeats after ``length`` steps.

    Args:
        groups: Number of groups.
        full_share: Share of steps that train everything.
        length: See :func:`length_of`.
        seed: Seed of the generator, 0 or more and below 2**32.

    Cost: entries are made on demand, about 0.2 seconds per million, and take two bytes each.
    """

    _CHUNK = 8192

    def __init__(self, groups: int, full_share: float, length: int, seed: int) -> None:
        self.groups = groups
        self._share, self._length = 1 - full_share, max(1, length)
        self._random = np.random.RandomState(seed)
        weights = np.arange(1, groups)
        # The same as RandomState.choice with the probabilities of MindSpore; it draws one number per entry.
        shares = (weights / weights.sum()).cumsum() if groups > 1 else np.ones(1)
        self._shares = shares / shares[-1]
        self._chunks: list[np.ndarray] = []
        self._frozen = 0

    @property
    def prefixes(self) -> int:
        """Maximum number of different values of the schedule."""
        return self.groups

    def __call__(self, step: int) -> int:
        """Return the number of frozen groups at an update, counted from 0."""
        if self.groups <= 1:
            return 0
        chunk, place = divmod(step % self._length, self._CHUNK)
        while len(self._chunks) <= chunk:
            self._chunks.append(self._next())
        return int(self._chunks[chunk][place])

    def _next(self) -> np.ndarray:
        first, frozen, share = len(self._chunks) * self._CHUNK, self._frozen, self._share
        drawn = []
        for step in range(max(1, first), first + self._CHUNK):
            if frozen / step < share:
                frozen += 1
                drawn.append(step - first)
        self._frozen = frozen
        indices = np.zeros(self._CHUNK, dtype=np.int16 if self.groups < 2**15 else np.int64)
        places = self._shares.searchsorted(self._random.random_sample(len(drawn)), side="right")
        indices[drawn] = self.groups - 1 - places
        return indices


@dataclass(frozen=True, slots=True)
class Snapped:
    """Another schedule, rounded down to at most ``most`` evenly spread indices, 0 included.

    Args:
        schedule: The schedule to round.
        groups: Its number of groups.
        most: Maximum number of indices, at least 2.

    Example:
        >>> schedule = Snapped(Repeated((0, 1, 2, 3, 4, 5)), 6, 3)
        >>> [schedule(step) for step in range(6)]
        [0, 0, 2, 2, 4, 4]
    """

    schedule: Schedule
    groups: int
    most: int

    @property
    def kept(self) -> tuple[int, ...]:
        """The indices that remain."""
        count = min(self.most, self.groups)
        return tuple(place * self.groups // count for place in range(count))

    @property
    def prefixes(self) -> int:
        """Number of different values of the schedule."""
        return len(self.kept)

    def __call__(self, step: int) -> int:
        """Return the number of frozen groups at an update, counted from 0."""
        return self.kept[bisect_right(self.kept, self.schedule(step)) - 1]


def length_of(steps: int) -> int:
    """Return the length of MindSpore's sequences for a run of ``steps`` steps, 1 % more than the run."""
    return int(steps * 1.01)


def earliest(groups: int, full_share: float, steps: int) -> list[int]:
    """Return for each index the first step at which FreezeOut's cubic schedule allows it.

    Group i of n may be frozen from the share ``(t0 + (1 - t0) i / (n - 1))^3`` of the run on, with ``t0^3`` the share
    of steps that train everything (A. Brock et al., "FreezeOut: Accelerate Training by Progressively Freezing
    Layers", arXiv 1706.04983); the last group trains to the end.
    """
    start = full_share ** (1 / 3)
    shares = [(start + (1 - start) * index / max(1, groups - 1)) ** 3 for index in range(groups - 1)]
    return [0, *(round(share * steps) for share in shares)]


def progressive(costs: Sequence[float], full_share: float, steps: int, *, switches: int = 6) -> Switches:
    """Choose at most ``switches`` steps of :func:`earliest` to freeze at, to save the most time.

    Freezing the first k groups saves two thirds of their share of a step until the next switch. Dynamic programming
    finds the optimal selection; no switch is earlier than the cubic schedule allows.

    Args:
        costs: Share of the computation in each group.
        full_share: Share of steps that train everything.
        steps: Length of the run.
        switches: Maximum number of switches.

    Example:
        >>> progressive([0.25] * 4, 0.5, 100, switches=2)
        Switches(steps=(64, 81), indices=(2, 3))
    """
    allowed = earliest(len(costs), full_share, steps)
    saved = [0.0]
    for cost in costs[:-1]:
        saved.append(saved[-1] + BACKWARD_SHARE * cost)
    candidates = [index for index in range(1, len(costs)) if allowed[index] < steps]
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
    for index in reversed(candidates):
        for left in range(1, switches + 1):
            options: list[tuple[float, tuple[int, ...]]] = [(saved[index] * (steps - allowed[index]), (index,))]
            for later in candidates:
                if later > index and left > 1:
                    gain, indices = best[later, left - 1]
                    options.append((saved[index] * (allowed[later] - allowed[index]) + gain, (index, *indices)))
            best[index, left] = max(options)
    gain, indices = max((best[index, switches] for index in candidates), default=(0.0, ()))
    if gain <= 0:
        return Switches(steps=(), indices=())
    return Switches(steps=tuple(allowed[index] for index in indices), indices=indices)
