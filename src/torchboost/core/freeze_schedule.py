"""Which blocks are frozen at which update: pure functions of settings, so that a resumed run needs only the step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Repeated", "Switches", "continuous", "earliest", "interval", "progressive", "snapped"]

BACKWARD_SHARE = 2 / 3
"""Of a training step: a backward pass costs two forward passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """A monotone schedule: from ``steps[i]`` on the first ``indices[i]`` groups are frozen.

    Args:
        steps: Updates before which each switch happens, ascending.
        indices: Groups frozen from then on, ascending.
    """

    steps: tuple[int, ...]
    indices: tuple[int, ...]

    @property
    def prefixes(self) -> int:
        """How many different numbers of frozen groups there are, 0 included."""
        return len(self.indices) + 1

    def __call__(self, step: int) -> int:
        """Return how many groups are frozen at an update, counted from 0."""
        at = bisect_right(self.steps, step)
        return self.indices[at - 1] if at else 0


@dataclass(frozen=True, slots=True)
class Repeated:
    """A list of indices, one per update, that begins again when it is used up.

    Args:
        indices: At least one.
    """

    indices: tuple[int, ...]

    @property
    def prefixes(self) -> int:
        """How many different numbers of frozen groups there are."""
        return len(set(self.indices))

    def __call__(self, step: int) -> int:
        """Return how many groups are frozen at an update, counted from 0."""
        return self.indices[step % len(self.indices)]


def continuous(groups: int, full_share: float, steps: int) -> list[int]:
    """Return the reference's type 0: a stretch that trains everything, then 1, 2, ... groups frozen, over and over.

    Args:
        groups: Number of groups; index k freezes the first k, at most ``groups - 1``.
        full_share: Share p of steps that train everything; a period has ``int(p (n-1) // (1-p) + 0.5)`` of them.
        steps: The result has whole periods of at least ``int(1.01 * steps)`` entries.

    Example:
        >>> continuous(3, 0.5, 4)
        [0, 0, 1, 2]
    """
    length = int(steps * 1.01)
    if groups <= 1:
        return [0] * length
    full = int(full_share * (groups - 1) // (1 - full_share) + 0.5)
    period = [0] * full + list(range(1, groups))
    return period * -(-length // len(period))


def interval(groups: int, full_share: float, steps: int, seed: int) -> list[int]:
    """Return the reference's type 1: random indices, the frozen share of the steps so far kept near ``1 - full_share``.

    The first step trains everything. At each later one, if the share of frozen steps so far is below
    ``1 - full_share``, index k is drawn with a probability proportional to ``groups - k``, else it is 0. The numbers
    are those that the reference draws from NumPy's global generator under ``np.random.seed(seed)``.
    """
    length = int(steps * 1.01)
    if groups <= 1:
        return [0] * length
    random = np.random.RandomState(seed)
    choices = np.arange(groups - 1, 0, -1)
    weights = np.arange(1, groups)
    chances = weights / weights.sum()
    sequence, frozen = [0], 0
    while len(sequence) < length:
        index = int(random.choice(choices, p=chances)) if frozen / len(sequence) < 1 - full_share else 0
        frozen += index > 0
        sequence.append(index)
    return sequence[:length]


def earliest(groups: int, full_share: float, steps: int) -> list[int]:
    """Return for each index the step from which FreezeOut's cubic schedule allows it.

    Group i of n may be frozen from the share ``(t0 + (1 - t0) i / (n - 1))^3`` of the run on, with ``t0^3`` the share
    of steps that train everything (A. Brock et al., "FreezeOut: Accelerate Training by Progressively Freezing
    Layers", arXiv 1706.04983); the last group trains to the end.
    """
    start = full_share ** (1 / 3)
    shares = [(start + (1 - start) * index / max(1, groups - 1)) ** 3 for index in range(groups - 1)]
    return [0, *(round(share * steps) for share in shares)]


def progressive(
    costs: Sequence[float],
    full_share: float,
    steps: int,
    *,
    switches: int = 6,
    step_seconds: float = 0.0,
    recompile_seconds: float = 0.0,
) -> Switches:
    """Choose at most ``switches`` moments of :func:`earliest` to freeze at, so that most time is saved.

    Freezing the first k groups saves two thirds of their share of a step, for all steps until the next switch; each
    switch costs one more compilation. The best selection is found exactly (dynamic programming), never earlier than
    the cubic schedule allows.

    Args:
        costs: Share of the computation in each group.
        full_share: Share of steps that train everything.
        steps: Length of the run.
        switches: Most switches.
        step_seconds: Time of a step, to weigh against ``recompile_seconds``.
        recompile_seconds: Time of one compilation; 0 for a model that is not compiled.

    Example:
        >>> progressive([0.25] * 4, 0.5, 100, switches=2)
        Switches(steps=(64, 81), indices=(2, 3))
    """
    allowed = earliest(len(costs), full_share, steps)
    saved = [0.0]
    for cost in costs[:-1]:
        saved.append(saved[-1] + BACKWARD_SHARE * cost * (step_seconds or 1.0))
    candidates = [index for index in range(1, len(costs)) if allowed[index] < steps]
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
    for index in reversed(candidates):
        for left in range(1, switches + 1):
            alone = saved[index] * (steps - allowed[index]) - recompile_seconds
            options: list[tuple[float, tuple[int, ...]]] = [(alone, (index,))]
            for later in candidates:
                if later > index and left > 1:
                    gain, chosen = best[later, left - 1]
                    span = allowed[later] - allowed[index]
                    options.append((saved[index] * span - recompile_seconds + gain, (index, *chosen)))
            best[index, left] = max(options)
    gain, chosen = max((best[index, switches] for index in candidates), default=(0.0, ()))
    if gain <= 0:
        return Switches(steps=(), indices=())
    return Switches(steps=tuple(allowed[index] for index in chosen), indices=chosen)


def snapped(sequence: Sequence[int], most: int) -> list[int]:
    """Round indices down so that at most ``most`` different ones are left, evenly spread, 0 among them.

    Example:
        >>> snapped([0, 1, 2, 3, 4, 5], 3)
        [0, 0, 2, 2, 4, 4]
    """
    present = sorted({0, *sequence})
    if len(present) <= most:
        return list(sequence)
    kept = [present[position * len(present) // most] for position in range(most)]
    return [kept[bisect_right(kept, index) - 1] for index in sequence]
