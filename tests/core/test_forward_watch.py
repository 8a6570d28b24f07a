"""One warning, after the first update that counts, if the forward was not called."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from torchboost.core.forward_watch import ForwardWatch
from torchboost.errors import NoEffectWarning


def update(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()


def make() -> tuple[nn.Module, torch.optim.Optimizer, ForwardWatch]:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, ForwardWatch("some_algorithm", model, optimizer)


def test_an_update_without_a_call_is_told_once():
    model, optimizer, _ = make()
    with pytest.warns(NoEffectWarning, match=r"some_algorithm had no effect: .* Sequential itself .* one of 0, 1\)"):
        update(model, optimizer, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update(model, optimizer, 1.0)


def test_a_call_before_it_is_enough():
    model, optimizer, watch = make()
    watch.called = True
    update(model, optimizer, 1.0)


def test_steps_without_gradients_do_not_count():
    model, optimizer, _ = make()
    optimizer.step()
    update(model, optimizer, 0.0)
    with pytest.warns(NoEffectWarning, match="some_algorithm"):
        update(model, optimizer, 1.0)


def test_removal_leaves_no_trace():
    model, optimizer, watch = make()
    watch.remove()
    update(model, optimizer, 1.0)
    assert not optimizer._optimizer_step_post_hooks
