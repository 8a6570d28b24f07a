"""Optimizers that are wrappers: Accelerate's own, and one like timm's Lookahead, which calls hooks of its own only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import torchboost
from tests.support.models import batch_for, cnn

Wrap = Callable[[Optimizer], Optimizer]


class Lookahead(Optimizer):
    """Some registries of hooks, groups of the optimizer inside, a step of its own after every second one."""

    def __init__(self, base: Optimizer) -> None:
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}
        self._base = base
        self.param_groups = base.param_groups
        self.defaults = base.defaults
        self.state = base.state
        self.updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self._base.step(closure)
        self.updates += 1
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            slow = self.state[p].setdefault("slow", p.detach().clone())
            if self.updates % 2 == 0:
                p.copy_(slow.lerp_(p, 0.5))
        return loss


def accelerated(optimizer: Optimizer) -> Optimizer:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(optimizer)


def train(model: torch.nn.Module, optimizer: Optimizer) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        inputs, labels = batch_for(model, generator)
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_boosting_acts_on_the_optimizer_inside() -> None:
    for wrap in [accelerated, Lookahead]:
        model = cnn()
        plain = copy.deepcopy(model)
        inner, reference = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, plain))
        outer = wrap(inner)
        booster = torchboost.AutoBoost("O1", {"extra": {"autocast": False}})
        _, returned = booster.network_auto_process_train(model, outer)
        assert returned is outer
        assert {"fused_optimizer", "channels_last"} <= set(booster.attached)
        assert inner.param_groups[0]["fused"] is True
        train(model, outer)
        train(plain, wrap(reference))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        booster.attached.remove()
        assert not inner._optimizer_step_pre_hooks


def test_centralisation_by_hand() -> None:
    for wrap in [accelerated, Lookahead]:
        weight = torch.nn.Parameter(torch.zeros(2, 3))
        outer = wrap(torch.optim.SGD([weight], lr=1.0))
        torchboost.optim.GradientPipeline(torchboost.optim.Centralize()).attach(outer)
        weight.grad = torch.tensor([[1.0, 2.0, 3.0], [3.0, 3.0, 3.0]])
        outer.step()
        assert weight.tolist() == [[1.0, 0.0, -1.0], [0.0, 0.0, 0.0]]
