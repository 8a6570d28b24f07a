"""Ranks that differ, do not come or die are named on every rank that is alive, in time."""

from __future__ import annotations

import os
from functools import partial
from time import monotonic, sleep
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import run_ranks
from torchboost.distributed.agreement import Agreement
from torchboost.errors import RankDisagreementError

LIMIT = 4.0


def _alike() -> bool:
    everyone = Agreement(range(dist.get_world_size()), subject="a test")
    for step in range(3):
        everyone.check({"step": step, "seed": 2**62}, hint="Nothing to do.")
    everyone.close()
    everyone.close()
    again = Agreement(range(dist.get_world_size()), subject="a test")
    again.check({"step": 0}, hint="Nothing to do.")
    again.close()
    return True


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_agree_go_on_and_may_begin_again(ranks: int) -> None:
    assert run_ranks(_alike, ranks) == [True] * ranks


def _some_ranks() -> str:
    rank = dist.get_rank()
    pair = Agreement([0, 2] if rank % 2 == 0 else [1, 3], subject="a test")
    with pytest.raises(RankDisagreementError) as caught:
        pair.check({"step": rank // 2}, hint="Do so.")
    return str(caught.value)


@pytest.mark.dist
def test_those_that_differ_are_named_with_what_they_have() -> None:
    told = [f"a test: the ranks disagree: step is 0 on rank {r} and 1 on rank {r + 2}. Do so." for r in (0, 1)]
    assert run_ranks(_some_ranks, 4) == told * 2


def _late(who: int, how: str) -> tuple[str, float] | None:
    everyone = Agreement(range(dist.get_world_size()), subject="a test", timeout=LIMIT)
    everyone.check({"step": 6}, hint="")
    if dist.get_rank() == who:
        if how == "dies":
            os._exit(1)
        sleep(LIMIT + 2)
        return None
    begun = monotonic()
    with pytest.raises(RankDisagreementError) as caught:
        everyone.check({"step": 7}, hint="")
    took = monotonic() - begun
    with pytest.raises(RankDisagreementError, match="disagreed earlier"):
        everyone.check({"step": 7}, hint="")
    everyone.close()
    return str(caught.value), took


@pytest.mark.dist
@pytest.mark.parametrize("how", ["dies", "hangs"])
@pytest.mark.parametrize(("ranks", "who"), [(2, 0), (4, 2), (5, 1)])
def test_a_rank_that_does_not_come_is_named_on_all_others_in_time(ranks: int, who: int, how: str) -> None:
    answers = run_ranks(_late, ranks, who, how, dying=[who] if how == "dies" else [])
    assert answers.pop(who) is None
    for text, took in answers:
        assert f"rank {who} did not arrive (step 7 on rank" in text
        assert took < LIMIT, "a limit, not a speed"


def _both_die() -> str | None:
    everyone = Agreement(range(dist.get_world_size()), subject="a test", timeout=LIMIT)
    everyone.check({"step": 6}, hint="")
    if dist.get_rank() in (1, 2):
        os._exit(1)
    with pytest.raises(RankDisagreementError) as caught:
        everyone.check({"step": 7}, hint="")
    return str(caught.value)


@pytest.mark.dist
def test_of_several_silent_ranks_one_is_said_to_be_missing() -> None:
    first, _, _, last = run_ranks(_both_die, 4, dying=[1, 2])
    for text in (first, last):
        assert "at least one of ranks 1, 2 did not arrive" in text


def _absent_from_the_beginning() -> str:
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(RankDisagreementError) as caught:
        Agreement(range(2), subject="a test", timeout=2.0)
    return str(caught.value)


@pytest.mark.dist
def test_a_rank_that_does_not_begin_is_an_error_on_the_others() -> None:
    assert "not all of them started within 2 s" in run_ranks(_absent_from_the_beginning, 2)[0]


def _different(how: str) -> tuple[str, list[float]]:
    rank = dist.get_rank()
    everyone = Agreement(range(dist.get_world_size()), subject="a test", timeout=LIMIT)
    assert everyone.largest([float(n * rank) for n in range(40)], step="a long one")[-1] == 39 * 2
    act = partial(everyone.largest, [1.0] * (20 if how == "length" and rank == 1 else 2), step="a step")
    if how == "check" and rank == 1:
        act = partial(everyone.check, {"a step": 3}, hint="")
    with pytest.raises(RankDisagreementError) as caught:
        act()
    after = everyone.largest([rank], step="the same")
    everyone.close()
    return str(caught.value), after


@pytest.mark.dist
@pytest.mark.parametrize("how", ["length", "check"])
def test_ranks_that_compare_different_things_are_an_error_on_all(how: str) -> None:
    for rank, (said, after) in enumerate(run_ranks(_different, 3, how)):
        assert f"different things; rank {rank} has {20 if (how, rank) == ('length', 1) else 2} numbers" in said
        assert after == [2.0]


class Counted:
    """A group that notes to whom it sends."""

    def __init__(self, group: Any) -> None:
        self.group, self.sent = group, []

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        self.sent.append((to, sum(tensor.nbytes for tensor in tensors)))
        return self.group.send(tensors, to, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


def _messages() -> list[tuple[int, int]]:
    everyone = Agreement(range(dist.get_world_size()), subject="a test")
    group = Counted(everyone._groups[0])
    everyone._groups[0] = group
    everyone.check({"step": 1, "seed": 2}, hint="")
    assert everyone.largest([dist.get_rank(), float("inf")], step="") == [dist.get_world_size() - 1, float("inf")]
    everyone.close()
    return group.sent


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [3, 8])
def test_messages_grow_with_the_logarithm_of_the_ranks(ranks: int) -> None:
    for rank, sent in enumerate(run_ranks(_messages, ranks)):
        to = [(rank + step) % ranks for step in (1, 2, 4) if step < ranks]
        assert sent == [(other, 16 * 8) for other in to] * 2


def test_of_many_ranks_those_that_are_silent_are_found() -> None:
    everyone = object.__new__(Agreement)
    everyone._ranks, everyone._calls, everyone._store = list(range(200)), 1, dist.HashStore()
    here = [rank for rank in everyone._ranks if rank not in (0, 62, 131, 199)]
    for rank in here:
        everyone._here(1 << rank % 62, rank // 62)
    assert everyone._silent() == [0, 62, 131, 199]
