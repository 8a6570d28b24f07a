"""Optimizers that wrap another one and share its groups and state, and steps that pass by the one in front."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from torchboost import IncompatibleError
from torchboost.optim import ScheduleFreeSGD
from torchboost.optim.wrapping_optimizer import DirectSteps, WrappingOptimizer


def wrapped(*params: nn.Parameter) -> tuple[torch.optim.SGD, WrappingOptimizer]:
    inner = torch.optim.SGD(params or [nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    return inner, WrappingOptimizer(inner)


def test_groups_state_and_checkpoints_are_those_of_the_wrapped_optimizer():
    parameter = nn.Parameter(torch.ones(2))
    inner, outer = wrapped(parameter)
    outer.param_groups[0]["lr"] = 0.5
    parameter.grad = torch.ones(2)
    outer.step()
    assert parameter.tolist() == [0.5, 0.5]
    inner.load_state_dict(outer.state_dict())
    outer.load_state_dict(inner.state_dict())
    state = copy.deepcopy(inner.state_dict())
    state["param_groups"][0]["lr"] = 0.7
    inner.load_state_dict(state)
    assert outer.param_groups[0]["lr"] == 0.7
    assert outer.param_groups is inner.param_groups
    assert outer.state is inner.state


def test_what_only_the_wrapped_optimizer_has_is_reached():
    outer: Any = WrappingOptimizer(ScheduleFreeSGD([nn.Parameter(torch.ones(2))], lr=0.1))
    outer.eval()
    assert outer.param_groups[0]["training"] is False
    outer.train()
    assert outer.param_groups[0]["training"] is True
    assert not hasattr(wrapped()[1], "eval")


def test_a_group_that_is_added_to_either_is_in_both():
    inner, outer = wrapped()
    for place, one in enumerate((inner, outer), 1):
        param = nn.Parameter(torch.ones(3))
        one.add_param_group({"params": [param], "lr": 0.5})
        assert outer.param_groups is inner.param_groups
        assert outer.param_groups[place]["lr"] == 0.5
        param.grad = torch.ones(3)
        outer.step()
        assert param.tolist() == [0.5] * 3
        param.grad = None
        with pytest.raises(ValueError, match="some parameters appear in more than one"):
            outer.add_param_group({"params": [param]})


def test_what_is_refused():
    _, outer = wrapped()
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"WrappingOptimizer cannot be copied or pickled.*Copy that optimizer"):
            copied(outer)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, found str"):
        WrappingOptimizer("sgd")  # pyright: ignore[reportArgumentType]


def start() -> tuple[torch.optim.SGD, WrappingOptimizer, DirectSteps]:
    behind = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    front = WrappingOptimizer(behind)
    return behind, front, DirectSteps(behind, front, "step the one in front")


def test_refuses_until_allowed_or_removed():
    behind, _, direct = start()
    with pytest.raises(IncompatibleError, match="step the one in front"):
        behind.step()
    with direct.allowed():
        with direct.allowed():
            behind.step()
        behind.step()
    with pytest.raises(IncompatibleError, match="step the one in front"):
        behind.step()
    with pytest.raises(KeyError), direct.allowed():
        raise KeyError
    with pytest.raises(IncompatibleError):  # an error inside closes it again
        behind.step()
    direct.remove()
    behind.step()
    assert not behind._optimizer_step_pre_hooks


def test_the_one_in_front_lives_as_long_as_the_one_behind():
    behind, front, direct = start()
    kept = weakref.ref(front)
    del front, direct
    gc.collect()
    assert kept() is not None
    del behind
    gc.collect()
    assert kept() is None
