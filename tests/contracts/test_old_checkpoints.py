"""Checkpoints and plans that an earlier version wrote: this version loads them and continues with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torchboost
from tests.fixtures.boosted.write import FOLDER, LENGTH, STEPS, network, start, train

CHECKPOINTS = sorted(FOLDER.glob("*.pt"))
PLANS = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("file", CHECKPOINTS, ids=lambda file: file.stem)
def test_training_continues_from_an_old_checkpoint(file: Path) -> None:
    checkpoint = torch.load(file, weights_only=True)
    boosted = start(file.stem)
    boosted.model.load_state_dict(checkpoint["model"])
    boosted.optimizer.load_state_dict(checkpoint["optimizer"])
    boosted.load_state_dict(checkpoint["boosted"])
    weights = train(boosted, range(STEPS, LENGTH))
    # Another processor may round the last bits differently.
    torch.testing.assert_close(weights, checkpoint["expected"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.stem)
def test_an_old_plan_turns_on_the_same_algorithms(file: Path) -> None:
    asked = start(file.stem).plan
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    read = torchboost.boost(model, optimizer, config=file, total_steps=LENGTH, calibrate=False).plan
    assert {one.name for one in asked.algorithms} == {one.name for one in read.algorithms}
