from __future__ import annotations

import dataclasses

import pytest

from tests.support.ranks import run_ranks
from torchboost.distributed.topology import Topology
from torchboost.errors import IncompatibleError


def here(devices_per_node: int | None = None) -> tuple[int, int, int, int]:
    topology = Topology.current(devices_per_node)
    return topology.rank, topology.world_size, topology.devices_per_node, topology.nodes


def here_under_a_launcher() -> tuple[int, int, int, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        return here()


@pytest.mark.parametrize(("world_size", "per_node", "nodes"), [(1, 1, 1), (8, 8, 1), (8, 4, 2), (9, 4, 3), (3, 8, 1)])
def test_nodes_are_rounded_up(world_size, per_node, nodes):
    assert Topology(world_size=world_size, devices_per_node=per_node).nodes == nodes


def test_a_single_process_is_one_rank_on_one_node():
    assert Topology.current() == Topology()
    assert here(8) == (0, 1, 1, 1)


def test_a_topology_is_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Topology().rank = 1


@pytest.mark.dist
def test_ranks_share_one_node_unless_told_otherwise():
    assert run_ranks(here, 2) == [(0, 2, 2, 1), (1, 2, 2, 1)]


@pytest.mark.dist
def test_devices_per_node_make_nodes_and_never_exceed_the_ranks():
    assert run_ranks(here, 2, 1) == [(0, 2, 1, 2), (1, 2, 1, 2)]
    assert run_ranks(here, 2, 8) == [(0, 2, 2, 1), (1, 2, 2, 1)]


@pytest.mark.dist
def test_the_launcher_says_how_many_ranks_a_node_has():
    assert run_ranks(here_under_a_launcher, 2) == [(0, 2, 1, 2), (1, 2, 1, 2)]


def test_the_ranks_of_a_node_and_whole_nodes():
    assert [list(Topology(rank=r, world_size=5, devices_per_node=2).node) for r in (0, 3, 4)] == [[0, 1], [2, 3], [4]]
    Topology(world_size=4, devices_per_node=2).check_full()
    with pytest.raises(IncompatibleError, match=r"found 5 ranks in nodes of 2, .* not full; start the same number"):
        Topology(world_size=5, devices_per_node=2).check_full()
