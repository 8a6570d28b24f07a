"""Wrapped models and optimizers are recognised, and which ranks a wrapping averages over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tests.support.models import mlp
from tests.support.ranks import run_ranks
from torchboost import IncompatibleError, NodeGroups, Topology
from torchboost.core.torch_private import compiled_call
from torchboost.core.wrapping import (
    already_wrapped,
    check_mesh,
    check_ranks,
    compiled_parts,
    data_parallel,
    hookable,
    is_compiled,
    living,
    sharded_units,
    unwrap,
    wrapper_of,
)

SGD = torch.optim.SGD


class Around(torch.optim.Optimizer):
    """An optimizer by class only, as those of Accelerate and timm."""

    def __init__(self, *inside: torch.optim.Optimizer, registries: bool = False) -> None:
        for place, one in enumerate(inside):
            setattr(self, f"part_{place}", one)
        if registries:
            vars(self).update({name: {} for name in vars(SGD([nn.Parameter(torch.ones(1))])) if "hooks" in name})

    def step(self, closure=None):
        return self.part_0.step(closure)


def test_the_optimizer_whose_hooks_are_called():
    inner = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(inner)
    # Registries alone do not make hooks run.
    for outer in (inner, Around(inner), Around(Around(inner)), Around(inner, registries=True)):
        assert hookable(outer) is inner
    for count in (0, 2):
        parts = [SGD([nn.Parameter(torch.ones(1))]) for _ in range(count)]
        with pytest.raises(IncompatibleError, match=f"Around does not call the hooks .* and holds {count} optimizers"):
            hookable(Around(*parts))


def test_a_wrapper_is_named_and_taken_off():
    model, inside = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    inside[0].compile(backend="eager")
    compiled = torch.compile(model, backend="eager")
    for outer, name, bare, parts in (
        (model, None, model, []),
        (compiled, "torch.compile", model, [model]),
        (inside, "nn.Module.compile", inside, [compiled_call(inside[0])]),
        (nn.DataParallel(compiled), "DataParallel", model, [model]),
    ):
        assert wrapper_of(outer) == name
        assert unwrap(outer) is bare
        assert compiled_parts(outer) == parts
        assert is_compiled(outer) is bool(parts)


def test_the_error_says_how_the_lines_must_follow_each_other():
    assert str(already_wrapped("net", "fully_shard", "boost")) == (
        "the net is already wrapped by fully_shard; call plan = torchboost.prepare(net, ...) before that, build the "
        "optimizer after it, then call plan.attach(torchboost.Target(net, optimizer))."
    )
    assert "pass the bare net, and wrap what is returned" in str(already_wrapped("net", "torch.compile", "boost"))


def test_the_units_that_fsdp2_shards_are_found(one_rank):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert sharded_units(model) == []
    fully_shard(model[1])
    assert sharded_units(model) == [model[1]]


def test_a_bare_model_averages_over_nothing_and_data_parallel_is_refused():
    assert data_parallel(mlp()) is None
    check_mesh(mlp(), Topology())
    with pytest.raises(IncompatibleError, match="DataParallel, which is not supported; use"):
        data_parallel(DataParallel(mlp()))


def refusal(call: Any, *arguments: Any) -> str:
    with pytest.raises(IncompatibleError) as error:
        call(*arguments)
    return str(error.value)


def look() -> tuple[bool, list[str], str | None]:
    topology = Topology.current(2)
    ddp = DistributedDataParallel(mlp(), process_group=NodeGroups.of(topology).inside)
    found = data_parallel(ddp) is ddp and data_parallel(torch.compile(ddp, backend="eager")) is ddp  # pyright: ignore
    check_ranks(ddp, topology.node, "fine.")
    said = [refusal(check_ranks, ddp, range(4), "build another.")]
    said.append(refusal(data_parallel, nn.Sequential(ddp, DistributedDataParallel(mlp()))))
    mesh: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    model = nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=mesh["shard"]), nn.Tanh())
    check_mesh(fully_shard(model, mesh=mesh["shard"]), topology)
    said.append(refusal(check_mesh, model, Topology.current(1)))
    old = nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
    return found, said, wrapper_of(old)


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")
def test_ranks_and_meshes_are_read_from_the_wrapping():
    for found, said, old in run_ranks(look, 4):
        assert found
        assert said[0] == "DistributedDataParallel averages the gradients over 2 ranks; build another."
        assert "2 modules are wrapped by DistributedDataParallel, '0' and '1'; wrap the whole model once" in said[1]
        assert "'0.weight' lies on a mesh of shape (2,)" in said[2]
        assert said[2].endswith("over the 1 ranks of a node.")
        assert old == "FullyShardedDataParallel"


class Base:
    def __init__(self) -> None:
        self.held: list[Any] = []  # the collector knows objects that hold others


class Derived(Base):
    pass


class Pretends:
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")


def test_objects_of_a_class_and_of_its_subclasses_are_found_without_running_their_code() -> None:
    assert living(Base) == []
    first, second, other = Base(), Derived(), Pretends()
    assert {id(found) for found in living(Base)} == {id(first), id(second)}
    assert living(Derived) == [second]
    del second
    assert living(Derived) == []
    assert other is not None
