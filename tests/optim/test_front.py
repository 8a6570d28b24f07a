from __future__ import annotations

import pytest
import torch
from torch import nn

from torchboost.optim.front import FrontOptimizer


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


def test_only_optimizers_have_a_front() -> None:
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, found str"):
        FrontOptimizer("sgd")  # pyright: ignore[reportArgumentType]
