"""Which ranks a wrapped model averages over, read from the wrapping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tests.support.models import mlp
from tests.support.ranks import run_ranks
from torchboost.core.wrapping import check_mesh, check_ranks, data_parallel, unhooked_units
from torchboost.distributed.topology import NodeGroups, Topology
from torchboost.errors import IncompatibleError


def test_a_bare_model_averages_over_nothing():
    assert data_parallel(mlp()) is None
    assert check_mesh(mlp(), Topology()) is False
    assert unhooked_units(mlp()) == {}


def test_data_parallel_of_one_process_is_refused():
    with pytest.raises(IncompatibleError, match="DataParallel, which is not supported; use"):
        data_parallel(DataParallel(mlp()))


def look() -> tuple[bool, list[str], list[str]]:
    topology = Topology.current(2)
    ddp = DistributedDataParallel(mlp(), process_group=NodeGroups.of(topology).inside)
    found = data_parallel(ddp) is ddp and data_parallel(torch.compile(ddp, backend="eager")) is ddp  # pyright: ignore
    check_ranks(ddp, topology.node, "fine.")
    said = []
    try:
        check_ranks(ddp, range(4), "build another.")
    except IncompatibleError as error:
        said.append(str(error))
    try:
        data_parallel(nn.Sequential(ddp, DistributedDataParallel(mlp())))
    except IncompatibleError as error:
        said.append(str(error))
    mesh: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    model = nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=mesh["shard"]), nn.Tanh())
    assert check_mesh(fully_shard(model, mesh=mesh["shard"]), topology)
    try:
        check_mesh(model, Topology.current(1))
    except IncompatibleError as error:
        said.append(str(error))
    return found, said, list(unhooked_units(model))


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")
def test_ranks_and_meshes_are_read_from_the_wrapping():
    for found, said, units in run_ranks(look, 4):
        assert found
        assert said[0] == "DistributedDataParallel averages the gradients over 2 ranks; build another."
        assert "2 modules are wrapped by DistributedDataParallel, '0' and '1'; wrap the whole model once" in said[1]
        assert "'0.weight' lies on a mesh of shape (2,)" in said[2]
        assert said[2].endswith("over the 1 ranks of a node.")
        assert units == ["0"]
