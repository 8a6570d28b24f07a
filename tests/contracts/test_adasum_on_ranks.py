"""AdaSum on ranks in nodes: every way of training gives the published formula, and composes with the rest."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.support.models import cnn, mlp
from tests.support.nodes import batch_of, fresh, node_wrapped, simulated, tensors, train
from tests.support.ranks import run_ranks
from torchboost import DynamicLossScale, Target, TrainStep, adasum
from torchboost.algorithms import AdaptiveSum, Autocast, GradAccumulation, GradientCentralization
from torchboost.core import attach_all

pytestmark = pytest.mark.dist

STEPS = 3
WAYS = ("ddp", "fsdp")


def in_every_way(fn: Any) -> dict[str, Any]:
    return {how: fn(how) for how in WAYS}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def close(found: list[list[float]], wanted: list[list[float]], tolerance: float = 2e-6) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-5, atol=tolerance) for a, b in pairs)


def trained(how: str, per_node: int, optimizer_of: Any, make: Any = mlp, **ddp: Any) -> list[list[float]]:
    like = fresh(make)
    model = node_wrapped(copy.deepcopy(like), how, per_node, **ddp)
    optimizer = optimizer_of(model.parameters())
    summing = adasum(model, optimizer, devices_per_node=per_node)
    train(model, optimizer, STEPS, like=like)
    assert -1 <= summing.agreement < 1
    return tensors(model)


def on_updates() -> dict[tuple[str, str, int], list[list[float]]]:
    ways = [("bare", 1), ("bare", 2), ("ddp", 2), ("fsdp", 2)]
    makers = {"sgd": sgd, "adam": adam}
    return {
        (name, how, per_node): trained(how, per_node, make) for name, make in makers.items() for how, per_node in ways
    }


def test_updates_follow_the_formula_per_parameter(four):
    found = four["on_updates"]
    assert all(other == found[0] for other in found)
    for (name, how, per_node), weights in found[0].items():
        if (name, how, per_node) != ("adam", "bare", 2):  # the mean of two updates of Adam is not that of the mean
            make = {"sgd": sgd, "adam": adam}[name]
            assert close(weights, simulated(4 // per_node, per_node, STEPS, make), 1e-5), (name, how)


def accumulated(how: str) -> list[list[float]]:
    model = node_wrapped(fresh(), how, 2)
    target = Target(model, sgd(model.parameters()))
    attached = attach_all(target, [AdaptiveSum(devices_per_node=2), GradAccumulation(steps=2)])
    step = TrainStep(target, lambda x, y: F.cross_entropy(model(x), y), attached=attached)
    for number in range(2 * STEPS):
        step(*batch_of(dist.get_rank(), number))
    return tensors(model)


def test_windows_of_accumulation_are_combined_once(four):
    for how, weights in four["accumulated"][0].items():
        assert close(weights, simulated(2, 2, STEPS, sgd, micro=2)), how


def with_overflow(how: str) -> tuple[list[bool], list[float], bool, list[list[float]]]:
    model = node_wrapped(fresh(), how, 2)
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), DynamicLossScale(1024.0))
    attached = attach_all(target, [AdaptiveSum(devices_per_node=2)])
    factor = {"value": 1.0}
    step = TrainStep(target, lambda x, y: F.cross_entropy(model(x), y) * factor["value"], attached=attached)
    overflow, scales, kept = [], [], True
    for number in range(5):
        factor["value"] = math.inf if number == 2 and dist.get_rank() == 3 else 1.0
        before = tensors(model)
        out = step(*batch_of(dist.get_rank(), number))
        overflow.append(bool(out.overflow))
        scales.append(float(out.loss_scale))
        kept = kept and (before == tensors(model)) == bool(out.overflow)
    return overflow, scales, kept, tensors(model)


def test_an_overflow_on_one_rank_skips_the_update_everywhere(four):
    found = four["with_overflow"]
    assert all(other == found[0] for other in found)
    for way, (overflow, scales, kept, weights) in found[0].items():
        assert overflow == [False, False, True, False, False], way
        assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0], way
        assert kept, way
        assert all(math.isfinite(weight) for param in weights for weight in param), way


def composed() -> list[list[float]]:
    torch.manual_seed(0)
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    target = Target(model, optimizer)
    chosen = [AdaptiveSum(devices_per_node=1), GradientCentralization(), Autocast(dtype="bfloat16")]
    attached = attach_all(target, chosen)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for number in range(4):
        x, y = batch_of(dist.get_rank(), number, model)
        F.cross_entropy(model(x).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    attached.remove()
    return tensors(model)


def test_autocast_centralisation_and_a_scheduler_compose(two):
    first, second = two["composed"]
    assert first == second
    assert all(math.isfinite(weight) for param in first for weight in param)
    torch.manual_seed(0)
    assert first != tensors(cnn())


def compiled() -> tuple[list[list[float]], list[list[float]]]:
    found = []
    for backend in (None, "eager"):
        model = node_wrapped(fresh(), "ddp", 1)
        if backend is not None:
            model.compile(backend=backend)
        optimizer = sgd(model.parameters())
        adasum(model, optimizer, devices_per_node=1)
        train(model, optimizer, STEPS)
        found.append(tensors(model))
    return found[0], found[1]


def test_a_compiled_model_trains_alike(two):
    assert all(close(plain, other) for plain, other in two["compiled"])


def removed(how: str) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    """Weights after a run without AdaSum, one in which it was taken away before the first step, and one put back."""
    found = []
    for case in range(3):
        model = node_wrapped(fresh(), how, 2)
        optimizer = sgd(model.parameters())
        before = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
        if case:
            summing = adasum(model, optimizer, devices_per_node=2)
            summing.remove()
            assert not summing.active
        assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == before
        if case == 2:
            adasum(model, optimizer, devices_per_node=2)
        train(model, optimizer, STEPS)
        found.append(tensors(model))
    return found[0], found[1], found[2]


def test_removal_leaves_plain_training_and_it_can_come_back(four):
    for found in four["removed"]:
        for how, (plain, without, again) in found.items():
            assert without == plain, how
            assert close(again, simulated(2, 2, STEPS, sgd)), how


def on_two() -> dict[str, Any]:
    return {fn.__name__: fn() for fn in (composed, compiled)}


def on_four() -> dict[str, Any]:
    found = {"on_updates": on_updates()}
    return found | {fn.__name__: in_every_way(fn) for fn in (accumulated, with_overflow, removed)}


def by_name(answers: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [answer[name] for answer in answers] for name in answers[0]}


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return by_name(run_ranks(on_two, 2))


@pytest.fixture(scope="module")
def four() -> dict[str, list[Any]]:
    return by_name(run_ranks(on_four, 4, timeout=240))
