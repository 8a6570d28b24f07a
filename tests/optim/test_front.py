from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from torchboost.optim.front import FrontOptimizer
from torchboost.optim.rules.schedule_free import ScheduleFreeSGD


def test_groups_and_state_are_those_of_the_optimizer_behind() -> None:
    parameter = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    front = FrontOptimizer(inner)
    front.param_groups[0]["lr"] = 0.5
    parameter.grad = torch.ones(2)
    front.step()
    assert parameter.tolist() == [0.5, 0.5]
    assert front.state is inner.state
    inner.load_state_dict(front.state_dict())
    front.load_state_dict(inner.state_dict())
    assert front.param_groups is inner.param_groups


def test_what_only_the_optimizer_behind_has_is_reached() -> None:
    front = FrontOptimizer(ScheduleFreeSGD([nn.Parameter(torch.ones(2))], lr=0.1))
    front.eval()
    assert front.param_groups[0]["training"] is False
    front.train()
    assert front.param_groups[0]["training"] is True
    assert not hasattr(FrontOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)), "eval")


def test_only_optimizers_have_a_front() -> None:
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, found str"):
        FrontOptimizer("sgd")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("to_front", [True, False])
def test_a_group_that_is_added_to_either_is_in_both(to_front: bool) -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([first], lr=0.1, momentum=0.9)
    front = FrontOptimizer(inner)
    (front if to_front else inner).add_param_group({"params": [second], "lr": 0.5})
    assert front.param_groups is inner.param_groups
    assert [group["lr"] for group in front.param_groups] == [0.1, 0.5]
    second.grad = torch.ones(3)
    front.step()
    assert second.tolist() == [0.5] * 3
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        front.add_param_group({"params": [second]})


def test_a_checkpoint_may_be_loaded_into_the_optimizer_behind() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    front = FrontOptimizer(inner)
    state = copy.deepcopy(inner.state_dict())
    state["param_groups"][0]["lr"] = 0.7
    inner.load_state_dict(state)
    assert front.param_groups[0]["lr"] == 0.7
    assert front.state is inner.state


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda front: pickle.loads(pickle.dumps(front))])
def test_a_front_that_hangs_on_hooks_is_not_copied(copied) -> None:
    front = FrontOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    with pytest.raises(TypeError, match=r"FrontOptimizer cannot be copied or pickled.*Copy that optimizer"):
        copied(front)
