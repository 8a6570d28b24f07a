"""The communication hook of DDP: packs, buckets given back in time, and the mean once it is switched off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import mlp
from tests.support.nodes import batch_of, fresh, tensors, train
from tests.support.ranks import run_ranks
from torchboost.algorithms.adaptive_sum.gradient_hooks import BucketPacks, Packing, bucket_packs
from torchboost.distributed.topology import NodeGroups, Topology
from torchboost.errors import IncompatibleError

pytestmark = pytest.mark.dist


def packed(ddp: DistributedDataParallel, noted: list[Any]) -> BucketPacks:
    packs = bucket_packs(ddp)
    places = {param: place for place, param in enumerate(ddp.module.parameters())}
    groups = NodeGroups.of(Topology.current(1))
    packs.packing = Packing(
        places, lambda place: place // 2, groups, noted.clear, lambda at, cosines: noted.append((list(at), cosines))
    )
    return packs


def order_of_packs() -> list[list[list[int]]]:
    noted: list[Any] = []
    ddp = DistributedDataParallel(fresh(), bucket_cap_mb=1e-6)
    packed(ddp, noted)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        train(ddp, optimizer, 1, first=step)
        seen.append([places for places, _ in noted])
        assert all(cosines.shape == (1, 2) for _, cosines in noted)
    return seen


def test_packs_are_combined_from_the_last_to_the_first():
    first, second = run_ranks(order_of_packs, 2)
    assert first == second == [[[4, 5], [2, 3], [0, 1]]] * 3


def switched_off() -> tuple[bool, bool]:
    found = []
    for hooked in (False, True):
        ddp = DistributedDataParallel(fresh())
        same = True
        if hooked:
            packs = packed(ddp, [])
            packs.switch_off()
            same = bucket_packs(ddp) is packs and len(ddp._comm_hooks) == 1
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), 3)
        found.append(tensors(ddp))
    return found[0] == found[1], same


def test_switched_off_it_is_the_mean_of_ddp():
    assert run_ranks(switched_off, 2) == [(True, True)] * 2


def a_pass_that_failed() -> bool:
    """What a failed backward pass left behind does not reach the next one."""
    found = []
    for failing in (False, True):
        ddp = DistributedDataParallel(fresh(), bucket_cap_mb=1e-6)
        packs = packed(ddp, [])
        if failing:
            packs._arrived, packs._counted = {2: [(0, torch.ones(3))]}, {2: 1}
        x, y = batch_of(dist.get_rank(), 0)
        F.cross_entropy(ddp(x), y).backward()
        found.append([p.grad.tolist() for p in ddp.parameters()])  # pyright: ignore
    return found[0] == found[1]


def test_a_pass_begins_anew():
    assert run_ranks(a_pass_that_failed, 2) == [True, True]


def other_hooks() -> list[str]:
    said = []
    for built_in in (False, True):
        ddp = DistributedDataParallel(mlp())
        if built_in:
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        else:
            ddp.register_comm_hook(None, lambda state, bucket: None)
        hooks = len(ddp._comm_hooks)
        try:
            bucket_packs(ddp)
        except IncompatibleError as error:
            said.append(str(error))
        assert len(ddp._comm_hooks) == hooks
    return said


def test_another_hook_is_refused():
    for said in run_ranks(other_hooks, 2):
        assert len(said) == 2
        assert all("; build it without that hook, or use on='delta'" in message for message in said)
