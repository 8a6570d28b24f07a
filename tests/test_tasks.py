"""Fine-tuning as a choice of algorithms: frozen, cached, resumed, and as the user overrides it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchboost
from torchboost.tuning.training import looked_at, named_candidates
from torchboost.workloads.models import BasicBlock, ResNet


def trained_before() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x, y = ResNet(BasicBlock, (1, 1), width=4, classes=3), torch.randn(24, 3, 8, 8), torch.randint(0, 3, (24,))
    model.train()(x)
    return model, x, y


def boosted(model: nn.Module, cache: int = 64, **extra: Any) -> torchboost.Boosted:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = {"extra": {"grad_freeze": {"cache_mebibytes": cache, **extra}}}
    return torchboost.boost(model, optimizer, level="O0", task="fine_tune", total_steps=12, config=config)


def train(pair: torchboost.Boosted, x: Tensor, y: Tensor, epochs: range) -> list[float]:
    losses = []
    for epoch in epochs:
        pair.model.train()
        for ids in torch.randperm(24, generator=torch.Generator().manual_seed(epoch)).split(8):
            loss = F.cross_entropy(pair.model(x[ids]), y[ids])
            loss.backward()
            pair.optimizer.step()
            pair.optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def test_a_fine_tuning_is_the_same_bit_for_bit_with_and_without_the_cache_and_resumed() -> None:
    model, x, y = trained_before()
    before = copy.deepcopy(model.state_dict())
    cached, computed, first = (boosted(copy.deepcopy(model), cache) for cache in (64, 0, 64))
    losses = train(cached, x, y, range(4))
    assert losses == train(computed, x, y, range(4))
    assert cached.figures()["boost/grad_freeze/cached"] == pytest.approx(3 / 4)
    begun = train(first, x, y, range(2))
    saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict(), first.state_dict()))
    second = boosted(copy.deepcopy(model))
    for part, state in zip((second.model, second.optimizer, second), saved, strict=True):
        part.load_state_dict(state)
    assert begun + train(second, x, y, range(2, 4)) == losses
    for name, value in cached.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
        frozen = name.startswith(("stem", "stages.0"))
        assert not frozen or torch.equal(value, before[name]), name  # BatchNorm statistics too


def test_augmentation_before_the_trunk_ends_the_cache_in_words_after_two_thirds_of_the_run() -> None:
    model, x, y = trained_before()
    pair = boosted(model)
    train(pair, x, y, range(2))
    for _ in range(6):  # two micro-batches an update do not count as two updates
        pair.model(x[:8])
    train(pair, x, y, range(2))
    assert pair.figures()["boost/grad_freeze/cached"] > 0.5
    pair = boosted(model)
    train(pair, x, y, range(1))
    train(pair, x + 1, y, range(1))
    with pytest.warns(torchboost.NoEffectWarning, match="Leave random augmentation out"):
        train(pair, x + 2, y, range(1))


def test_the_choices_of_the_task_give_way_to_those_of_the_user() -> None:
    model, _, _ = trained_before()
    pair = boosted(model, frozen=3, cache_dtype="bfloat16")
    (algorithm,) = pair.plan.algorithms
    assert (algorithm.groups, algorithm.frozen, algorithm.cache_dtype) == (4, 3, "bfloat16")
    assert torchboost.fine_tuning(model, frozen=1)["grad_freeze"]["frozen"] == 1
    assert torchboost.fine_tuning(model)["less_bn"] is False
    with pytest.raises(ValueError, match="this model has 4 blocks, so allowed are 1 to 3"):
        torchboost.fine_tuning(model, frozen=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(torchboost.ConfigError, match="'fine_tune'"):
        torchboost.boost(model, optimizer, task="fine_tuning")  # pyright: ignore[reportArgumentType]


def test_a_tuning_takes_numbers_of_frozen_blocks_as_candidates() -> None:
    def make(seed: int) -> tuple[Any, ...]:
        model, x, y = trained_before()
        return model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, [(x, y)], lambda predict: 0.0

    extras = {f"{count} frozen": torchboost.fine_tuning(trained_before()[0], frozen=count) for count in (1, 3)}
    findings = looked_at(named_candidates(extras), make, 20)
    assert [(one.candidate.name, one.reason) for one in findings] == [("1 frozen", ""), ("3 frozen", "")]


def test_errors_about_a_file_name_it_also_with_a_task(tmp_path: Path) -> None:
    model, file = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), tmp_path / "boost.json"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    file.write_text('{"extra": {"grad_freeze": {"frozen": "two"}}}')
    with pytest.raises(torchboost.ConfigError, match=r"grad_freeze\.frozen in .*boost\.json"):
        torchboost.boost(model, optimizer, level="O0", task="fine_tune", total_steps=12, config=str(file))
    for argument in ({"level": "O7"}, {"task": "tuning"}):
        settings: dict[str, Any] = {"level": "O0", "task": "fine_tune", **argument}
        with pytest.raises(torchboost.ConfigError) as caught:
            torchboost.boost(model, optimizer, total_steps=12, config=str(file), **settings)
        assert not caught.value.file
