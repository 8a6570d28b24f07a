from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import BottleneckNet, TinyGPT, cnn, mlp
from tests.support.trajectories import identical, snapshot, train
from torchboost.core.algorithm import Target


def target(make: Callable[[], nn.Module], lr: float = 0.1) -> Target:
    torch.manual_seed(1)
    model = make()
    return Target(model, torch.optim.SGD(model.parameters(), lr=lr))


def test_the_same_training_is_identical_and_a_difference_is_seen():
    for make in (mlp, cnn, BottleneckNet, TinyGPT):
        run = train(target(make), 3, seed=0)
        assert identical(run, train(target(make), 3, seed=0))
        assert not identical(run, train(target(make), 3, seed=1))
        assert not identical(run, train(target(make, lr=0.1000001), 3, seed=0))
        assert not identical(run, run[:2])
    model = cnn()
    before = snapshot(model)
    assert snapshot(model.to(memory_format=torch.channels_last)) == before
    with pytest.raises(ValueError, match="proves nothing"):
        identical([], [])


def test_a_callable_trains_like_the_plain_loop():
    hand = target(mlp)

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        F.cross_entropy(hand.model(inputs), labels).backward()
        hand.optimizer.step()
        hand.optimizer.zero_grad()

    assert identical(train(step, 3, seed=0, model=hand.model), train(target(mlp), 3, seed=0))
    with pytest.raises(TypeError, match="model="):
        train(lambda *inputs: None, 1, seed=0)
