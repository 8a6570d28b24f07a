from __future__ import annotations

import math

import numpy as np
import pytest

from torchboost.measure.sequential import Look, SequentialTest, critical_values
from torchboost.measure.statistics import t_quantile


def race(test: SequentialTest, differences: list[float]) -> Look:
    """Look after every pair until it is decided."""
    for count in range(1, len(differences) + 1):
        look = test.look(differences[:count])
        if look.decided:
            return look
    raise AssertionError("the last look must decide")


def shares(
    mean: float, spread: float, margin: float, *, most: int = 12, runs: int = 2000, seed: int = 1
) -> dict[str, float]:
    drawn = np.random.default_rng(seed).normal(mean, spread, (runs, most))
    test = SequentialTest(margin=margin, most=most)
    states = [race(test, list(row)).state for row in drawn]
    return {state: states.count(state) / runs for state in ("passed", "failed", "futile", "exhausted")}


@pytest.mark.parametrize("most", [4, 12, 20])
def test_the_error_rate_under_all_looks_is_nominal(most):
    """At the margin itself: a false pass, and by symmetry a false fail, in at most one of twenty."""
    drawn = np.random.default_rng(2).normal(0, 1, (40_000, most))
    counts = np.arange(1, most + 1)
    limits = np.array(critical_values(3, most, 0.05))
    means = np.cumsum(drawn, 1) / counts
    spread = np.array([drawn[:, :n].std(1, ddof=1) for n in counts[2:]]).T
    crossed = (means[:, 2:] / (spread / np.sqrt(counts[2:])) > limits).any(1).mean()
    assert 0.042 <= crossed <= 0.053  # three standard errors of 0.0011 above


def test_decisions_at_the_margin_are_rarely_wrong_and_far_from_it_nearly_always_right():
    at = shares(-1.0, 0.5, 1.0)
    assert at["passed"] <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)
    assert at["failed"] <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)
    assert shares(0.0, 0.5, 1.0)["passed"] >= 0.97
    assert shares(-2.0, 0.5, 1.0)["passed"] <= 0.001


def test_a_single_look_is_students_test():
    (limit,) = critical_values(5, 5, 0.05)
    assert limit == pytest.approx(t_quantile(0.95, 4), rel=0.05)


def test_limits_are_strictest_at_the_first_looks():
    limits = critical_values(3, 12, 0.05)
    assert list(limits) == sorted(limits, reverse=True)
    assert limits[-1] > t_quantile(0.95, 11)


def test_a_decision_that_was_reached_stands():
    test = SequentialTest(margin=1.0, most=12)
    early = [0.1, 0.11, 0.09, 0.1, 0.1]
    assert race(test, early).state == "passed"
    later = test.look([*early, -9.0, -9.0, -9.0])
    assert later.state == "passed"
    assert later.pairs == race(test, early).pairs


def test_bounds_are_infinite_before_the_first_look_and_pairs_beyond_the_last_do_not_count():
    test = SequentialTest(margin=1.0, most=4)
    look = test.look([0.1, 0.2])
    assert (look.state, look.difference.low, look.difference.high) == ("open", -math.inf, math.inf)
    assert test.look([]).state == "open"
    undecided = [3.0, -3.0, 2.9, -2.9]
    assert test.look(undecided).state in ("exhausted", "futile")
    assert test.look([*undecided, 5.0]) == test.look(undecided)


def test_a_run_that_diverged_fails():
    assert SequentialTest(margin=1.0).look([0.1, math.nan, 0.1]).state == "failed"
    assert SequentialTest(margin=1.0).look([-math.inf]).state == "failed"


def test_equal_runs_pass():
    assert SequentialTest(margin=0.5).look([0.0] * 4).state == "passed"


def test_three_equal_differences_are_not_taken_as_certain():
    test = SequentialTest(margin=0.5)
    assert test.look([0.0] * 3).state == "open"
    assert test.look([-0.4] * 8).state == "open"
    assert test.look([-0.4] * 12).state in ("passed", "exhausted")


def test_the_detectable_drop_is_what_is_found_four_times_in_five():
    spread, most = 1.0, 10
    test = SequentialTest(margin=0.0, most=most)
    drawn = np.random.default_rng(0).normal(0, spread, (300, most))
    typical = float(np.median([test.look(list(row)).detectable for row in drawn if test.look(list(row)).pairs == most]))
    passed = shares(typical, spread, 0.0, most=most, runs=1000)["passed"]
    assert 0.7 <= passed <= 0.92


@pytest.mark.parametrize(
    "wrong", [{"margin": -1.0}, {"margin": math.nan}, {"margin": 1, "most": 2}, {"margin": 1, "error": 0.7}]
)
def test_bad_arguments(wrong):
    with pytest.raises(ValueError, match="found"):
        SequentialTest(**wrong)
