"""Boost in a loop that uses Accelerate: arguments, mixed precision and FSDP2. The rest is in ``test_contract``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import torchboost.optim
from tests.integrations.trainers import STEPS
from tests.support.trainer_models import KINDS
from torchboost import IncompatibleError
from torchboost.integrations.accelerate import prepare

pytestmark = pytest.mark.usefixtures("one_accelerator")


def test_what_is_prepared_already_and_bad_arguments_are_refused_unchanged():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, wrong = KINDS["bert"].seeded(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(TypeError, match="accelerator: found Linear"):
        prepare(wrong, model, optimizer)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="optimizer"):
        prepare(accelerator, model, model)  # pyright: ignore[reportArgumentType]
    for what in ("model", "optimizer"):
        model = KINDS["resnet"].seeded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        before = {name: type(module) for name, module in model.named_modules()}
        pair = (accelerator.prepare(model), optimizer) if what == "model" else (model, accelerator.prepare(optimizer))
        with pytest.raises(IncompatibleError, match="pass the bare ones"):
            prepare(accelerator, *pair, level="O1", total_steps=STEPS)
        assert {name: type(module) for name, module in model.named_modules()} == before


def test_the_eval_copy_is_right_under_mixed_precision():
    kind, accelerator = KINDS["resnet"], Accelerator(cpu=True, mixed_precision="bf16")
    model = kind.seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, boosted = prepare(accelerator, model, optimizer, total_steps=STEPS, config=kind.config)
    batch = kind.data().batch(6)
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    images = {"pixel_values": batch["pixel_values"]}
    copy = boosted.eval_model()
    boosted.remove()
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    with torch.no_grad():
        torch.testing.assert_close(copy(**images).logits, model.eval()(**images).logits, rtol=1e-4, atol=1e-4)


def test_a_recipe_builds_the_optimizer_that_is_prepared():
    kind, config = KINDS["bert"], {"recipe": {"optimizer": "muon", "lr": 0.02, "rate": 0.5, "length": 0.75}}

    def train(optimizer: Any, model: Any, steps: int, schedule: Any) -> None:
        for batch in [batch for _ in range(2) for batch in DataLoader(kind.data(), 4)][:steps]:
            model(**batch).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    accelerator, model = Accelerator(cpu=True), kind.seeded()
    given = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    early = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD(model.parameters(), lr=0.1), STEPS)
    with pytest.raises(IncompatibleError, match="found a schedule on the SGD"):
        prepare(accelerator, model, early.optimizer, early, level="O0", total_steps=STEPS, config=config)
    model, optimizer, boosted = prepare(accelerator, model, given, level="O0", total_steps=STEPS, config=config)
    assert boosted.steps == round(0.75 * STEPS)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(boosted.optimizer, boosted.steps)
    train(optimizer, model, boosted.steps, accelerator.prepare(schedule))
    boosted.remove()
    plain = kind.seeded()
    mixed = torchboost.optim.muon_from(torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), plain, lr=0.02)
    train(mixed, plain, boosted.steps, torch.optim.lr_scheduler.CosineAnnealingLR(mixed, boosted.steps))
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
