from __future__ import annotations

import math

import numpy as np
import pytest

from torchboost.measure.statistics import (
    bootstrap_median,
    detectable_ratio,
    exact_median,
    mean_of,
    noninferiority,
    paired_difference,
    paired_ratio,
    t_quantile,
    total_ratio,
)

# From scipy.stats.t.ppf (scipy 1.15).
T_TABLE = [
    (0.95, 1, 6.313751514675),
    (0.95, 2, 2.919985580354),
    (0.975, 3, 3.182446305284),
    (0.95, 4, 2.131846786327),
    (0.8, 4, 0.940964577197),
    (0.975, 9, 2.262157162741),
    (0.995, 30, 2.749995653567),
]


@pytest.mark.parametrize(("probability", "freedom", "expected"), T_TABLE)
def test_t_quantile_matches_scipy(probability: float, freedom: int, expected: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(expected, rel=1e-9)
    assert t_quantile(1 - probability, freedom) == pytest.approx(-expected, rel=1e-9)


def test_t_quantile_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="at least 1 degree"):
        t_quantile(0.9, 0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        t_quantile(1.0, 3)


def test_median_interval_encloses_the_median_and_a_single_value_is_its_own_interval() -> None:
    interval = bootstrap_median([3.0, 1.0, 2.0, 5.0, 4.0])
    assert interval.mid == 3.0
    assert 1.0 <= interval.low <= 3.0 <= interval.high <= 5.0
    single = bootstrap_median([7.0])
    assert (single.low, single.mid, single.high) == (7.0, 7.0, 7.0)


def test_median_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for trial in range(200):
        interval = bootstrap_median(rng.normal(size=20), seed=trial, resamples=500)
        hits += interval.low <= 0 <= interval.high
    assert 180 <= hits <= 199


def test_empty_and_bad_confidence_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        bootstrap_median([])
    with pytest.raises(ValueError, match="confidence"):
        bootstrap_median([1.0], confidence=1.0)


def test_ratio_above_one_means_faster_and_swapping_gives_the_reciprocal() -> None:
    rng = np.random.default_rng(0)
    slow, fast = rng.uniform(1.9, 2.1, 21), rng.uniform(0.95, 1.05, 21)
    there, back = paired_ratio(slow, fast), paired_ratio(fast, slow)
    assert 1.8 < there.low < there.mid < there.high < 2.2
    assert back.mid == pytest.approx(1 / there.mid)
    assert back.low == pytest.approx(1 / there.high, rel=1e-3)


def test_ratio_ignores_noise_common_to_a_pair_and_a_single_burst() -> None:
    weather = np.random.default_rng(1).uniform(1, 10, 20)
    contestant = weather.copy()
    contestant[4] *= 50
    interval = paired_ratio(2 * weather, contestant)
    assert interval.mid == pytest.approx(2.0)
    assert interval.low == pytest.approx(2.0)


def test_ratio_refuses_unpaired_and_non_positive_times() -> None:
    with pytest.raises(ValueError, match="the same number of each"):
        paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="must be positive"):
        paired_ratio([1.0, 0.0], [1.0, 1.0])


def test_detectable_ratio_shrinks_with_more_rounds_and_is_infinite_for_two() -> None:
    rng = np.random.default_rng(5)
    base, own = np.exp(rng.normal(0, 0.05, 400)), np.exp(rng.normal(0, 0.05, 400))
    few, many = detectable_ratio(base[:20], own[:20]), detectable_ratio(base, own)
    assert 0 < many < few < 0.3
    # Theory: (1.96 + 0.84) * 1.2533 * sqrt(2) * 0.05 / sqrt(n)
    assert many == pytest.approx(math.expm1(2.8016 * 1.2533 * math.sqrt(2) * 0.05 / 20), rel=0.35)
    assert detectable_ratio(base[:2], own[:2]) == math.inf


def test_a_mean_that_is_no_number_is_nan() -> None:
    assert mean_of(iter([1.0, 2.0])) == 1.5
    assert math.isnan(mean_of([1e308, 1e308]))
    assert math.isnan(mean_of([math.inf, -math.inf]))


