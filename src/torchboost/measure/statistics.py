"""Intervals for paired measurements of speed and accuracy, and tests that may be looked at while values come."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist, fmean
from typing import Literal

import numpy as np

from torchboost.measure.evidence import Interval
from torchboost.sheet import percent

__all__ = [
    "AnytimeTest",
    "ChangeTest",
    "Look",
    "SequentialTest",
    "bootstrap_median",
    "detectable_ratio",
    "exact_median",
    "mean_of",
    "mean_ratio",
    "paired_difference",
    "paired_ratio",
    "t_quantile",
    "unpaired_ratio",
]

POWER = 0.8
CONFIDENCE = 0.95
"""Of all intervals except in :func:`exact_median` and the tests, whose callers choose."""
RESAMPLES = 2000
LEAST_SPREAD = 1 / 3
"""Share of the margin that the spread counts as at least: a few equal differences do not show that all are equal."""
LEAST_ERROR = 0.003
"""The simulation of :func:`critical_values` finds no limits for smaller error rates."""
PLANNED_SHARE = 0.8
"""Share of the error that is for the looks for which there probably is time."""
_TAILS = ((1 - CONFIDENCE) / 2, 1 - (1 - CONFIDENCE) / 2)
_PATHS = 100_000
_SAFETY = 0.002
"""Subtracted from the error rate, for the error of the simulation that finds the limits."""
_EVERY, _MOST_TESTS = 25, 16
"""A :class:`ChangeTest` begins a test each time after this number of values, and has at most this number of tests."""

State = Literal["open", "passed", "failed", "futile", "exhausted"]


def mean_of(values: Iterable[float]) -> float:
    """Return the mean of one or more values, or NaN if their sum is too large for a number, or if infinities cancel."""
    try:
        return fmean(list(values))
    except (OverflowError, ValueError):
        return math.nan


def bootstrap_median(values: Sequence[float]) -> Interval:
    """Return the median with its percentile bootstrap interval of 95 %.

    Limits: the interval never exceeds the smallest and the largest value, which enclose the true median with
    probability ``1 - 2 ** (1 - n)``. Fewer than six values cannot give 95 %. A single value is its own interval.

    Raises:
        ValueError: There are no values.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        raise ValueError("found no values; an interval needs at least one.")
    low, high = np.quantile(_resampled_medians(data), _TAILS)
    return Interval(low=float(low), mid=float(np.median(data)), high=float(high))


