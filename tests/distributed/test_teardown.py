from __future__ import annotations

from datetime import timedelta
from time import monotonic

import pytest
import torch.distributed as dist

from tests.conftest import ROOT
from tests.support.ranks import run_ranks
from tests.support.torchrun import torchrun
from torchboost.distributed.agreement import own_store
from torchboost.distributed.topology import part, shutdown


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


def _parted_both_ways() -> list[float]:
    return [_parted(False), _parted(True)]


def _parted(alone: bool) -> float:
    gloo = dist.ProcessGroupGloo(own_store(f"parting {alone}", [0, 1]), dist.get_rank(), 2, timedelta(seconds=30))
    before = monotonic()
    if not alone or dist.get_rank():
        part(gloo, 0.5 if alone else 30.0)
    waited = monotonic() - before
    dist.barrier()
    return waited


@pytest.mark.dist
def test_ranks_part_together_and_one_alone_does_not_wait_for_ever():
    assert max(max(waited) for waited in run_ranks(_parted_both_ways, 2)) < 30
