"""Checkpoints and plans that an earlier version wrote: this version loads them and continues with the same numbers."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

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


O1_OF_0_7: dict[str, Any] = {
    "extra": {"less_bn": {"keep": "narrowest", "keep_every": 1}, "gradient_centralization": {}}
}


def at_o1(config: Any = None, **options: Any) -> torchboost.Boosted:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torchboost.boost(model, optimizer, level="O1", total_steps=2000, config=config, calibrate=False, **options)


def test_a_run_at_the_former_o1_says_with_what_to_continue() -> None:
    """Up to version 0.7 level O1 removed BatchNorms and centralised gradients."""
    before = at_o1(O1_OF_0_7)
    train(before, range(STEPS))
    parts = before.model, before.optimizer, before
    model, optimizer, boosted = (copy.deepcopy(part.state_dict()) for part in parts)
    here = at_o1()
    here.model.load_state_dict(model)
    start = here.optimizer.state_dict()["param_groups"]
    with pytest.raises(ValueError, match="has the optimizer state of 17 parameters, and this optimizer has 23") as said:
        here.optimizer.load_state_dict(optimizer)
    with pytest.raises(ValueError, match="with less_bn and gradient_centralization, which are off here") as also:
        here.load_state_dict(boosted)
    assert here.optimizer.state_dict() == {"state": {}, "param_groups": start}
    advice = [re.search(r"pass config=(.*)\.$", str(one.value)) for one in (said, also)]
    again = at_o1(json.loads(advice[0][1])) if advice[0] and advice[1] and advice[0][1] == advice[1][1] else None
    assert again is not None
    for part, state in ((again.model, model), (again.optimizer, optimizer), (again, boosted)):
        part.load_state_dict(state)
    went_on, expected = (train(one, range(STEPS, LENGTH)) for one in (again, before))
    torch.testing.assert_close(went_on, expected, rtol=0, atol=0)


def test_what_the_former_o1_had_may_be_off_in_words_or_be_on_by_hand() -> None:
    centralised = {"extra": {"gradient_centralization": {}}}
    saved = at_o1(centralised).state_dict()
    with pytest.raises(
        ValueError, match=r"with gradient_centralization, which is off.*\{\"gradient_centralization\": \{\}"
    ):
        at_o1().step().load_state_dict({"attached": saved["attached"]})
    without = at_o1(centralised)
    without.withdraw("gradient_centralization", "a test")
    without.load_state_dict(saved)
    removed = at_o1({"extra": {"less_bn": {}}})
    model = network()
    torchboost.less_bn(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    by_hand = torchboost.boost(model, optimizer, level="O1", total_steps=2000, calibrate=False)
    assert "less_bn" not in by_hand.attached
    by_hand.optimizer.load_state_dict(removed.optimizer.state_dict())
    by_hand.load_state_dict(removed.state_dict())
    by_hand.remove()
    here = at_o1()
    here.remove()
    with pytest.raises(ValueError, match="doesn't match the size"):  # torch's own, of an optimizer that is plain again
        here.optimizer.load_state_dict(removed.optimizer.state_dict())


def test_a_state_that_no_former_o1_wrote_is_not_taken_for_one() -> None:
    model = network()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[:4]}, {"params": parameters[4:]}], lr=0.05)
    boosted = torchboost.boost(model, optimizer, level="O1", calibrate=False)
    with pytest.raises(ValueError, match="different number of parameter groups"):  # torch's own
        boosted.optimizer.load_state_dict(torch.optim.SGD(parameters[4:], lr=0.05).state_dict())
    head = torch.optim.SGD([{"params": parameters[:4]}, {"params": parameters[6:]}], lr=0.05).state_dict()
    with pytest.raises(ValueError, match="If both are of the same model and nothing was frozen, boost with the level"):
        boosted.optimizer.load_state_dict(head)
