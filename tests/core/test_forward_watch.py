"""Which updates count for the warning of a forward that was never called; see ``tests/contracts``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchboost.core.covering import ForwardWatch
from torchboost.errors import NoEffectWarning


def update(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()


def make() -> tuple[nn.Module, torch.optim.Optimizer, ForwardWatch]:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, ForwardWatch("some_algorithm", model, optimizer)


def test_steps_without_gradients_do_not_count_and_a_call_before_is_enough():
    model, optimizer, watch = make()
    watch.called = True
    update(model, optimizer, 1.0)
    model, optimizer, _ = make()
    optimizer.step()
    update(model, optimizer, 0.0)
    with pytest.warns(NoEffectWarning, match="some_algorithm"):
        update(model, optimizer, 1.0)