def test_difference_by_hand() -> None:
    # Differences 0.01, -0.01, 0.03: mean 0.01, sd 0.02, se 0.02 / sqrt 3, t(0.95, 2) = 2.91999.
    interval = paired_difference([0.90, 0.91, 0.92], [0.91, 0.90, 0.95])
    reach = 2.919985580354 * 0.02 / math.sqrt(3)
    assert interval.mid == pytest.approx(0.01)
    assert interval.low == pytest.approx(0.01 - reach)
    assert interval.high == pytest.approx(0.01 + reach)


def test_noninferiority_needs_the_bound_and_not_only_the_mean() -> None:
    baseline = [0.900, 0.902, 0.898, 0.901, 0.899]
    steady = [value - 0.001 for value in baseline]
    assert noninferiority(baseline, steady, 0.005).passed
    wild = [value + shift for value, shift in zip(baseline, (0.02, -0.02, 0.03, -0.03, 0.0), strict=True)]
    verdict = noninferiority(baseline, wild, 0.005, against="stock")
    assert not verdict.passed
    assert verdict.difference.mid == pytest.approx(0.0)
    assert verdict.detectable > 0.005
    assert (verdict.baseline, verdict.seeds, verdict.margin) == ("stock", 5, 0.005)


@pytest.mark.parametrize(("change", "seeds", "passed"), [(0.0, 2, False), (0.0, 3, True), (-0.004, 3, False)])
def test_a_few_equal_differences_are_not_taken_as_certain(change: float, seeds: int, passed: bool) -> None:
    verdict = noninferiority([0.9] * seeds, [0.9 + change] * seeds, 0.005)
    reach = t_quantile(0.95, seeds - 1) * 0.005 / 3 / math.sqrt(seeds)
    assert verdict.difference.low == pytest.approx(change - reach)
    assert verdict.difference.high == pytest.approx(change + reach)
    assert verdict.detectable > reach
    assert verdict.passed is passed


def test_noninferiority_errs_about_as_often_as_it_may() -> None:
    rng = np.random.default_rng(11)
    wrong = 0
    for _ in range(400):
        baseline = rng.normal(0.9, 0.01, 5)
        wrong += noninferiority(baseline, baseline - 0.02 + rng.normal(0, 0.01, 5), 0.02).passed
    assert 6 <= wrong <= 36


def test_noninferiority_refuses_one_seed_and_a_margin_of_zero() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        noninferiority([0.9], [0.9], 0.01)
    with pytest.raises(ValueError, match="margin"):
        noninferiority([0.9, 0.8], [0.9, 0.8], 0.0)


def test_a_ratio_of_totals_weighs_every_step_by_what_it_cost() -> None:
    baseline, contestant = [1.0, 1.0, 1.0, 9.0], [1.0, 1.0, 1.0, 3.0]
    found = total_ratio(baseline, contestant)
    assert found.mid == pytest.approx(2.0)
    assert 1.0 <= found.low < 2.0 < found.high <= 3.0
    assert total_ratio([2.0] * 30, [1.0] * 30).low == pytest.approx(2.0)


def test_a_ratio_of_totals_needs_paired_positive_times() -> None:
    with pytest.raises(ValueError, match="the same number of each"):
        total_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="must be positive"):
        total_ratio([1.0, 0.0], [1.0, 1.0])


@pytest.mark.parametrize("count", [6, 7, 11, 20, 40])
def test_an_exact_median_covers_the_truth_at_least_as_often_as_it_says(count: int) -> None:
    generator = np.random.default_rng(count)
    inside = 0
    for values in generator.normal(size=(2000, count)):
        interval = exact_median(values.tolist())
        assert interval.low <= interval.mid <= interval.high
        inside += interval.low <= 0 <= interval.high
    assert inside >= 0.94 * 2000


def test_an_exact_median_is_that_of_the_order_statistics() -> None:
    interval = exact_median([5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 9.0, 7.0, 8.0])
    assert (interval.low, interval.mid, interval.high) == (2.0, 5.0, 8.0)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_too_few_values_have_no_exact_interval(count: int) -> None:
    with pytest.raises(ValueError, match="needs more"):
        exact_median([1.0] * count)
