"""Intervals for paired measurements of speed and accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist, fmean

import numpy as np

from torchboost.measure.evidence import Interval, Quality

__all__ = [
    "LEAST_SPREAD",
    "bootstrap_median",
    "detectable_ratio",
    "exact_median",
    "mean_of",
    "noninferiority",
    "paired_difference",
    "paired_ratio",
    "t_quantile",
    "total_ratio",
]

POWER = 0.8
RESAMPLES = 2000
LEAST_SPREAD = 1 / 3
"""Share of the margin that the spread counts as at least: a few equal differences do not show that all are equal."""


def mean_of(values: Iterable[float]) -> float:
    """Return the mean of one or more values; NaN if their sum is too large for a number, or if infinities cancel."""
    try:
        return fmean(list(values))
    except (OverflowError, ValueError):
        return math.nan


def bootstrap_median(
    values: Sequence[float], *, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Return the median with its percentile bootstrap interval.

    Limits: the interval never exceeds the smallest and the largest value, which enclose the true median with
    probability ``1 - 2 ** (1 - n)``. Fewer than six values cannot give 95 %. A single value is its own interval.

    Raises:
        ValueError: There are no values, or the confidence is outside (0, 1).
    """
    _check_confidence(confidence)
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        raise ValueError("found no values; an interval needs at least one.")
    medians = _resampled_medians(data, resamples, seed)
    tail = (1 - confidence) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Interval(low=float(low), mid=float(np.median(data)), high=float(high), confidence=confidence)


