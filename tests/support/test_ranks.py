from __future__ import annotations

import faulthandler
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, run_ranks

pytestmark = pytest.mark.dist


def rank_and_sum(offset: int) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), torch.get_num_threads(), total


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("this rank is broken")
    dist.barrier()


def sleep_on_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def die() -> None:
    os._exit(3)


def crash() -> None:
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


def crash_once(mark: str) -> int:
    if dist.get_rank() == 1 and not os.path.exists(mark):
        open(mark, "w").close()
        crash()
    dist.barrier()
    return dist.get_rank()


def unpicklable() -> object:
    return lambda: None


def test_results_come_in_rank_order_and_tensors_survive_their_rank():
    before = dict(os.environ)
    results = run_ranks(rank_and_sum, 2, 10)
    assert dict(os.environ) == before
    assert [rank for rank, _, _ in results] == [0, 1]
    assert [threads for _, threads, _ in results] == [1, 1]
    assert [total.item() for _, _, total in results] == [21.0, 21.0]


def test_the_cause_is_reported_not_its_consequences():
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*this rank is broken"):
        run_ranks(fail_on_rank_one, 2)
    with pytest.raises(RankError, match="rank 0 ended without an answer, with exit code 3"):
        run_ranks(die, 1)
    with pytest.raises(RankError, match=r"(?s)rank 0 failed.*pickle"):
        run_ranks(unpicklable, 1)


def test_a_silent_rank_is_killed_and_named():
    with pytest.raises(RankError, match=r"did not answer within 3 s|rank 0 failed"):
        run_ranks(sleep_on_rank_one, 2, timeout=3)


def test_ranks_are_started_once_more_if_a_signal_ends_one(tmp_path):
    with pytest.warns(UserWarning, match="a signal ended a rank.*SIGSEGV"):
        assert run_ranks(crash_once, 2, str(tmp_path / "crashed")) == [0, 1]
    with pytest.warns(UserWarning, match="a signal ended a rank"), pytest.raises(RankError, match="SIGSEGV"):
        run_ranks(crash, 1)
