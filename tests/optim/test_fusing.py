"""Groups that the user fused keep right steps, and the care is taken once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.support.models import mlp
from torchboost.algorithms import BlockFreeze, FusedOptimizer
from torchboost.core.algorithm import Attachment, Target, attach_all
from torchboost.core.torch_private import step_pre_hooks
from torchboost.optim.fusing import Fusion, care_for_fused


def sgd(model: nn.Module, fused: bool | None = None) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_momentum_that_starts_later_is_that_of_an_ordinary_step() -> None:
    model = mlp()
    plain = copy.deepcopy(model)
    fused, ordinary = sgd(model, fused=True), sgd(plain)
    with care_for_fused(fused):
        for net, optimizer in ((model, fused), (plain, ordinary)):
            net[0].requires_grad_(False)
            step(net, optimizer, 0)
            net[0].requires_grad_(True)
            step(net, optimizer, 1)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert not step_pre_hooks(fused)
    assert fused.param_groups[0]["fused"] is True


@pytest.mark.parametrize("fused", [None, True])
def test_it_is_taken_once_and_only_for_fused_groups(fused: bool | None) -> None:
    model = mlp()
    optimizer = sgd(model, fused=fused)
    attached = attach_all(
        Target(model, optimizer), [FusedOptimizer(), BlockFreeze(groups=3, total_steps=100, full_share=0.5)]
    )
    caring = [h for h in step_pre_hooks(optimizer) if isinstance(getattr(h, "__self__", None), Fusion)]
    assert len(caring) == 1
    attached.remove()
    effect = care_for_fused(optimizer)
    assert isinstance(effect, Fusion) is bool(fused)
    assert isinstance(effect, Attachment)
