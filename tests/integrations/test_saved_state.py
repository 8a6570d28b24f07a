"""What a trainer keeps of a boosted training: its state in a checkpoint, and what the trial chose, for loggers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import torchboost
from torchboost.calibration.choice import Choice, Verdict
from torchboost.integrations.saved_state import figures_of, load_state, save_state
from torchboost.measure.evidence import Interval

LOG = logging.getLogger("torchboost.tests")


def boosted(**extra: object) -> torchboost.Boosted:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return torchboost.boost(model, optimizer, level="O1", total_steps=10, config={"extra": extra})


def test_a_state_of_another_level_is_refused_and_a_missing_one_told_if_anything_counts(tmp_path: Path, caplog):
    counting, file = boosted(grad_freeze={"pattern": "progressive"}), tmp_path / "state.pt"
    for without_state, told in ((boosted(), False), (counting, True)):
        with caplog.at_level(logging.WARNING, logger=LOG.name):
            load_state(file, without_state, LOG)
        assert ("so these start as in a new run: grad_freeze." in caplog.text) == told
    save_state(file, counting.state_dict())
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(ValueError, match="grad_freeze"):
        load_state(file, boosted(), LOG)


def test_figures_are_levers_gain_and_time():
    reasons = {"compile": (False, "slow"), "fused_optimizer": (True, "fast")}
    verdicts = tuple(Verdict(lever=name, kept=kept, reason=reason) for name, (kept, reason) in reasons.items())
    for source, seconds in (("trial", 7.5), ("checkpoint", 0.0), ("cache", 0.0)):
        choice = Choice(verdicts=verdicts, source=source, seconds=7.5, ratio=Interval(low=1.1, mid=1.2, high=1.3))
        assert figures_of(choice) == {
            "boost/compile": 0.0,
            "boost/fused_optimizer": 1.0,
            "boost/times_as_fast": 1.2,
            "boost/trial_seconds": seconds,
        }
    assert "boost/times_as_fast" not in figures_of(Choice(verdicts=verdicts, source="prior"))
