"""What a trial chose, as figures for loggers."""

from __future__ import annotations

import pytest

from torchboost.calibration.choice import Choice, Verdict
from torchboost.integrations.figures import figures_of
from torchboost.measure.evidence import Interval

VERDICTS = (
    Verdict(lever="compile", kept=False, reason="slow"),
    Verdict(lever="fused_optimizer", kept=True, reason="fast"),
)


@pytest.mark.parametrize(("source", "seconds"), [("trial", 7.5), ("checkpoint", 0.0), ("cache", 0.0)])
def test_levers_gain_and_time(source: str, seconds: float):
    choice = Choice(verdicts=VERDICTS, source=source, seconds=7.5, ratio=Interval(low=1.1, mid=1.2, high=1.3))
    assert figures_of(choice) == {
        "boost/compile": 0.0,
        "boost/fused_optimizer": 1.0,
        "boost/times_as_fast": 1.2,
        "boost/trial_seconds": seconds,
    }


def test_an_unknown_gain_is_left_out():
    assert "boost/times_as_fast" not in figures_of(Choice(verdicts=VERDICTS, source="prior"))
