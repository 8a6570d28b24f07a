"""Intervals and tests are right about as often as they say."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from torchboost.measure.statistics import (
    AnytimeTest,
    ChangeTest,
    Look,
    SequentialTest,
    bootstrap_median,
    critical_values,
    detectable_ratio,
    exact_median,
    mean_of,
    paired_difference,
    paired_ratio,
    t_quantile,
    unpaired_ratio,
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


def test_t_quantile_matches_scipy_and_refuses_nonsense() -> None:
    for probability, freedom, expected in T_TABLE:
        assert t_quantile(probability, freedom) == pytest.approx(expected, rel=1e-9)
        assert t_quantile(1 - probability, freedom) == pytest.approx(-expected, rel=1e-9)
    with pytest.raises(ValueError, match="at least 1 degree"):
        t_quantile(0.9, 0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        t_quantile(1.0, 3)


def test_median_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        interval = bootstrap_median(rng.normal(size=20))
        hits += interval.low <= 0 <= interval.high
    assert 180 <= hits <= 199
    interval = bootstrap_median([3.0, 1.0, 2.0, 5.0, 4.0])
    assert 1.0 <= interval.low <= interval.mid == 3.0 <= interval.high <= 5.0
    assert bootstrap_median([7.0]).model_dump(exclude={"confidence"}) == dict.fromkeys(("low", "mid", "high"), 7.0)


def test_ratios_of_pairs_ignore_common_noise() -> None:
    rng = np.random.default_rng(0)
    slow, fast = rng.uniform(1.9, 2.1, 21), rng.uniform(0.95, 1.05, 21)
    there, back = paired_ratio(slow, fast), paired_ratio(fast, slow)
    assert 1.8 < there.low < there.mid < there.high < 2.2  # above one means faster
    assert back.mid == pytest.approx(1 / there.mid)
    assert back.low == pytest.approx(1 / there.high, rel=1e-3)
    weather = np.random.default_rng(1).uniform(1, 10, 20)
    contestant = weather.copy()
    contestant[4] *= 50
    interval = paired_ratio(2 * weather, contestant)
    assert (interval.mid, interval.low) == (pytest.approx(2.0), pytest.approx(2.0))


def test_detectable_ratio_shrinks_with_more_rounds_and_is_infinite_for_two() -> None:
    rng = np.random.default_rng(5)
    base, own = np.exp(rng.normal(0, 0.05, 400)), np.exp(rng.normal(0, 0.05, 400))
    few, many = detectable_ratio(base[:20], own[:20]), detectable_ratio(base, own)
    assert 0 < many < few < 0.3
    # Theory: (1.96 + 0.84) * 1.2533 * sqrt(2) * 0.05 / sqrt(n)
    assert many == pytest.approx(math.expm1(2.8016 * 1.2533 * math.sqrt(2) * 0.05 / 20), rel=0.35)
    assert detectable_ratio(base[:2], own[:2]) == math.inf


def test_difference_by_hand() -> None:
    assert mean_of(iter([1.0, 2.0])) == 1.5
    assert all(math.isnan(mean_of(values)) for values in ([1e308, 1e308], [math.inf, -math.inf]))
    # Differences 0.01, -0.01, 0.03: mean 0.01, sd 0.02, se 0.02 / sqrt 3, t(0.95, 2) = 2.91999.
    interval = paired_difference([0.90, 0.91, 0.92], [0.91, 0.90, 0.95])
    reach = 2.919985580354 * 0.02 / math.sqrt(3)
    assert [interval.low, interval.mid, interval.high] == pytest.approx([0.01 - reach, 0.01, 0.01 + reach])


def test_a_single_look_is_students_test_and_takes_no_equal_differences_as_certain() -> None:
    def look(differences: list[float], margin: float) -> Look:
        return SequentialTest(margin=margin, least=len(differences), most=len(differences)).look(differences)

    assert look([-0.001] * 5, 0.005).state == "passed"
    wild = look([0.02, -0.02, 0.03, -0.03, 0.0], 0.005)
    assert wild.state != "passed"
    assert (wild.difference.mid, wild.pairs) == (pytest.approx(0.0), 5)
    assert wild.detectable > 0.005
    rng = np.random.default_rng(11)
    wrong = sum(look((rng.normal(0, 0.01, 5) - 0.02).tolist(), 0.02).state == "passed" for _ in range(400))
    assert 6 <= wrong <= 36  # about as often as it may
    for change, seeds, passed in ((0.0, 2, False), (0.0, 3, True), (-0.004, 3, False)):
        judged = look([change] * seeds, 0.005)
        reach = t_quantile(0.95, seeds - 1) * 0.005 / 3 / math.sqrt(seeds)
        assert judged.difference.low == pytest.approx(change - reach)
        assert judged.difference.high == pytest.approx(change + reach)
        assert judged.detectable > reach
        assert (judged.state == "passed") is passed


def test_an_exact_median_covers_the_truth_at_least_as_often_as_it_says() -> None:
    for count in (6, 7, 11, 20, 40):
        inside = 0
        for values in np.random.default_rng(count).normal(size=(1000, count)):
            interval = exact_median(values.tolist())
            assert interval.low <= interval.mid <= interval.high
            inside += interval.low <= 0 <= interval.high
        assert inside >= 0.935 * 1000
    interval = exact_median([5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 9.0, 7.0, 8.0])
    assert (interval.low, interval.mid, interval.high) == (2.0, 5.0, 8.0)


def test_what_cannot_be_estimated_is_refused() -> None:
    refused: list[tuple[str, Callable[[], object]]] = [
        ("no values", lambda: bootstrap_median([])),
        ("the same number of each", lambda: paired_ratio([1.0, 2.0], [1.0])),
        ("must be positive", lambda: paired_ratio([1.0, 0.0], [1.0, 1.0])),
        ("at least 2", lambda: paired_difference([0.9], [0.9])),
        *(("needs more", lambda count=count: exact_median([1.0] * count)) for count in (0, 1, 5)),
        *(("error: found", lambda error=error: AnytimeTest(error)) for error in (0.0, 1.0, -1.0, 2.0)),
        ("error: found", lambda: ChangeTest(1.5)),
        ("margin: found", lambda: SequentialTest(margin=-1.0)),
        ("margin: found", lambda: SequentialTest(margin=math.nan)),
        ("least=3, most=2", lambda: SequentialTest(margin=1.0, most=2)),
        ("error: found", lambda: SequentialTest(margin=1.0, error=0.7)),
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()


def race(test: SequentialTest, differences: list[float]) -> Look:
    """Look after every pair until it is decided."""
    for count in range(1, len(differences) + 1):
        look = test.look(differences[:count])
        if look.decided:
            return look
    raise AssertionError("the last look must decide")


def shares(
    mean: float, spread: float, margin: float, *, most: int = 12, runs: int = 400, seed: int = 1
) -> dict[str, float]:
    drawn = np.random.default_rng(seed).normal(mean, spread, (runs, most))
    test = SequentialTest(margin=margin, most=most)
    states = [race(test, list(row)).state for row in drawn]
    return {state: states.count(state) / runs for state in ("passed", "failed", "futile", "exhausted")}


def test_the_error_rate_under_all_looks_is_nominal():
    """At the margin itself: a false pass, and by symmetry a false fail, in at most one of twenty."""
    most = 12
    drawn = np.random.default_rng(2).normal(0, 1, (40_000, most))
    counts = np.arange(1, most + 1)
    limits = np.array(critical_values(3, most, 0.05))
    means = np.cumsum(drawn, 1) / counts
    spread = np.array([drawn[:, :n].std(1, ddof=1) for n in counts[2:]]).T
    crossed = (means[:, 2:] / (spread / np.sqrt(counts[2:])) > limits).any(1).mean()
    assert 0.042 <= crossed <= 0.053  # three standard errors of 0.0011 above


def test_decisions_at_the_margin_are_rarely_wrong_and_far_from_it_nearly_always_right():
    at = shares(-1.0, 0.5, 1.0)
    assert at["passed"] <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert at["failed"] <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert shares(0.0, 0.5, 1.0)["passed"] >= 0.95
    assert shares(-2.0, 0.5, 1.0)["passed"] <= 0.003


def test_limits_are_strictest_at_the_first_looks_and_one_look_is_students_test():
    assert critical_values(5, 5, 0.05) == (t_quantile(0.95, 4),)
    limits = critical_values(3, 12, 0.05)
    assert list(limits) == sorted(limits, reverse=True)
    assert limits[-1] > t_quantile(0.95, 11)


def test_a_decision_that_was_reached_stands():
    test = SequentialTest(margin=1.0, most=12)
    early = [0.1, 0.11, 0.09, 0.1, 0.1]
    later = test.look([*early, -9.0, -9.0, -9.0])
    assert (later.state, later.pairs) == ("passed", race(test, early).pairs)


def test_bounds_are_infinite_before_the_first_look_and_pairs_beyond_the_last_do_not_count():
    test = SequentialTest(margin=1.0, most=4)
    look = test.look([0.1, 0.2])
    assert (look.state, look.difference.low, look.difference.high) == ("open", -math.inf, math.inf)
    assert test.look([]).state == "open"
    undecided = [3.0, -3.0, 2.9, -2.9]
    assert test.look(undecided).state in ("exhausted", "futile")
    assert test.look([*undecided, 5.0]) == test.look(undecided)
    assert test.look([0.1, math.nan, 0.1]).state == test.look([-math.inf]).state == "failed"  # a run that diverged


def test_three_equal_differences_are_not_taken_as_certain():
    test = SequentialTest(margin=0.5)
    assert test.look([0.0] * 3).state == "open"
    assert test.look([0.0] * 4).state == "passed"
    assert test.look([-0.4] * 8).state == "open"
    assert test.look([-0.4] * 12).state in ("passed", "exhausted")


def test_the_detectable_drop_is_what_is_found_four_times_in_five():
    spread, most = 1.0, 10
    test = SequentialTest(margin=0.0, most=most)
    drawn = np.random.default_rng(0).normal(0, spread, (100, most))
    looks = [test.look(list(row)) for row in drawn]
    typical = float(np.median([look.detectable for look in looks if look.pairs == most]))
    passed = shares(typical, spread, 0.0, most=most, runs=300)["passed"]
    assert 0.7 <= passed <= 0.92


def alarms(mean: float, *, error: float, runs: int = 600, length: int = 300) -> tuple[float, float]:
    """Return the share of runs with an alarm at any look, and the median number of values until then."""
    firsts = []
    for row in np.random.default_rng(0).normal(mean, 1.0, (runs, length)):
        test = AnytimeTest(error)
        firsts.append(next((place for place, value in enumerate(row, 1) if test.add(float(value))), length + 1))
    return float((np.array(firsts) <= length).mean()), float(np.median(firsts))


def test_false_alarms_at_all_looks_together_are_rare_and_effects_are_found():
    assert alarms(0.0, error=0.1)[0] <= 0.1 + 3 * (0.1 * 0.9 / 600) ** 0.5
    assert alarms(-0.5, error=0.1)[0] <= 0.002
    share, after = alarms(1.0, error=0.01)
    assert share == 1.0
    assert after <= 25


def test_the_scale_does_not_matter_unless_values_cannot_be_squared():
    small, large, constant, certain = (AnytimeTest() for _ in range(4))
    for value in np.random.default_rng(3).normal(0.8, 1, 40):
        small.add(1e-6 * value)
        large.add(1e6 * value)
    assert small.evidence == pytest.approx(large.evidence, rel=1e-6)
    assert small.evidence > 100
    assert not constant.add(5.0)
    assert constant.evidence == 0.0
    for _ in range(30):
        constant.add(-1.0)
    assert constant.evidence == 0.0
    assert any(certain.add(1.0) for _ in range(20))
    for size in (1e160, 1e308, 1e-200):
        test = AnytimeTest()
        assert not any(test.add(size) for _ in range(50))
        assert test.evidence == 0.0


def test_tests_that_begin_later_share_the_error():
    error, runs, alarms = 0.1, 150, 0
    for row in np.random.default_rng(1).normal(0, 1, (runs, 500)):
        test = ChangeTest(error, every=5)
        alarms += any(test.add(float(value)) for value in row)
    assert alarms / runs <= error + 3 * (error * (1 - error) / runs) ** 0.5
    assert sum(1 / (k * (k + 1)) for k in range(1, 10_000)) <= 1


def test_a_late_change_is_found():
    for before in (100, 1000, 10_000):
        draw, test = np.random.default_rng(2), ChangeTest(0.01)
        assert not any(test.add(float(value)) for value in draw.normal(-1, 1, before))
        after = next(place for place, value in enumerate(draw.normal(1, 1, before), 1) if test.add(float(value)))
        assert after <= 60 + before // 8
        assert test.leading.count <= 60 + before // 8
        assert test.evidence >= 100


def test_few_tests_run_at_a_time():
    test = ChangeTest(5e-324)
    for count in range(1, 5000):
        test.add(-1.0)
        assert len(test.tests) <= 16
        assert test.tests[0].count == count
        assert test.tests[-1].count <= max(25, count // 8)
    assert test.begun < 100


def test_a_ratio_of_times_apart_is_reversed_by_swapping_and_covers_what_both_vary() -> None:
    first, second = [2.0, 2.1, 2.2, 1.9, 2.0, 2.05], [1.0, 1.1, 0.9, 1.0, 1.05, 1.0]
    found, back = unpaired_ratio(first, second), unpaired_ratio(second, first)
    assert found.low < found.mid < found.high
    assert found.mid == pytest.approx(1 / back.mid)
    assert unpaired_ratio([3.0], [1.5]).mid == pytest.approx(2.0)
    for wrong in (([], [1.0]), ([1.0], [0.0])):
        with pytest.raises(ValueError, match="each side needs one, all positive"):
            unpaired_ratio(*wrong)


def test_a_test_that_is_planned_for_few_pairs_decides_sooner_and_errs_no_more() -> None:
    usual, planned = (SequentialTest(margin=0.02, error=0.05, planned=number) for number in (None, 4))
    clear = [0.0, 0.03, 0.0, 0.03]
    assert (usual.look(clear).state, planned.look(clear).state) == ("open", "passed")
    assert planned.look([*clear, 0.0, 0.03]).state == "passed"
    assert planned.look([0.01, -0.05, 0.03, -0.01]).state == "open"  # it continues after these four
    rng = np.random.default_rng(0)
    for number in (3, 4, 8):
        test = SequentialTest(margin=0.02, error=0.05, planned=number)
        harmful = sum(test.look(list(rng.normal(-0.02, 0.05, 12))).state == "passed" for _ in range(1000))
        assert harmful <= 65, number  # at most 50 are expected
