from __future__ import annotations

import numpy as np
import pytest

from torchboost.measure.anytime import AnytimeTest


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
