"""Where a rank stands among the others, and how ranks part."""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
import torch.distributed as dist

from tests.conftest import ROOT
from tests.support.ranks import run_ranks
from tests.support.torchrun import torchrun
from torchboost import IncompatibleError, NodeGroups, Topology, shutdown
from torchboost.distributed.agreement import own_store
from torchboost.distributed.topology import part


def here(devices_per_node: int | None = None) -> tuple[int, int, int, int]:
    topology = Topology.current(devices_per_node)
    return topology.rank, topology.world_size, topology.devices_per_node, topology.nodes


def here_in_all_ways() -> list[tuple[int, int, int, int]]:
    with pytest.MonkeyPatch.context() as patch:
        ways = [here(), here(1), here(8)]
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        return [*ways, here()]


def test_nodes_are_rounded_up():
    for world_size, per_node, nodes in ((1, 1, 1), (8, 8, 1), (8, 4, 2), (9, 4, 3), (3, 8, 1)):
        assert Topology(world_size=world_size, devices_per_node=per_node).nodes == nodes


def test_a_single_process_is_one_rank_on_one_node():
    assert Topology.current() == Topology()
    assert here(8) == (0, 1, 1, 1)


def test_the_ranks_of_a_node_and_whole_nodes():
    assert [list(Topology(rank=r, world_size=5, devices_per_node=2).node) for r in (0, 3, 4)] == [[0, 1], [2, 3], [4]]
    Topology(world_size=4, devices_per_node=2).check_full()
    with pytest.raises(IncompatibleError, match=r"found nodes of 2 ranks, and 5 ranks in total; start the same number"):
        Topology(world_size=5, devices_per_node=2).check_full()


def of_three_ranks() -> tuple[list[Any], str]:
    return [members(per_node) for per_node in (3, 1)], refused(2)


def of_four_ranks(sizes: list[int]) -> tuple[list[Any], str]:
    return [members(2)], refused_by_the_launchers_numbers(sizes)


def members(per_node: int) -> tuple[list[int], list[int]]:
    groups = NodeGroups.of(Topology.current(per_node))
    found = [dist.get_process_group_ranks(group) for group in (groups.inside, groups.across)]
    dist.barrier()
    return found[0], found[1]


def refused(per_node: int) -> str:
    with pytest.raises(IncompatibleError) as error:
        NodeGroups.of(Topology.current(per_node))
    return str(error.value)


def refused_by_the_launchers_numbers(sizes: list[int]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(sizes[dist.get_rank()]))
        with pytest.raises(IncompatibleError) as error:
            NodeGroups.of(Topology.current())
    return str(error.value)


@pytest.mark.dist
def test_a_rank_belongs_to_its_node_and_its_place_in_every_node_and_other_nodes_are_refused_on_all_ranks():
    three, four = run_ranks(of_three_ranks, 3), run_ranks(of_four_ranks, 4, [3, 3, 3, 1], timeout=20.0)
    for answers, layouts, message in (
        (
            three,
            (3, 1),
            "found nodes of 2 ranks, and 3 ranks in total; start the same number of ranks on every node, or set "
            "common.device_number to a number that divides them all.",
        ),
        (
            four,
            (2,),
            "found nodes of 1 and 3 ranks, and 4 ranks in total; start the same number of ranks on every node, or set "
            "common.device_number to a number that divides them all.",
        ),
    ):
        for rank, (groups, error) in enumerate(answers):
            assert error == message
            for per_node, (inside, across) in zip(layouts, groups, strict=True):
                node, place = divmod(rank, per_node)
                assert inside == [node * per_node + i for i in range(per_node)]
                assert across == list(range(place, len(answers), per_node))


@pytest.mark.dist
@pytest.mark.parametrize("way", ["shutdown", "agreement"])
@pytest.mark.parametrize("jobs", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_ranks_end_without_an_abort_right_after_a_collective(tmp_path, way, jobs):
    """Of ten jobs 2 failed with ``destroy_process_group`` instead, 6 when a group for agreement stayed open."""
    for job in range(jobs):
        folder = tmp_path / str(job)
        folder.mkdir()
        torchrun(ROOT / "tests" / "support" / "endings.py", folder, way, ranks=2, timeout=120)
        assert sorted(said.name for said in folder.iterdir()) == ["0.txt", "1.txt"]


def test_shutdown_does_nothing_without_a_process_group():
    assert not dist.is_initialized()
    shutdown()


def _parted(alone: bool) -> float:
    gloo = dist.ProcessGroupGloo(own_store(f"parting {alone}", [0, 1]), dist.get_rank(), 2, timedelta(seconds=30))
    before = monotonic()
    if not alone or dist.get_rank():
        part(gloo, 0.5 if alone else 30.0)
    waited = monotonic() - before
    dist.barrier()
    return waited


def _of_two_ranks() -> tuple[list[tuple[int, int, int, int]], float]:
    return here_in_all_ways(), max(_parted(alone) for alone in (False, True))


@pytest.mark.dist
def test_two_ranks_share_one_node_unless_they_are_told_otherwise_and_part_together_or_alone():
    """The caller or the launcher may say otherwise. A rank that parts alone does not wait for ever."""
    for rank, (ways, waited) in enumerate(run_ranks(_of_two_ranks, 2)):
        assert ways == [(rank, 2, 2, 1), (rank, 2, 1, 2), (rank, 2, 2, 1), (rank, 2, 1, 2)]
        assert waited < 30
