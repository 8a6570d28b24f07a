"""Muon over shards: ranks find the weights of one process, each sends its shards once each way, odd layouts refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.optimizers import same
from tests.support.ranks import run_ranks
from tests.support.traffic import bytes_sent
from torchboost.errors import IncompatibleError
from torchboost.optim.muon_groups import muon_groups
from torchboost.optim.rules.mixed import MixedOptimizer
from torchboost.optim.rules.muon import Muon

STEPS = 4
OPTIONS = {"lr": 0.05, "ns_dtype": torch.float32}


class Net(nn.Module):
    """Filters, uneven matrices, a stack of experts, tables and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 5, 3, padding=1)
        self.filters = nn.Conv2d(5, 7, 3, padding=1)
        self.wide, self.tall = nn.Linear(7, 33), nn.Linear(33, 6)
        self.experts = nn.Parameter(0.3 * torch.randn(3, 6, 6))
        self.same = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.filters(self.enter(x).relu()).relu().mean((2, 3))
        x = self.tall(self.wide(x).relu())
        x = torch.stack([x @ expert for expert in self.experts]).mean(0)
        for layer in self.same:
            x = x + layer(x).relu()
        return self.head(x)


def built(model: nn.Module, groups: Any = None) -> MixedOptimizer:
    groups = muon_groups(model, muon=OPTIONS, adamw={"lr": 0.01}) if groups is None else groups
    return MixedOptimizer(groups)


def fresh() -> Net:
    torch.manual_seed(0)
    return Net()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = slice(8 // ranks * rank, 8 // ranks * (rank + 1))
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        inputs, labels = torch.randn(8, 3, 4, 4, generator=draw), torch.randint(0, 4, (8,), generator=draw)
        nn.functional.cross_entropy(model(inputs[share]), labels[share]).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, list[float]]:
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {name: value.detach().flatten().tolist() for name, value in full.items()}


def rules_by_name(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The options of every parameter, found before the model is sharded."""
    groups = muon_groups(model, muon=OPTIONS, adamw={"lr": 0.01})
    keys = ("params", "param_names")
    return {n: {k: v for k, v in g.items() if k not in keys} for g in groups for n in g["param_names"]}


def by_name(model: nn.Module, options: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"params": [p], **options[name]} for name, p in model.named_parameters()]


def sharded() -> dict[str, list[float]]:
    model = fresh()
    options = rules_by_name(model)
    fully_shard(model)
    train(model, built(model, by_name(model, options)))
    return weights(model)


def replicated() -> dict[str, list[float]]:
    model = fresh()
    wrapped = DistributedDataParallel(model)
    train(wrapped, built(wrapped))
    return weights(model)


def zero() -> dict[str, list[float]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns about parts of itself

    model = fresh()
    groups = [dict(group) for group in muon_groups(model, muon=OPTIONS, adamw={"lr": 0.01})]
    for group in groups:
        del group["param_names"]
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=MixedOptimizer)
    train(wrapped, optimizer)
    return weights(model)


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", [sharded, replicated, zero], ids=lambda way: way.__name__)
def test_ranks_equal_one_process(way, ranks):
    model = fresh()
    train(model, built(model))
    alone = weights(model)
    found = run_ranks(way, ranks)
    for other in found:
        assert other == found[0]
        for name, values in alone.items():
            assert other[name] == pytest.approx(values, abs=1e-5), name


@pytest.mark.dist
def test_resuming_over_shards_is_bit_identical():
    assert run_ranks(resumed, 2) == [True, True]


def resumed() -> bool:
    model = fresh()
    options = rules_by_name(model)
    fully_shard(model)
    optimizer = built(model, by_name(model, options))
    train(model, optimizer, range(2))
    kept, state = [p.detach().clone() for p in model.parameters()], copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, STEPS))
    wanted = [p.to_local().clone() for p in model.parameters()]  # pyright: ignore
    other = built(model, by_name(model, options))
    with torch.no_grad():
        for param, value in zip(model.parameters(), kept, strict=True):
            param.copy_(value)
    other.load_state_dict(state)
    train(model, other, range(2, STEPS))
    return same([p.to_local() for p in model.parameters()], wanted)  # pyright: ignore


def traffic(dtype: torch.dtype) -> int:
    """Bytes of one step over two matrices of 64 x 96; each rank works on one of them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [nn.Parameter(distribute_tensor(torch.ones(64, 96), mesh, [Shard(0)])) for _ in range(2)]
    optimizer = Muon(params, ns_dtype=dtype)
    for param in params:
        param.grad = distribute_tensor(torch.randn(64, 96), mesh, [Shard(0)])
    optimizer.step()
    return bytes_sent(optimizer.step)


@pytest.mark.dist
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_each_rank_sends_its_shards_of_the_others_matrices_once_each_way(dtype, size):
    shard = 32 * 96 * size
    for sent in run_ranks(traffic, 2, dtype):
        assert 2 * shard <= sent < 2 * shard + 4096


def layouts() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    matrix = torch.randn(6, 8)
    both = nn.Parameter(distribute_tensor(matrix.clone(), mesh, [Shard(0), Shard(1)]))
    optimizer = Muon([both])
    both.grad = both.detach().clone()
    before = both.full_tensor().clone()
    with pytest.raises(IncompatibleError, match="divided along one axis") as caught:
        optimizer.step()
    assert torch.equal(both.full_tensor(), before)
    moved = []
    for placements in ([Replicate(), Shard(0)], [Shard(1), Replicate()], [Replicate(), Replicate()]):
        param = nn.Parameter(distribute_tensor(matrix.clone(), mesh, placements))
        param.grad = distribute_tensor(matrix.cos(), mesh, placements)
        Muon([param], ns_dtype=torch.float32).step()
        moved.append(param.full_tensor().detach())
    alone = nn.Parameter(matrix.clone())
    alone.grad = matrix.cos()
    Muon([alone], ns_dtype=torch.float32).step()
    for one in moved:
        torch.testing.assert_close(one, alone.detach(), rtol=1e-5, atol=1e-6)
    stack = nn.Parameter(distribute_tensor(torch.stack([matrix] * 4), mesh, [Replicate(), Shard(0)]))
    stack.grad = distribute_tensor(torch.stack([matrix.cos()] * 4), mesh, [Replicate(), Shard(0)])
    optimizer = Muon([stack], stacked=True, ns_dtype=torch.float32)
    assert bytes_sent(optimizer.step) < 1000  # each rank holds whole matrices
    torch.testing.assert_close(stack.full_tensor()[3], alone.detach(), rtol=1e-5, atol=1e-6)
    return [str(caught.value)]


@pytest.mark.dist
def test_layouts_of_two_dimensions():
    assert all("rule='adamw'" in text for (text,) in run_ranks(layouts, 4))
