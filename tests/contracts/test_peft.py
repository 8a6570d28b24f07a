"""LoRA of PEFT, before and after boosting: no frozen weight moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

import torchboost
from tests.support.trainer_models import KINDS, Kind
from torchboost.integrations.transformers import BoostTrainer

pytestmark = [
    pytest.mark.usefixtures("one_accelerator"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

STEPS = 8
FREEZING = {"extra": {"grad_freeze": {"pattern": "interval"}}}
TARGETS = {"bert": ["query", "value"], "gpt": ["c_attn"], "resnet": ["convolution"]}


def lora(kind: Kind, name: str) -> Any:
    modules_to_save = ["classifier"] if name != "gpt" else None
    return get_peft_model(kind.seeded(), LoraConfig(r=2, target_modules=TARGETS[name], modules_to_save=modules_to_save))


def frozen(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, kind: Kind) -> None:
    model.train()
    for _ in range(STEPS):
        model(**kind.data().batch(4)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("name", "boost_first"), [("bert", True), ("gpt", False), ("resnet", True)])
def test_no_frozen_weight_moves_in_a_loop_of_ones_own(name: str, boost_first: bool):
    kind = KINDS[name]
    if boost_first:
        model = kind.seeded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        boosted = torchboost.boost(model, optimizer, level="O1", total_steps=STEPS, config=FREEZING)
        modules_to_save = ["classifier"] if name != "gpt" else None
        model = get_peft_model(model, LoraConfig(r=2, target_modules=TARGETS[name], modules_to_save=modules_to_save))
        optimizer.add_param_group({"params": [p for n, p in model.named_parameters() if "lora" in n]})
    else:
        model = lora(kind, name)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        boosted = torchboost.boost(model, optimizer, level="O1", total_steps=STEPS, config=FREEZING)
    before, adapters = frozen(model), {n: p.detach().clone() for n, p in model.named_parameters() if "lora_B" in n}
    train(model, optimizer, kind)
    boosted.remove()
    train(model, optimizer, kind)
    now = dict(model.named_parameters())
    assert before
    assert all(torch.equal(now[name], value) for name, value in before.items())
    assert any(not torch.equal(now[name], value) for name, value in adapters.items())


def test_a_resumed_adapter_equals_that_of_the_uninterrupted_run(tmp_path: Path):
    name, kind = "bert", KINDS["bert"]

    def trainer(folder: str) -> BoostTrainer:
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_steps": STEPS // 2, "max_steps": STEPS}
        args = transformers.TrainingArguments(str(tmp_path / folder), per_device_train_batch_size=4, **quiet)
        return BoostTrainer(lora(kind, name), args, train_dataset=kind.data(), boost="O1", boost_config=FREEZING)

    whole, resumed = trainer("whole"), trainer("resumed")
    before = frozen(whole.model)
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{STEPS // 2}"))
    first, second = dict(whole.model.named_parameters()), dict(resumed.model.named_parameters())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[name], value) for name, value in before.items())
    assert (tmp_path / "whole" / f"checkpoint-{STEPS}" / "adapter_model.safetensors").exists()
