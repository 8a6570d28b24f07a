"""Steps that pass by the optimizer in front."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from torchboost import IncompatibleError
from torchboost.optim.direct_steps import DirectSteps
from torchboost.optim.wrapping_optimizer import WrappingOptimizer


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
    direct.remove()
    behind.step()
    assert not behind._optimizer_step_pre_hooks


def test_an_error_inside_closes_it_again():
    behind, _, direct = start()
    with pytest.raises(KeyError), direct.allowed():
        raise KeyError
    with pytest.raises(IncompatibleError):
        behind.step()


def test_the_one_in_front_lives_as_long_as_the_one_behind():
    behind, front, direct = start()
    kept = weakref.ref(front)
    del front, direct
    gc.collect()
    assert kept() is not None
    del behind
    gc.collect()
    assert kept() is None