def exact_median(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Return the median with an interval between two order statistics, which is exact for few values.

    The bootstrap's interval is too narrow for fewer than about 20 values. This one covers the true median with at least
    the stated probability for any continuous distribution. Fewer than six values cannot give 95 %.

    Args:
        values: Independent values.
        confidence: Two-sided.

    Raises:
        ValueError: There are too few values for this confidence.

    Example:
        >>> exact_median([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).high
        6.0
    """
    ordered, count = sorted(values), len(values)
    below, tail = 0, 2.0 * 0.5**count
    if count < 1 or tail > 1 - confidence:
        raise ValueError(f"found {count} values; an exact interval of {percent(confidence)} for a median needs more.")
    while True:
        tail += 2.0 * math.comb(count, below + 1) * 0.5**count
        if tail > 1 - confidence or 2 * below + 3 > count:
            break
        below += 1
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return Interval(low=ordered[below], mid=middle, high=ordered[count - 1 - below], confidence=confidence)


def paired_ratio(baseline: Sequence[float], contestant: Sequence[float]) -> Interval:
    """Return the typical ratio ``baseline[i] / contestant[i]``. Above 1 the contestant is faster.

    The statistic is the exponential of the median of the log-ratios. Logarithms make it symmetric: swapping the two
    gives exactly the reciprocal interval. The median is used instead of the mean because the noise of a shared machine
    is one-sided and heavy-tailed: a disturbance in one round changes a mean by tens of percent, but not the median. If
    the steps of a contestant alternate between cheap and expensive ones, sample it in whole cycles (``calls`` of
    :func:`torchboost.measure.stopwatch.compare`).

    Args:
        baseline: Seconds, one per round.
        contestant: Seconds, one per round, same rounds in the same order.

    Raises:
        ValueError: Different lengths, nothing measured, or a time that is not positive.
    """
    interval = bootstrap_median(_log_ratios(baseline, contestant))
    low, mid, high = (math.exp(x) for x in (interval.low, interval.mid, interval.high))
    return Interval(low=low, mid=mid, high=high)


def mean_ratio(baseline: Sequence[float], contestant: Sequence[float]) -> Interval:
    """Return the geometric mean of the ratios ``baseline[i] / contestant[i]`` with Student's interval of 95 %.

    It is for whole runs, of which there are few: two to five values do not enclose their median with 95 %.

    Raises:
        ValueError: Different lengths, fewer than two pairs, or a time that is not positive.
    """
    logs = np.asarray(_log_ratios(baseline, contestant))
    _check_pairs(baseline, contestant, least=2)
    middle = float(logs.mean())
    reach = t_quantile(_TAILS[1], logs.size - 1) * float(logs.std(ddof=1)) / math.sqrt(logs.size)
    return Interval(low=math.exp(middle - reach), mid=math.exp(middle), high=math.exp(middle + reach))


def unpaired_ratio(baseline: Sequence[float], contestant: Sequence[float]) -> Interval:
    """Return the ratio of the medians of times that were not measured in turns. Above 1 the contestant is faster.

    Each side is resampled by itself. A change between the two measurements, such as in the load of the machine, is
    part of the ratio and not of the interval. If they were measured in turns, use :func:`paired_ratio`.

    Raises:
        ValueError: Nothing measured, or a time that is not positive.
    """
    if not baseline or not contestant or min(*baseline, *contestant, 1.0) <= 0:
        raise ValueError(f"found {len(baseline)} and {len(contestant)} times; each side needs one, all positive.")
    logs = [np.log(np.asarray(times, dtype=np.float64)) for times in (baseline, contestant)]
    medians = [_resampled_medians(side, seed) for seed, side in enumerate(logs)]
    low, high = np.exp(np.quantile(medians[0] - medians[1], _TAILS))
    middle = float(np.exp(np.median(logs[0]) - np.median(logs[1])))
    return Interval(low=float(low), mid=middle, high=float(high))


def detectable_ratio(baseline: Sequence[float], contestant: Sequence[float]) -> float:
    """Return the smallest gain that these rounds would have shown in four of five repetitions, 0.03 for 3 %.

    It is ``exp((z_confidence + z_power) * s) - 1`` with ``s`` the bootstrap standard error of the median
    log-ratio. A result of "no difference" does not exclude smaller differences. Infinite for fewer than three rounds.
    """
    logs = np.asarray(_log_ratios(baseline, contestant))
    if logs.size < 3:
        return math.inf
    spread = float(np.std(_resampled_medians(logs)))
    normal = NormalDist()
    return math.exp((normal.inv_cdf(_TAILS[1]) + normal.inv_cdf(POWER)) * spread) - 1


def paired_difference(baseline: Sequence[float], candidate: Sequence[float]) -> Interval:
    """Return the mean of ``candidate[i] - baseline[i]`` with a one-sided Student bound on each side.

    Each bound alone holds with 95 %, as a non-inferiority test requires. Both together hold with 90 %. Student's
    interval is used because there are three to ten seeds, for which a bootstrap interval is far too narrow.

    Raises:
        ValueError: Different lengths or fewer than two pairs.
    """
    _check_pairs(baseline, candidate, least=2)
    differences = np.asarray(candidate, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    count, mean = len(baseline), float(differences.mean())
    reach = t_quantile(CONFIDENCE, count - 1) * float(differences.std(ddof=1)) / math.sqrt(count)
    return Interval(low=mean - reach, mid=mean, high=mean + reach)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The result of a test after some pairs.

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

    At each look Student's statistic is compared with a limit that is stricter than for a single test, and
    strictest at the first looks. For normal differences the probability of a false ``"passed"`` at any look is at most
    ``error``, and equally of a false ``"failed"``: the limits are found by simulation, in which mean and spread
    cancel. With ``least=most`` there is one look, which is Student's test for a number of pairs that was fixed before.
    Stopping as ``"futile"`` cannot cause either. With ``margin=0`` it tests superiority. A spread below a third
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
        planned: Number of pairs for which there probably is time, known before the first of them. Four fifths of
            ``error`` are then for the looks up to it, which are less strict, and one fifth for all looks.

    Raises:
        ValueError: An argument is out of range.
    """

    margin: float
    most: int = 12
    least: int = 3
    error: float = 0.05
    planned: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"margin: found {self.margin!r}; give a finite number, at least 0.")
        if not 2 <= self.least <= self.most:
            raise ValueError(f"found least={self.least}, most={self.most}; needed: 2 <= least <= most.")
        if not LEAST_ERROR <= self.error < 0.5:
            raise ValueError(f"error: found {self.error!r}; give a number from {LEAST_ERROR} to below 0.5.")

    @property
    def limits(self) -> tuple[float, ...]:
        """Critical values of Student's statistic at each look."""
        rest = (1 - PLANNED_SHARE) * self.error
        if self.planned is None or not self.least <= self.planned < self.most or rest < LEAST_ERROR:
            return critical_values(self.least, self.most, self.error)
        always = critical_values(self.least, self.most, rest)
        soon = critical_values(self.least, self.planned, PLANNED_SHARE * self.error)
        return (*map(min, soon, always), *always[len(soon) :])

    def look(self, differences: Sequence[float]) -> Look:
        """Decide after these differences, candidate minus baseline, in the order in which they were made.

        The looks between are made too, because a decision that was reached earlier stands. A difference that is not
        finite, as of a run that diverged, fails the test.

        Args:
            differences: Higher is better. Differences after the first ``most`` are ignored.
        """
        values = list(differences)[: self.most]
        for count in range(self.least, len(values)):
            look = self._at(values[:count])
            if look.state in ("passed", "failed"):
                return look
        return self._at(values)

    def _at(self, values: Sequence[float]) -> Look:
        count = len(values)
        if not all(map(math.isfinite, values)):
            nothing = Interval(low=-math.inf, mid=-math.inf, high=-math.inf, confidence=1 - self.error)
            return Look(state="failed", pairs=count, difference=nothing, detectable=math.inf)
        mean = sum(values) / count if count else 0.0
        if count < self.least:
            wide = Interval(low=-math.inf, mid=mean, high=math.inf, confidence=1 - self.error)
            return Look(state="open", pairs=count, difference=wide, detectable=math.inf)
        spread = max(float(np.std(values, ddof=1)), LEAST_SPREAD * self.margin)
        limits = self.limits
        reach = limits[count - self.least] * spread / math.sqrt(count)
        last = spread / math.sqrt(self.most)
        needed = limits[-1] * last
        detectable = needed + t_quantile(0.8, self.most - 1) * last
        difference = Interval(low=mean - reach, mid=mean, high=mean + reach, confidence=1 - self.error)
        state: State = "open"
        if difference.low > -self.margin:
            state = "passed"
        elif difference.high < -self.margin:
            state = "failed"
        elif count >= self.most:
            state = "exhausted"
        # Even the upper end of an 80 % interval of the mean would not pass the last look.
        elif mean + t_quantile(0.9, count - 1) * spread / math.sqrt(count) < needed - self.margin:
            state = "futile"
        return Look(state=state, pairs=count, difference=difference, detectable=detectable)


@lru_cache(maxsize=64)
def critical_values(least: int, most: int, error: float) -> tuple[float, ...]:
    """Return the limits of Student's statistic at the looks after ``least`` to ``most`` pairs.

    The nominal level of a look is in proportion to its number of pairs. The factor is chosen so that a mean of 0
    exceeds any of the limits with probability ``error``, found by simulating 100,000 sequences of normal numbers.
    A single look is Student's test. Cost: under a second, once per process and set of arguments.
    """
    if least == most:
        return (t_quantile(1 - error, most - 1),)
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


@dataclass
class AnytimeTest:
    """Evidence that the mean of normal values with an unknown spread is above 0.

    The evidence is a ratio of likelihoods: effects drawn from a normal distribution with the width of the spread,
    against none. If the mean is 0 or below, the probability that it ever exceeds ``1 / error``, at any of infinitely
    many looks, is at most ``error``.

    Source: H. Wang, A. Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown
    variance", arXiv 2310.03722; T. L. Lai, "On Confidence Sequences", 1976.

    Args:
        error: Between 0 and 1.
        count: Number of values so far.
        total: Their sum.
        squares: The sum of their squares.

    Raises:
        ValueError: ``error`` is out of range.
    """

    error: float = 0.01
    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def __post_init__(self) -> None:
        _check_error(self.error)

    def add(self, value: float) -> bool:
        """Take a value, and return whether the evidence is now enough."""
        self.count += 1
        self.total += value
        self.squares += value * value
        return self.evidence >= 1 / self.error

    @property
    def evidence(self) -> float:
        """The ratio of likelihoods. 0 if the values are not above 0 on average, or too large to be squared."""
        n, whole = self.count, (self.count + 1) * self.squares
        if n < 2 or not self.total > 0 or not 0 < whole < math.inf:
            return 0.0
        explained = self.total * self.total
        exponent = 0.5 * n * (math.log(whole) - math.log(whole - explained)) - 0.5 * math.log(n + 1)
        return math.exp(min(exponent, 700.0))


@dataclass
class ChangeTest:
    """Evidence that the mean is above 0 now, even if it was below for long.

    A single test adds up everything, so values from before a change hide it. Here a further :class:`AnytimeTest` begins
    after every 25 values, and at most 16 run at a time. When there are as many, every second one ends, and new ones
    begin half as often, so the latest one began within the last eighth of the values. The k-th gets ``error / (k * (k +
    1))``. These add up to ``error``, so the probability that any of them ever gives a false alarm is at most ``error``.

    Args:
        error: Of all tests together, between 0 and 1.

    Raises:
        ValueError: ``error`` is out of range.

    Cost: at most 16 logarithms per value, and 64 numbers.
    """

    error: float = 0.01
    count: int = 0
    begun: int = 0
    every: int = _EVERY
    tests: list[AnytimeTest] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check_error(self.error)

    def add(self, value: float) -> bool:
        """Take a value, and return whether the evidence is now enough."""
        if self.count % self.every == 0:
            if len(self.tests) == _MOST_TESTS:
                self.tests, self.every = self.tests[::2], 2 * self.every
            self.begun += 1
            part = self.error / (self.begun * (self.begun + 1))
            self.tests.append(AnytimeTest(max(part, sys.float_info.min)))
        self.count += 1
        alarms = [test.add(value) for test in self.tests]
        return any(alarms)

    @property
    def leading(self) -> AnytimeTest:
        """The test that is closest to an alarm."""
        return max(self.tests, key=lambda test: test.evidence * test.error, default=AnytimeTest(self.error))

    @property
    def evidence(self) -> float:
        """The evidence of the leading test, by its share of the error. ``1 / error`` is an alarm."""
        return self.leading.evidence * (self.leading.error / self.error)


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


def _resampled_medians(data: np.ndarray, seed: int = 0) -> np.ndarray:
    picks = np.random.default_rng(seed).integers(0, data.size, size=(RESAMPLES, data.size))
    # Sorting short rows takes a third of the time of np.median, which partitions rows one by one.
    ordered = np.sort(data[picks], axis=1)
    return (ordered[:, (data.size - 1) // 2] + ordered[:, data.size // 2]) / 2


def _check_pairs(first: Sequence[float], second: Sequence[float], *, least: int) -> None:
    if len(first) != len(second):
        raise ValueError(
            f"found {len(first)} and {len(second)} values; a paired comparison needs the same number of each."
        )
    if len(first) < least:
        raise ValueError(f"found {len(first)} pairs; at least {least} needed.")


def _check_error(error: float) -> None:
    if not 0 < error < 1:
        raise ValueError(f"error: found {error!r}; give a number between 0 and 1.")
