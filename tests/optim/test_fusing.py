"""Groups that the user fused keep right steps, and the care is taken once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support.models import mlp
from torchboost.algorithms import FusedOptimizer, GradFreeze, fuse_optimizer
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


class _Misaligned:
    """A convolution in channels-last format whose gradients are views of a flat buffer, in contiguous format."""

    def __init__(self, fused: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.optimizer = sgd(self.model, fused=fused or None)
        self.flat = torch.zeros(sum(p.numel() for p in self.model.parameters()))
        start = 0
        for p in self.model.parameters():
            p.grad = self.flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
        self.views = [p.grad for p in self.model.parameters()]
        self.care = care_for_fused(self.optimizer)

    def backward(self, seed: int) -> None:
        self.flat.zero_()
        inputs = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
        self.model(inputs).square().mean().backward()

    def check(self, other: _Misaligned) -> None:
        for p, q in zip(self.model.parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(p, q)
        torch.testing.assert_close(self.flat, other.flat)
        assert all(p.grad is view for p, view in zip(self.model.parameters(), self.views, strict=True))


@torch.no_grad()
def _clip(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad.clamp_(-0.01, 0.01)


def _clipped(one: _Misaligned) -> None:
    one.optimizer.register_step_pre_hook(_clip)
    for seed in range(3):
        one.backward(seed)
        one.optimizer.step()


def _unscaled(one: _Misaligned) -> None:
    """The fused kernel divides the gradients that it is given."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    one.backward(0)
    one.flat.mul_(8)
    scaler.scale(torch.zeros(()))
    scaler.step(one.optimizer)


def _failed(one: _Misaligned) -> None:
    def fail(*args: object) -> None:
        raise KeyError

    one.backward(0)
    with one.optimizer.register_step_pre_hook(fail), pytest.raises(KeyError):
        one.optimizer.step()
    one.optimizer.step()


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout")  # of torch, once
def test_gradients_in_a_flat_buffer_are_still_there_after_a_step() -> None:
    for trained in (_clipped, _unscaled, _failed):
        fused, plain = _Misaligned(True), _Misaligned(False)
        for one in (fused, plain):
            trained(one)
        fused.check(plain)


def test_gradients_that_a_hook_drops_after_the_step_stay_away() -> None:
    fused = _Misaligned(True)
    fused.care.remove()
    fused.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.zero_grad())
    fused.care = care_for_fused(fused.optimizer)
    fused.backward(0)
    fused.optimizer.step()
    assert all(p.grad is None for p in fused.model.parameters())


def test_gradients_that_are_aligned_are_not_touched() -> None:
    model = mlp()
    optimizer = sgd(model, fused=True)
    with care_for_fused(optimizer):
        model(torch.randn(4, 8)).square().mean().backward()
        held = [p.grad for p in model.parameters()]
        optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs: seen.extend(p.grad for p in optimizer.param_groups[0]["params"])
        )
        seen: list[torch.Tensor | None] = []
        optimizer.step()
    assert all(a is b for a, b in zip(seen, held, strict=True))


def test_it_is_taken_once_and_only_for_fused_groups() -> None:
    for fused in [None, True]:
        model = mlp()
        optimizer = sgd(model, fused=fused)
        attached = attach_all(
            Target(model, optimizer), [FusedOptimizer(), GradFreeze(groups=3, total_steps=100, full_share=0.5)]
        )
        caring = [h for h in step_pre_hooks(optimizer).values() if isinstance(getattr(h, "__self__", None), Fusion)]
        assert len(caring) == 1
        attached.remove()
        effect = care_for_fused(optimizer)
        assert isinstance(effect, Fusion) is bool(fused)
        assert isinstance(effect, Attachment)


def test_a_checkpoint_has_the_flags_of_the_user() -> None:
    for flags in [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": False}]:
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
    with register_optimizer_step_post_hook(lambda *_: called.append(_)):
        obstacle(optimizer, optimizer.param_groups[0])
    assert called == []
