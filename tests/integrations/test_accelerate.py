"""Boost in a loop that uses Accelerate: arguments, mixed precision and FSDP2. The rest is in ``test_contract``."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers.modeling_outputs import SequenceClassifierOutput

import torchboost.optim
from tests.integrations.trainers import HALF, STEPS, forget_accelerator
from tests.support.ranks import run_ranks
from tests.support.trainer_models import KINDS, Kind
from tests.support.wrapped import all_weights
from torchboost import IncompatibleError
from torchboost.graph.removed_norm import RemovedNorm
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


class ConvNet(nn.Module):
    """A network with BatchNorms for the images of ``KINDS``, since Accelerate shards no ResNet of transformers."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [[nn.Conv2d(w, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()] for w in (3, 16, 16, 16)]
        self.blocks = nn.Sequential(*(nn.Sequential(*block) for block in blocks))
        self.head = nn.Linear(16 * 4, 3)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        loss = F.cross_entropy(self.head(self.blocks(pixel_values).flatten(1)), labels)
        return SequenceClassifierOutput(loss=loss)  # pyright: ignore[reportArgumentType]


def freezing(**less_bn: int) -> dict[str, Any]:
    return {"extra": {"grad_freeze": {"pattern": "progressive"}, **({"less_bn": less_bn} if less_bn else {})}}


SHARDED = {
    "bert": ("BertLayer", KINDS["bert"]._replace(config=freezing())),
    "conv": (
        "Sequential",
        Kind(ConvNet, KINDS["resnet"].data, freezing(keep_every=2)),
    ),
    "kept": (
        "Sequential",
        Kind(ConvNet, KINDS["resnet"].data, freezing(keep_every=1)),
    ),
}


def fsdp2(wrapped: str, **options: Any) -> FullyShardedDataParallelPlugin:
    """Return a plugin, after Accelerate, which shards nothing on a CPU, was told that this is none."""
    forget_accelerator()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    policy: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": [wrapped]}
    return FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **policy, **options})


def train_sharded(
    name: str,
    folder: str = "",
    *,
    resume: str = "",
    back: str = "",
    rule: str = "adamw",
    level: str = "O1",
    tried: bool = False,
) -> list[float]:
    """Train for eight updates, save after four, resume from there, or go back to there; return all weights."""
    wrapped, kind = SHARDED[name]
    accelerator, model = Accelerator(fsdp_plugin=fsdp2(wrapped)), kind.seeded()
    parts: Any = (model, RULES[rule](model.parameters()), DataLoader(kind.data(), 4))
    if level:
        config = kind.config if level != "O0" else None
        settings = {"level": level, "total_steps": STEPS, "config": config, "calibrate": 2.0 if tried else "auto"}
        *parts, boosted = prepare(accelerator, *parts, **settings)
        assert ("grad_freeze" in boosted.attached) == (level != "O0")
        assert any(isinstance(m, RemovedNorm) for m in model.modules()) == (name == "conv")
        assert ("found nothing to change" in boosted.explain()) == (name == "kept")
    else:
        parts = accelerator.prepare(*parts)
    model, optimizer, loader = parts
    if resume:
        accelerator.load_state(resume)
    batches, done = [batch for _ in range(2) for batch in loader], HALF if resume else 0
    while done < STEPS:
        accelerator.backward(model(**batches[done]).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done == HALF and folder:
            accelerator.save_state(folder)
        if done == STEPS - 1 and back:
            assert not all(p.requires_grad for p in model.parameters())
            accelerator.load_state(back)
            done, back = HALF, ""
    assert not tried or boosted.choice.source == ("checkpoint" if resume else "trial")
    return all_weights(model)


RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "stateless": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "ours": partial(torchboost.optim.AdamW, lr=1e-2),
}


def sharded(folder: str) -> list[bool]:
    """Every rule resumes exactly, also going back in the same run; a trial is not repeated; O0 changes nothing."""
    results = []
    for name, rule in (*(("bert", rule) for rule in RULES), ("conv", "adamw"), ("kept", "adamw")):
        saved = f"{folder}/{name}-{rule}"
        whole = train_sharded(name, saved, rule=rule)
        assert all(map(math.isfinite, whole))
        assert rule != "ours" or whole == train_sharded(name, rule=rule), "a checkpoint changes nothing"
        results.append(whole == train_sharded(name, resume=saved, rule=rule))
        if (name, rule) in (("bert", "adamw"), ("bert", "stateless"), ("conv", "adamw")):
            results.append(whole == train_sharded(name, back=saved, rule=rule))
    tried = train_sharded("bert", f"{folder}/tried", tried=True)
    results.append(tried == train_sharded("bert", resume=f"{folder}/tried", tried=True))
    results.append(train_sharded("bert", level="O0") == train_sharded("bert", level=""))
    return results


@pytest.mark.dist
def test_a_resumed_run_under_fsdp2_equals_the_uninterrupted_one(tmp_path: Path):
    assert run_ranks(sharded, 2, str(tmp_path), timeout=400.0) == [[True] * 11] * 2


def test_fsdp1_and_full_state_dicts_are_refused_unchanged():
    model = KINDS["bert"].seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for options, said in (({"fsdp_version": 1}, "FSDP"), ({"state_dict_type": "FULL_STATE_DICT"}, "loses the moments")):
        accelerator = Accelerator(fsdp_plugin=fsdp2("BertLayer", **options))
        with pytest.raises(IncompatibleError, match=said):
            prepare(accelerator, model, optimizer)


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


def test_fsdp2_takes_no_built_optimizer():
    accelerator = Accelerator(fsdp_plugin=fsdp2("BertLayer"))
    model = KINDS["bert"].seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(IncompatibleError, match=r"recipe.optimizer='muon' and FSDP2.*muon_from"):
        prepare(accelerator, model, optimizer, total_steps=STEPS, config={"recipe": {"optimizer": "muon"}})
