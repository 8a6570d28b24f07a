"""Freezing schedules: pure functions of the settings, so a resumed run needs only the step."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from torchboost.graph.blocks import group_starts

MOST_STEPS = 2**53
"""The longest run. Beyond it, shares of the run are not exact in float64."""

BACKWARD_SHARE = 2 / 3
"""Share of the backward pass in a training step: it costs two forward passes."""

_CHUNK = 8192


class Schedule(NamedTuple):
    """Maps an update, counted from 0, to the number of frozen groups."""

    frozen: Callable[[int], int]
    prefixes: int  # the most different values
    begins: int | None = None  # if it freezes for good from an update on: that update

    def __call__(self, step: int) -> int:
        """Return the number of frozen groups at an update."""
        return self.frozen(step)


def repeated(indices: Sequence[int]) -> Schedule:
    """Return a schedule that repeats a list of at least one index."""
    return Schedule(lambda step: indices[step % len(indices)], len(set(indices)))


def continuous(groups: int, full_share: float) -> Schedule:
    """Return MindSpore's type 0: full training, then 1, 2, ... groups frozen, at most all but one, repeated.

    Example:
        >>> schedule = continuous(3, 0.5)
        >>> [schedule(step) for step in range(6)]
        [0, 0, 1, 2, 0, 0]
    """
    period = period_of(groups, full_share)
    full = period - groups + 1
    return Schedule(lambda step: max(0, step % period - full + 1), groups - (full == 0))


def period_of(groups: int, full_share: float) -> int:
    """Return the length of a period of :func:`continuous`.

    For a share p, it has ``int(p (n-1) // (1-p) + 0.5)`` steps that train everything, and ``n-1`` others.
    """
    return max(1, int(full_share * (groups - 1) // (1 - full_share) + 0.5) + groups - 1)


def interval(groups: int, full_share: float, length: int, seed: int) -> Schedule:
    """Return MindSpore's type 1: random indices that keep the share of frozen steps near ``1 - full_share``.

    The first step trains everything. At each later one, if the share of frozen steps so far is below
    ``1 - full_share``, index k is drawn with a probability proportional to ``groups - k``, otherwise it is 0. The
    numbers are those that MindSpore draws from NumPy's global generator after ``np.random.seed(seed)``, with a seed
    below 2**32. They repeat after ``length`` steps (:func:`length_of`).

    Cost: entries are made on demand, about 0.2 seconds per million, and take two bytes each.
    """
    if groups <= 1:
        return repeated([0])
    random, weights = np.random.RandomState(seed), np.arange(1, groups)
    # The same as RandomState.choice with the probabilities of MindSpore. It draws one number per entry.
    shares = (weights / weights.sum()).cumsum()
    shares /= shares[-1]
    chunks: list[np.ndarray] = []
    count = 0

    def extend() -> None:
        nonlocal count
        first, drawn = len(chunks) * _CHUNK, []
        for step in range(max(1, first), first + _CHUNK):
            if count / step < 1 - full_share:
                count += 1
                drawn.append(step - first)
        indices = np.zeros(_CHUNK, dtype=np.int16 if groups < 2**15 else np.int64)
        indices[drawn] = groups - 1 - shares.searchsorted(random.random_sample(len(drawn)), side="right")
        chunks.append(indices)

    def frozen(step: int) -> int:
        chunk, place = divmod(step % max(1, length), _CHUNK)
        while len(chunks) <= chunk:
            extend()
        return int(chunks[chunk][place])

    return Schedule(frozen, groups)


def snapped(schedule: Schedule, groups: int, most: int) -> Schedule:
    """Return a schedule of so many groups, rounded down to at most ``most`` evenly spread indices, 0 included.

    Example:
        >>> schedule = snapped(repeated([0, 1, 2, 3, 4, 5]), 6, 3)
        >>> [schedule(step) for step in range(6)]
        [0, 0, 2, 2, 4, 4]
    """
    kept = group_starts(groups, most)
    return Schedule(lambda step: kept[bisect_right(kept, schedule(step)) - 1], len(kept))


def length_of(steps: int) -> int:
    """Return the length of MindSpore's sequences for a run of ``steps`` steps, 1 % more than the run."""
    return int(steps * 1.01)


def earliest(groups: int, full_share: float, steps: int) -> list[int]:
    """Return for each index the first step at which FreezeOut's cubic schedule allows it.

    Group i of n may be frozen from the share ``(t0 + (1 - t0) i / (n - 1))^3`` of the run on, with ``t0^3`` the share
    of steps that train everything (A. Brock et al., "FreezeOut: Accelerate Training by Progressively Freezing
    Layers", arXiv 1706.04983). The last group trains to the end.
    """
    start = full_share ** (1 / 3)
    shares = [(start + (1 - start) * index / max(1, groups - 1)) ** 3 for index in range(groups - 1)]
    return [0, *(round(share * steps) for share in shares)]


def progressive(costs: Sequence[float], full_share: float, steps: int, *, switches: int = 6) -> Schedule:
    """Choose at most ``switches`` steps of :func:`earliest` to freeze at, to save the most time.

    Freezing the first k groups saves two thirds of their ``costs``, shares of a step, until the next switch. Dynamic
    programming finds the optimal selection. No switch is earlier than the cubic schedule allows.

    Example:
        >>> schedule = progressive([0.25] * 4, 0.5, 100, switches=2)
        >>> [schedule(step) for step in (0, 63, 64, 80, 81)]
        [0, 0, 2, 2, 3]
    """
    allowed = earliest(len(costs), full_share, steps)
    saved = [0.0, *accumulate(BACKWARD_SHARE * cost for cost in costs[:-1])]
    candidates = [index for index in range(1, len(costs)) if allowed[index] < steps]

    @functools.cache
    def best(index: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Return the most that can be saved if ``index`` is the first of so many switches, and all of them."""
        options: list[tuple[float, tuple[int, ...]]] = [(saved[index] * (steps - allowed[index]), (index,))]
        for later in candidates if left > 1 else ():
            if later > index:
                gain, indices = best(later, left - 1)
                options.append((saved[index] * (allowed[later] - allowed[index]) + gain, (index, *indices)))
        return max(options)

    gain, indices = max((best(index, switches) for index in candidates), default=(0.0, ()))
    chosen = indices if gain > 0 else ()
    starts = [allowed[index] for index in chosen]
    first = starts[0] if starts else None
    return Schedule(lambda step: (0, *chosen)[bisect_right(starts, step)], len(chosen) + 1, first)
