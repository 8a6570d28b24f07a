"""How the tables state differences of a metric."""

from __future__ import annotations

import importlib

import pytest

from torchboost.measure.evidence import Interval

figures = importlib.import_module("figures")


@pytest.mark.parametrize(
    ("bounds", "unit", "said"),
    [
        ((0.044, 0.059, 0.074), "bits", "0.059 bits better (0.044 to 0.074)"),
        ((-0.02, -0.01, -0.005), "bits", "0.010 bits worse (0.020 to 0.005)"),
        ((-0.012, 0.001, 0.014), "bits", "0.001 bits better (0.012 worse to 0.014 better)"),
        ((-0.008, 0.0001, 0.0), "bits", "0.000 bits (0.008 worse to 0.000)"),
        ((-0.0001, 0.0, 0.0001), "bits", "0.000 bits (0.000 to 0.000)"),
        ((-0.0121, 0.01, 0.02), "points", "+1.00 points (\N{MINUS SIGN}1.21 to +2.00)"),
    ],
)
def test_a_difference_cannot_be_taken_for_its_opposite(bounds: tuple[float, ...], unit: str, said: str) -> None:
    low, mid, high = bounds
    assert figures.signed(Interval(low=low, mid=mid, high=high), unit) == said
