from __future__ import annotations

import math

import pytest

from tests.support.reports import contestant, interval, report
from torchboost.bench.report import wording


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0000123, "12.3 \N{MICRO SIGN}s"),
        (0.01234, "12.3 ms"),
        (0.5, "500 ms"),
        (58.04, "58.0 s"),
        (600.0, "10.0 min"),
        (36_000.0, "10.0 h"),
        (0.0, "0 \N{MICRO SIGN}s"),
    ],
)
def test_seconds(value, said):
    assert wording.seconds(value) == said


def test_interval_in_one_unit():
    assert wording.seconds_interval(interval(0.02, 0.1)) == "20.0 ms (18.0 to 22.0)"


def test_ratio_interval():
    assert wording.ratio_interval(interval(3.0, 0.1)) == "3.00\N{MULTIPLICATION SIGN} (2.70 to 3.30)"


def test_shares_read_in_percent_and_points():
    assert wording.measure(0.98123, share=True) == "98.12 %"
    assert wording.difference(-0.00123, share=True) == "\N{MINUS SIGN}0.12 points"
    assert wording.amount(0.005, share=True) == "0.5 points"
    assert wording.measure(12.3456, share=False) == "12.35"
    assert wording.difference(0.5, share=False) == "+0.5"


def test_not_a_number_is_said():
    assert wording.measure(math.nan, share=True) == "nan"
    assert wording.difference(math.nan, share=True) == "nan"


def test_only_an_accuracy_is_a_share():
    assert wording.is_share(report(contestant("stock", "stock", 0.1, 0.9)))
    assert not wording.is_share(report(contestant("stock", "stock", 0.1, 7.0)))
    assert not wording.is_share(report(contestant("stock", "stock", 0.1, seeds=0)))
    assert not wording.is_share(report(contestant("stock", "stock", 0.1, 0.9), metric="metric"))


def test_a_metric_of_the_user_has_its_own_units():
    assert wording.has_own_units("metric")
    assert not wording.has_own_units("accuracy")


def test_count():
    assert [wording.count(n, "seed") for n in (1, 2000)] == ["1 seed", "2,000 seeds"]
