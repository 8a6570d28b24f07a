from __future__ import annotations

import numpy as np
import pytest

from torchboost.measure.anytime import AnytimeTest, ChangeTest


def alarms(mean: float, *, error: float, runs: int = 1500, length: int = 300, seed: int = 0) -> tuple[float, float]:
    """Return the share of runs with an alarm at any look, and the median number of values until then."""
    drawn = np.random.default_rng(seed).normal(mean, 1.0, (runs, length))
    firsts = []
    for row in drawn:
        test = AnytimeTest(error)
        firsts.append(next((place for place, value in enumerate(row, 1) if test.add(float(value))), length + 1))
    found = np.array(firsts)
    return float((found <= length).mean()), float(np.median(found))


@pytest.mark.parametrize("error", [0.01, 0.1])
def test_false_alarms_at_all_looks_together_are_rare(error):
    share, _ = alarms(0.0, error=error)
    assert share <= error + 3 * (error * (1 - error) / 1500) ** 0.5
    assert alarms(-0.5, error=error)[0] <= 0.002


def test_effects_are_found():
    share, after = alarms(1.0, error=0.01)
    assert share == 1.0
    assert after <= 25


def test_the_scale_does_not_matter():
    values = np.random.default_rng(3).normal(0.8, 1, 40)
    small, large = AnytimeTest(), AnytimeTest()
    for value in values:
        small.add(1e-6 * value)
        large.add(1e6 * value)
    assert small.evidence == pytest.approx(large.evidence, rel=1e-6)
    assert small.evidence > 100


def test_equal_values_and_few_values():
    test = AnytimeTest()
    assert not test.add(5.0)
    assert test.evidence == 0.0
    for _ in range(30):
        test.add(-1.0)
    assert test.evidence == 0.0
    certain = AnytimeTest()
    assert any(certain.add(1.0) for _ in range(20))


@pytest.mark.parametrize("error", [0.0, 1.0, -1.0, 2.0])
def test_bad_error_rates(error):
    with pytest.raises(ValueError, match="error: found"):
        AnytimeTest(error)


def test_values_that_are_too_large_or_too_small_to_be_squared_are_no_evidence():
    for size in (1e160, 1e308, 1e-200):
        test = AnytimeTest()
        assert not any(test.add(size) for _ in range(50))
        assert test.evidence == 0.0


def test_tests_that_begin_later_share_the_error():
    error, runs, alarms = 0.1, 400, 0
    for row in np.random.default_rng(1).normal(0, 1, (runs, 500)):
        test = ChangeTest(error, every=5)
        alarms += any(test.add(float(value)) for value in row)
    assert alarms / runs <= error + 3 * (error * (1 - error) / runs) ** 0.5
    assert sum(1 / (k * (k + 1)) for k in range(1, 10_000)) <= 1


@pytest.mark.parametrize("before", [100, 1000, 10_000])
def test_a_late_change_is_found(before):
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


def test_it_survives_a_checkpoint():
    test = ChangeTest(0.05, every=3)
    for value in np.random.default_rng(3).normal(0, 1, 40):
        test.add(float(value))
    again = ChangeTest.of(test.state_dict())
    assert again == test
    again.add(1.0)
    assert again != test
    with pytest.raises(ValueError, match=r"error: found 1\.5"):
        ChangeTest(1.5)
