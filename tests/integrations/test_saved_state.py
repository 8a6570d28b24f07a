"""What a trainer keeps of a boosted training: its state in a checkpoint, and what the trial chose, for loggers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import torchboost
from torchboost.calibration.choice import Choice, Verdict
from torchboost.front import Boosted
from torchboost.integrations.saved_state import figures_of, load_state, save_state
from torchboost.measure.evidence import Interval

LOG = logging.getLogger("torchboost.tests")
PROGRESSIVE = {"pattern": "progressive"}


def boosted(**extra: object) -> Boosted:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return torchboost.boost(model, optimizer, level="O1", total_steps=10, config={"extra": extra})


def updates(made: Boosted, count: int) -> None:
    for _ in range(count):
        made.model(torch.ones(1, 4)).sum().backward()
        made.optimizer.step()
        made.optimizer.zero_grad()


def test_a_state_is_written_and_read(tmp_path: Path):
    first, second = boosted(grad_freeze=PROGRESSIVE), boosted(grad_freeze=PROGRESSIVE)
    updates(first, 3)
    save_state(tmp_path / "state.pt", first.state_dict())
    load_state(tmp_path / "state.pt", second, LOG)
    assert second.state_dict()["attached"] == first.state_dict()["attached"]
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


def test_the_state_of_another_level_is_refused_and_nothing_is_loaded(tmp_path: Path):
    first, other = boosted(grad_freeze=PROGRESSIVE), boosted()
    updates(first, 3)
    save_state(tmp_path / "state.pt", first.state_dict())
    with pytest.raises(ValueError, match="grad_freeze"):
        load_state(tmp_path / "state.pt", other, LOG)


@pytest.mark.parametrize(("extra", "said"), [({"grad_freeze": PROGRESSIVE}, True), ({}, False)])
def test_a_missing_state_is_told_if_anything_counts(extra: dict, said: bool, tmp_path: Path, caplog):
    with caplog.at_level(logging.WARNING, logger=LOG.name):
        load_state(tmp_path / "state.pt", boosted(**extra), LOG)
    assert ("so these start as in a new run: grad_freeze." in caplog.text) == said


def test_figures_are_levers_gain_and_time():
    verdicts = (
        Verdict(lever="compile", kept=False, reason="slow"),
        Verdict(lever="fused_optimizer", kept=True, reason="fast"),
    )
    for source, seconds in (("trial", 7.5), ("checkpoint", 0.0), ("cache", 0.0)):
        choice = Choice(verdicts=verdicts, source=source, seconds=7.5, ratio=Interval(low=1.1, mid=1.2, high=1.3))
        assert figures_of(choice) == {
            "boost/compile": 0.0,
            "boost/fused_optimizer": 1.0,
            "boost/times_as_fast": 1.2,
            "boost/trial_seconds": seconds,
        }
    assert "boost/times_as_fast" not in figures_of(Choice(verdicts=verdicts, source="prior"))
