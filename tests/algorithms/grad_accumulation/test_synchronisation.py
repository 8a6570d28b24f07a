"""Gradients stay on their rank while the exchange is suspended, and numbers are agreed on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from torchboost.algorithms.grad_accumulation.synchronisation import GradientSync
from torchboost.errors import IncompatibleError


def test_a_bare_model_has_nothing_to_agree_on() -> None:
    model = nn.Linear(2, 1)
    for seen in (model, torch.compile(model, backend="eager")):
        sync = GradientSync(seen)
        assert (sync.ranks, sync.sharded) == (1, False)
        assert (sync.mean(3.0), sync.largest(3.0)) == (3.0, 3.0)
    with sync.suspended():
        model(torch.ones(1, 2)).sum().backward()
    sync.average()
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def _linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 1, bias=False)


def _passes(sync: GradientSync, model: nn.Module, x: torch.Tensor) -> Iterator[None]:
    """Three backward passes, of which only the last exchanges gradients; yields after each."""
    for last in (False, False, True):
        with contextlib.nullcontext() if last else sync.suspended():
            model(x).sum().backward()
        yield


def _ddp() -> dict[str, Any]:
    rank = dist.get_rank()
    model = DistributedDataParallel(_linear())
    reduced: list[int] = []

    def counted(state, bucket):  # DDP does not read annotations that are strings
        reduced.append(bucket.index())
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, counted)
    sync = GradientSync(torch.compile(model, backend="eager"))
    x = torch.full((1, 2), float(rank + 1))
    seen = [(len(reduced), float(model.module.weight.grad[0, 0])) for _ in _passes(sync, model, x)]
    model.zero_grad()
    with sync.suspended():
        outputs = model(x)  # on both: the forward pass of DDP may exchange bucket sizes
        if rank == 0:
            outputs.sum().backward()
    sync.average()
    with pytest.raises(IncompatibleError, match="static_graph"):
        GradientSync(DistributedDataParallel(_linear(), static_graph=True))
    return {
        "seen": seen,
        "averaged": float(model.module.weight.grad[0, 0]),
        "numbers": (sync.ranks, sync.sharded, sync.mean(float(rank)), sync.largest(float(rank))),
    }


@pytest.mark.dist
def test_ddp_reduces_once_and_what_one_rank_alone_holds_is_averaged() -> None:
    for rank, found in enumerate(run_ranks(_ddp, 2)):
        own = rank + 1.0
        assert found["seen"] == [(0, own), (0, 2 * own), (1, 4.5)]
        assert found["averaged"] == 0.5
        assert found["numbers"] == (2, False, 0.5, 1.0)


def _inside() -> dict[str, Any]:
    """DDP around a part of what the loop calls, whose other part trains on each rank by itself."""
    rank = dist.get_rank()
    inner = DistributedDataParallel(_linear())
    head = nn.Linear(1, 1, bias=False)
    nn.init.ones_(head.weight)
    sync = GradientSync(nn.Sequential(inner, head))
    x = torch.full((1, 2), float(rank + 1))
    seen = [float(inner.module.weight.grad[0, 0]) for _ in _passes(sync, nn.Sequential(inner, head), x)]
    own = float(head.weight.grad)
    sync.average()
    with pytest.raises(IncompatibleError, match=r"2 modules are wrapped .*; wrap"):
        GradientSync(nn.Sequential(inner, DistributedDataParallel(_linear())))
    with pytest.raises(IncompatibleError, match="static_graph"):
        GradientSync(nn.Sequential(DistributedDataParallel(_linear(), static_graph=True)))
    return {"seen": seen, "numbers": (sync.ranks, sync.mean(float(rank))), "left alone": own == float(head.weight.grad)}


@pytest.mark.dist
def test_ddp_inside_the_model_is_found_and_two_of_them_are_refused() -> None:
    for rank, found in enumerate(run_ranks(_inside, 2)):
        own = rank + 1.0
        assert found == {"seen": [own, 2 * own, 4.5], "numbers": (2, 0.5), "left alone": True}


def _fsdp() -> tuple[list[bool], float, tuple[int, bool]]:
    rank = dist.get_rank()
    model = nn.Sequential(_linear())
    fully_shard(model[0])  # the root itself is not sharded
    sync = GradientSync(torch.compile(model, backend="eager"))
    x = torch.full((1, 2), float(rank + 1))
    reduced = [model[0].weight.grad is not None for _ in _passes(sync, model, x)]
    return reduced, float(model[0].weight.grad.full_tensor()[0, 0]), (sync.ranks, sync.sharded)


@pytest.mark.dist
def test_fsdp_reduces_once() -> None:
    assert run_ranks(_fsdp, 2) == [([False, False, True], 4.5, (2, True))] * 2


def _fsdp1() -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with pytest.raises(IncompatibleError, match="FSDP2") as caught:
        GradientSync(FullyShardedDataParallel(_linear(), device_id=torch.device("cpu")))
    return str(caught.value)


@pytest.mark.dist
def test_the_older_sharding_is_refused() -> None:
    assert "fully_shard" in run_ranks(_fsdp1, 1)[0]
