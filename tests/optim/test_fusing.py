"""Groups that the user fused keep right steps, and the care is taken once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support.models import mlp
from torchboost.algorithms import BlockFreeze, FusedOptimizer, fuse_optimizer
from torchboost.core.algorithm import Attachment, Target, attach_all
from torchboost.core.torch_private import step_pre_hooks
from torchboost.errors import NoEffectWarning
from torchboost.optim.fusing import Fusion, care_for_fused, obstacle


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


@pytest.mark.parametrize(
    "flags", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": False}], ids=str
)
def test_a_checkpoint_has_the_flags_of_the_user(flags: dict[str, bool]) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), **flags)
    written = optimizer.state_dict()["param_groups"][0]
    added = torch.nn.Parameter(torch.ones(2))
    with fuse_optimizer(optimizer):
        assert optimizer.state_dict()["param_groups"][0] == written
        assert optimizer.param_groups[0]["fused"]
        optimizer.add_param_group({"params": [added]})
        for _ in range(2):
            last = optimizer.state_dict()["param_groups"][1]
            assert (last["fused"], last["foreach"]) == (written["fused"], written["foreach"])
            added.grad = torch.ones(2)
            optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert [group["fused"] for group in optimizer.param_groups] == [True, True]


def test_a_group_that_cannot_be_fused_is_written_as_it_is() -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    groups = [{"params": params[:1], "foreach": True}, {"params": params[1:], "foreach": False, "dampening": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    written = optimizer.state_dict()["param_groups"]
    with pytest.warns(NoEffectWarning, match="group 1"):
        fuse_optimizer(optimizer)
    assert [group["fused"] for group in optimizer.param_groups] == [True, None]
    assert optimizer.state_dict()["param_groups"] == written


def test_hooks_of_all_optimizers_see_no_step_before_the_first() -> None:
    called: list[object] = []
    optimizer = sgd(mlp())
    handle = register_optimizer_step_post_hook(lambda *held: called.append(held[0]))
    try:
        obstacle(optimizer, optimizer.param_groups[0])
    finally:
        handle.remove()
    assert called == []
