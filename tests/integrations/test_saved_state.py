"""The state of a boosted training in a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import torchboost
from torchboost.front import Boosted
from torchboost.integrations.saved_state import load_state, save_state

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
