"""Freezing on two ranks beside everything else that touches gradients, and resumed in mid-run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.support.models import BottleneckNet, batch_for
from tests.support.ranks import run_ranks
from tests.support.wrapped import Kind, all_weights, wrap
from torchboost.algorithms.autocast import Autocast
from torchboost.algorithms.grad_accumulation import GradAccumulation
from torchboost.algorithms.grad_freeze.algorithm import GradFreeze
from torchboost.algorithms.loss_scale_group.algorithm import GroupGradScaler
from torchboost.algorithms.loss_scale_group.scalers import DynamicLossScale
from torchboost.core.algorithm import Algorithm, Target, attach_all
from torchboost.core.step import TrainStep
from torchboost.graph.blocks import blocks_of

SCHEDULE = (0, 2, 1, 3, 0, 2, 2, 1)


def network() -> BottleneckNet:
    torch.manual_seed(0)
    model = BottleneckNet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def share(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch_for(BottleneckNet(), torch.Generator().manual_seed(number), 8)
    return x[4 * dist.get_rank() :][:4], y[4 * dist.get_rank() :][:4]


def freeze_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    blocks, updates = [block.parameters for block in blocks_of(model)], iter(SCHEDULE)

    def turn(*_: object) -> None:
        index = next(updates, 0)
        for at, parameters in enumerate(blocks):
            for parameter in parameters:
                parameter.requires_grad_(at >= index)
                parameter.grad = None

    turn()
    optimizer.register_step_post_hook(turn)


class Given(GradFreeze):
    """The schedule of these tests."""

    def schedule(self, costs, *, seed=0, prefixes=None):
        return lambda step: SCHEDULE[step]


def _weights(kind: Kind, beside: str, by_hand: bool) -> tuple[list[float], list[bool]]:
    model = network()
    wrapped = wrap(model, kind, **({"find_unused_parameters": by_hand} if kind == "ddp" else {}))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    algorithms: list[Algorithm] = [] if by_hand else [Given(groups=4, total_steps=99)]
    algorithms += [GradAccumulation(steps=2)] if "accumulation" in beside else []
    algorithms += [Autocast()] if "autocast" in beside else []
    scaler = None
    if "dynamic" in beside:
        scaler = DynamicLossScale(1024.0)
    elif "groups" in beside:
        scaler = GroupGradScaler(wrapped, ["stem", "blocks", "head"])
    if by_hand:
        freeze_by_hand(wrapped, optimizer)
    target = Target(wrapped, optimizer, scaler)
    poison = {"value": 1.0}
    attached = attach_all(target, algorithms)
    step = TrainStep(target, lambda x, y: F.cross_entropy(wrapped(x), y) * poison["value"], attached=attached)
    skipped = []
    for number in range(6 if "accumulation" not in beside else 12):
        poison["value"] = math.inf if scaler is not None and number == 3 and dist.get_rank() == 1 else 1.0
        skipped.append(bool(step(*share(number)).overflow))
    return all_weights(wrapped), skipped


KINDS: tuple[Kind, ...] = ("ddp", "fsdp")
BESIDE = ("nothing", "accumulation", "autocast", "dynamic", "accumulation autocast groups")


def _both_ways() -> dict[Kind, dict[str, tuple[Any, Any]]]:
    return {kind: {how: (_weights(kind, how, False), _weights(kind, how, True)) for how in BESIDE} for kind in KINDS}


@pytest.mark.dist
def test_equals_flags_turned_by_hand_beside_everything_else_bit_for_bit() -> None:
    first, second = run_ranks(_both_ways, 2)
    assert first == second
    for kind, runs in first.items():
        for how, (ours, by_hand) in runs.items():
            assert ours == by_hand, (kind, how)
            assert any(ours[1]) == ("dynamic" in how or "groups" in how), (kind, how)
        assert len({str(ours) for ours, _ in runs.values()}) > 3, "they are different runs"
