"""Updates that are combined: what is kept, what travels, what is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import cnn
from tests.support.nodes import batch_of, formula, fresh
from tests.support.ranks import run_ranks
from torchboost.algorithms.adaptive_sum.update_sum import UpdateSum, held
from torchboost.distributed.topology import NodeGroups, Topology
from torchboost.errors import IncompatibleError

pytestmark = pytest.mark.dist


def summing(optimizer: torch.optim.Optimizer, noted: list[Any]) -> UpdateSum:
    places = {param: place for place, param in enumerate(held(optimizer))}
    groups = NodeGroups.of(Topology.current(1))
    return UpdateSum(
        optimizer, places, lambda place: 0, groups, noted.clear, lambda at, cosines: noted.append((list(at), cosines))
    )


def a_step() -> tuple[list[float], list[float], list[float]]:
    """The weight before, what this rank's step alone would make of it, and what came of it."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    optimizer = torch.optim.Adam([weight], lr=0.5)
    summing(optimizer, [])
    weight.grad = torch.tensor([1.0, -1.0, 2.0]) if dist.get_rank() else torch.tensor([1.0, 1.0, 0.0])
    alone = nn.Parameter(weight.detach().clone())
    alone.grad = weight.grad.clone()
    torch.optim.Adam([alone], lr=0.5).step()
    optimizer.step()
    return [1.0, 2.0, 3.0], alone.tolist(), weight.tolist()


def test_weights_are_the_old_ones_less_the_combined_updates():
    (old, a, found), (_, b, other) = run_ranks(a_step, 2)
    start = torch.tensor(old).double()
    deltas = [start - torch.tensor(alone).double() for alone in (a, b)]
    assert found == other
    assert torch.allclose(torch.tensor(found).double(), start - formula(deltas), atol=1e-6)


def memory_and_buffers() -> tuple[list[int], bool, list[bool]]:
    model = fresh(cnn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sums = summing(optimizer, [])
    kept = []
    for number in range(4):
        x, y = batch_of(dist.get_rank(), number, model)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append([old.data_ptr() for old in sums._old.values()])
    names = dict(model.named_buffers())
    means = [torch.empty_like(names["1.running_mean"]) for _ in range(dist.get_world_size())]
    dist.all_gather(means, names["1.running_mean"])
    sums.remove()
    return (
        [len(pointers) for pointers in kept],
        all(pointers == kept[0] for pointers in kept),
        [
            torch.equal(means[0], means[1]),
            len(sums._old) > 0,
        ],
    )


def test_the_copy_of_the_weights_stays_one_and_buffers_are_left_alone():
    for count, same, (equal_means, left) in run_ranks(memory_and_buffers, 2):
        assert count == [8] * 4
        assert same
        assert not equal_means, "every node keeps the statistics of its own batches"
        assert not left


def groups_and_freezing() -> tuple[list[list[int]], bool]:
    first, second, third = (nn.Parameter(torch.ones(4)) for _ in range(3))
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    noted: list[Any] = []
    summing(optimizer, noted)
    travelled = []

    def step(*params: Tensor) -> None:
        for param in params:
            param.grad = torch.arange(4.0) * (dist.get_rank() + 1) + dist.get_rank()
        optimizer.step()
        optimizer.zero_grad()
        travelled.append([place for places, _ in noted for place in places])

    step(first, second)
    first.requires_grad_(False)
    before = first.detach().clone()
    step(second)
    optimizer.add_param_group({"params": [third]})
    step(second, third)
    second.requires_grad_(False)
    third.requires_grad_(False)
    step()
    return travelled, torch.equal(before, first)


def test_frozen_parameters_do_not_travel_and_groups_may_be_added():
    for travelled, kept in run_ranks(groups_and_freezing, 2):
        assert travelled == [[0, 1], [1], [1, 2], []]
        assert kept


def first_step_of(what: str) -> str:
    """Return what the first step says to weights that are equal, or that differ in one number."""
    torch.set_num_threads(1 + 3 * dist.get_rank())
    weight = nn.Parameter(torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)))
    if what.startswith("NaN"):
        weight.data[5] = torch.nan
    if what in ("one bit", "NaN and one bit"):
        weight.data.view(torch.int32)[7] += dist.get_rank()
    elif what == "NaN on one rank":
        weight.data[7] = torch.nan if dist.get_rank() else 0.0
    optimizer = torch.optim.SGD([weight], lr=0.1)
    summing(optimizer, [])
    weight.grad = torch.ones_like(weight)
    try:
        optimizer.step()
    except IncompatibleError as error:
        return str(error)
    return "stepped"


@pytest.mark.parametrize("what", ["equal", "NaN on both"])
def test_equal_weights_are_equal_on_machines_that_add_in_another_order(what):
    assert run_ranks(first_step_of, 2, what) == ["stepped"] * 2


@pytest.mark.parametrize("what", ["one bit", "NaN on one rank", "NaN and one bit"])
def test_weights_that_differ_are_refused_at_the_first_step(what):
    first, second = run_ranks(first_step_of, 2, what)
    assert first == second
    assert first.startswith("1 of 1 parameters differ between the ranks before the first update")
