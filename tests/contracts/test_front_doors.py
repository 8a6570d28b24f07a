"""Every front door passes on ``verify``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import torchboost
from tests.integrations.trainers import WAYS, arguments, run
from tests.support.trainer_models import KINDS
from torchboost.integrations import transformers as hugging_face

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec.*", "ignore::FutureWarning")


def pair() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = KINDS["bert"].seeded()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def two_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(**KINDS["bert"].data().batch(4)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("one_accelerator")
@pytest.mark.parametrize("verify", [False, True])
def test_every_front_door_can_switch_the_check_off(verify: bool, tmp_path: Path):
    boosted = torchboost.boost(*pair(), total_steps=2, verify=verify)
    two_steps(*boosted)
    booster = torchboost.AutoBoost("O1", total_steps=2, verify=verify)
    two_steps(*booster.network_auto_process_train(*pair()))
    plain = transformers.Trainer(KINDS["bert"].seeded(), arguments(tmp_path), train_dataset=KINDS["bert"].data())
    trainer: Any = hugging_face.boost(plain, verify=verify)
    trainer.train()
    said = [boosted.explain(), booster.explain(), trainer.boosted.explain()]
    said += [run(name, "bert", tmp_path / name, verify=verify).boosted.explain() for name in WAYS]
    expected = "exact here" if verify else "not checked: verify=False"
    assert all(re.search(rf"^fused_optimizer +on .*  {expected}$", text, re.MULTILINE) for text in said)
