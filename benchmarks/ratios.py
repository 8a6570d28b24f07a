"""The ratio of the totals of two runs, whose steps differ in cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchboost.measure.evidence import Interval


def total_ratio(
    baseline: Sequence[float], contestant: Sequence[float], *, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Return ``sum(baseline) / sum(contestant)`` with its paired bootstrap interval, for steps of different cost.

    Rounds are resampled as a whole, so a disturbance in one round affects both.
    """
    pairs = np.stack([np.asarray(baseline, dtype=np.float64), np.asarray(contestant, dtype=np.float64)])
    picks = np.random.default_rng(seed).integers(0, pairs.shape[1], size=(2000, pairs.shape[1]))
    totals = pairs[:, picks].sum(axis=2)
    tail = (1 - confidence) / 2
    low, high = np.quantile(totals[0] / totals[1], [tail, 1 - tail])
    mid = pairs[0].sum() / pairs[1].sum()
    return Interval(low=float(min(low, mid)), mid=float(mid), high=float(max(high, mid)), confidence=confidence)
