from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import BottleneckNet, TinyGPT, batch_for, cnn, mlp
from tests.support.trajectories import identical, snapshot, train
from torchboost.core.algorithm import Target

MODELS = [mlp, cnn, BottleneckNet, TinyGPT]


def target(make: Callable[[], nn.Module], lr: float = 0.1) -> Target:
    torch.manual_seed(1)
    model = make()
    return Target(model, torch.optim.SGD(model.parameters(), lr=lr))


@pytest.mark.parametrize("make", MODELS)
def test_same_seed_same_weights(make):
    assert identical(train(target(make), 3, seed=0), train(target(make), 3, seed=0))


@pytest.mark.parametrize("make", MODELS)
def test_a_difference_is_seen(make):
    run = train(target(make), 3, seed=0)
    assert not identical(run, train(target(make), 3, seed=1))
    assert not identical(run, train(target(make, lr=0.1000001), 3, seed=0))
    assert not identical(run, run[:2])


@pytest.mark.parametrize("make", MODELS)
def test_training_learns_a_batch(make):
    fitted = target(make, lr=0.5)
    inputs, labels = batch_for(fitted.model, torch.Generator().manual_seed(0))
    first = F.cross_entropy(fitted.model(inputs), labels).item()
    for _ in range(30):
        loss = F.cross_entropy(fitted.model(inputs), labels)
        loss.backward()
        fitted.optimizer.step()
        fitted.optimizer.zero_grad()
    assert loss.item() < 0.7 * first


def test_a_callable_trains_like_the_plain_loop():
    hand = target(mlp)

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        F.cross_entropy(hand.model(inputs), labels).backward()
        hand.optimizer.step()
        hand.optimizer.zero_grad()

    assert identical(train(step, 3, seed=0, model=hand.model), train(target(mlp), 3, seed=0))


def test_snapshot_ignores_the_memory_format():
    model = cnn()
    before = snapshot(model)
    assert snapshot(model.to(memory_format=torch.channels_last)) == before


def test_nothing_trained_is_no_proof():
    with pytest.raises(ValueError, match="proves nothing"):
        identical([], [])
    with pytest.raises(TypeError, match="model="):
        train(lambda *inputs: None, 1, seed=0)
