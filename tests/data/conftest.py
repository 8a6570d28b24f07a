"""Loaders that try workers whatever the clock says, so that tests meet them on any machine."""

from __future__ import annotations

import math

import pytest

from torchboost.data import loader, trial
from torchboost.data.trial import Race, Reading
from torchboost.measure.evidence import Interval


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count any waiting as much, and any way as faster, after one pair of windows of few batches."""
    planted = {
        "SHARE": -1.0,
        "LEAST_WAIT": -1.0,
        "WORSE": math.inf,
        "_WINDOW_SECONDS": 0.0,
        "SETTLE": 1,
        "LOOK": 3,
        "MOST_WORKERS": 2,
    }
    for name, value in planted.items():
        monkeypatch.setattr(trial, name, value)

    def judged(variant, before, after):
        gain = Interval(low=1.5, mid=2.0, high=2.5)
        return Race(variant, gain, 1, Reading([2e-3], [2e-3]), Reading([1e-3], [1e-3])) if len(before) == 1 else None

    monkeypatch.setattr(trial, "_judged", judged)
    monkeypatch.setattr(loader, "PATIENCE", 5.0)