def exact_median(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Return the median with an interval between two order statistics, which is exact for few values.

    The bootstrap's interval is too narrow for fewer than about 20 values. This one covers the true median with at least
    the stated probability for any continuous distribution. Fewer than six values cannot give 95 %.

    Args:
        values: Independent values.
        confidence: Two-sided.

    Raises:
        ValueError: There are too few values for this confidence, or the confidence is outside (0, 1).

    Example:
        >>> exact_median([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).high
        6.0
    """
    _check_confidence(confidence)
    ordered, count = sorted(values), len(values)
    below, tail = 0, 2.0 * 0.5**count
    if count < 1 or tail > 1 - confidence:
        raise ValueError(f"found {count} values; an exact interval of {confidence:.0%} for a median needs more.")
    while True:
        tail += 2.0 * math.comb(count, below + 1) * 0.5**count
        if tail > 1 - confidence or 2 * below + 3 > count:
            break
        below += 1
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return Interval(low=ordered[below], mid=middle, high=ordered[count - 1 - below], confidence=confidence)


def paired_ratio(
    baseline: Sequence[float], contestant: Sequence[float], *, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Return the typical ratio ``baseline[i] / contestant[i]``. Above 1 the contestant is faster.

    The statistic is the exponential of the median of the log-ratios. Logarithms make it symmetric: swapping the two
    gives exactly the reciprocal interval. The median is used instead of the mean because the noise of a shared machine
    is one-sided and heavy-tailed: a disturbance in one round changes a mean by tens of percent, but not the median. If
    the steps of a contestant alternate between cheap and expensive ones, sample it in whole cycles (``calls`` of
    :func:`torchboost.measure.stopwatch.compare`).

    Args:
        baseline: Seconds, one per round.
        contestant: Seconds, one per round, same rounds in the same order.
        confidence: Two-sided.
        seed: Of the resampling.

    Raises:
        ValueError: Different lengths, nothing measured, or a time that is not positive.
    """
    interval = bootstrap_median(_log_ratios(baseline, contestant), confidence=confidence, seed=seed)
    low, mid, high = (math.exp(x) for x in (interval.low, interval.mid, interval.high))
    return Interval(low=low, mid=mid, high=high, confidence=confidence)


def total_ratio(
    baseline: Sequence[float], contestant: Sequence[float], *, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Return ``sum(baseline) / sum(contestant)`` with its paired bootstrap interval, for steps of different cost.

    Rounds are resampled as a whole, so a disturbance in one round affects both.

    Raises:
        ValueError: Different lengths, nothing measured, or a time that is not positive.
    """
    _log_ratios(baseline, contestant)
    _check_confidence(confidence)
    pairs = np.stack([np.asarray(baseline, dtype=np.float64), np.asarray(contestant, dtype=np.float64)])
    picks = np.random.default_rng(seed).integers(0, pairs.shape[1], size=(RESAMPLES, pairs.shape[1]))
    totals = pairs[:, picks].sum(axis=2)
    tail = (1 - confidence) / 2
    low, high = np.quantile(totals[0] / totals[1], [tail, 1 - tail])
    mid = pairs[0].sum() / pairs[1].sum()
    return Interval(low=float(min(low, mid)), mid=float(mid), high=float(max(high, mid)), confidence=confidence)


def detectable_ratio(
    baseline: Sequence[float], contestant: Sequence[float], *, confidence: float = 0.95, seed: int = 0
) -> float:
    """Return the smallest gain that these rounds would have shown in four of five repetitions; 0.03 is 3 %.

    It is ``exp((z_confidence + z_power) * s) - 1`` with ``s`` the bootstrap standard error of the median
    log-ratio. A result of "no difference" does not exclude smaller differences. Infinite for fewer than three rounds.
    """
    _check_confidence(confidence)
    logs = np.asarray(_log_ratios(baseline, contestant))
    if logs.size < 3:
        return math.inf
    spread = float(np.std(_resampled_medians(logs, RESAMPLES, seed)))
    normal = NormalDist()
    return math.exp((normal.inv_cdf(0.5 + confidence / 2) + normal.inv_cdf(POWER)) * spread) - 1


def paired_difference(baseline: Sequence[float], candidate: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Return the mean of ``candidate[i] - baseline[i]`` with a one-sided Student bound on each side.

    Each bound alone holds with ``confidence``, as a non-inferiority test requires; both together hold with ``2 *
    confidence - 1``. Student's interval is used because there are three to ten seeds, for which a bootstrap interval is
    far too narrow.

    Raises:
        ValueError: Different lengths or fewer than two pairs.
    """
    _check_confidence(confidence)
    _check_pairs(baseline, candidate, least=2)
    differences = np.asarray(candidate, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    mean = float(differences.mean())
    reach = t_quantile(confidence, differences.size - 1) * _standard_error(differences)
    return Interval(low=mean - reach, mid=mean, high=mean + reach, confidence=confidence)


def noninferiority(
    baseline: Sequence[float],
    candidate: Sequence[float],
    margin: float,
    *,
    confidence: float = 0.95,
    against: str = "baseline",
) -> Quality:
    """Test whether the candidate is at most ``margin`` worse than the baseline. Higher metrics are better.

    It passes if the one-sided lower bound of the paired difference is above ``-margin``. To see no difference is not
    enough: the runs must exclude the drop. A spread below a third of the margin counts as a third, so that equal
    differences are not taken as certain. Negate the metric if lower is better.

    Args:
        baseline: Final metric of the baseline, one per seed.
        candidate: Final metric of the candidate, same seeds in the same order.
        margin: Largest accepted drop in units of the metric, positive.
        confidence: One-sided.
        against: Name of the baseline, stored in the result.

    Raises:
        ValueError: Different lengths, fewer than two seeds, or a margin that is not positive.
    """
    if not margin > 0:
        raise ValueError(f"margin: found {margin!r}; a non-inferiority margin is positive, in units of the metric.")
    mean = paired_difference(baseline, candidate, confidence=confidence).mid
    deltas = np.asarray(candidate, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    error = max(_standard_error(deltas), LEAST_SPREAD * margin / math.sqrt(deltas.size))
    bound = t_quantile(confidence, deltas.size - 1) * error
    difference = Interval(low=mean - bound, mid=mean, high=mean + bound, confidence=confidence)
    return Quality(
        baseline=against,
        difference=difference,
        margin=margin,
        seeds=deltas.size,
        passed=difference.low > -margin,
        detectable=bound + t_quantile(POWER, deltas.size - 1) * error,
    )


def t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's distribution with ``freedom`` >= 1 degrees of freedom, to 1e-9."""
    if freedom < 1:
        raise ValueError(f"freedom: found {freedom}; at least 1 degree of freedom is needed.")
    if not 0 < probability < 1:
        raise ValueError(f"probability: found {probability}; allowed are values between 0 and 1, both excluded.")
    if probability < 0.5:
        return -t_quantile(1 - probability, freedom)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf_at_angle(middle, freedom) < probability else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _t_cdf_at_angle(angle: float, freedom: int) -> float:
    # Finite series in the angle atan(t / sqrt(freedom)), exact for integers: Abramowitz and Stegun 26.7.3, 26.7.4.
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    inner = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + inner / 2


def _log_ratios(baseline: Sequence[float], contestant: Sequence[float]) -> list[float]:
    _check_pairs(baseline, contestant, least=1)
    if min(*baseline, *contestant) <= 0:
        raise ValueError(f"found a time of {min(*baseline, *contestant)!r} seconds; times must be positive.")
    return [math.log(b / c) for b, c in zip(baseline, contestant, strict=True)]


def _resampled_medians(data: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    picks = np.random.default_rng(seed).integers(0, data.size, size=(resamples, data.size))
    # Sorting short rows takes a third of the time of np.median, which partitions rows one by one.
    ordered = np.sort(data[picks], axis=1)
    return (ordered[:, (data.size - 1) // 2] + ordered[:, data.size // 2]) / 2


def _standard_error(differences: np.ndarray) -> float:
    return float(differences.std(ddof=1)) / math.sqrt(differences.size)


def _check_pairs(first: Sequence[float], second: Sequence[float], *, least: int) -> None:
    if len(first) != len(second):
        raise ValueError(
            f"found {len(first)} and {len(second)} values; a paired comparison needs the same number of each."
        )
    if len(first) < least:
        raise ValueError(f"found {len(first)} pairs; at least {least} needed.")


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: found {confidence!r}; allowed are values between 0 and 1, both excluded.")
