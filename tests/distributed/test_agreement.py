"""Ranks that differ, do not come or die are named on every rank that is alive, in time."""

from __future__ import annotations

import copy
import os
import pickle
from functools import partial
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import run_ranks
from torchboost.distributed.agreement import (
    Agreement,
    bit_sum,
    first_holder,
    from_first_rank,
    mean_over_ranks,
    own_store,
)
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


def _of_four() -> tuple[bool, str, list[int]]:
    return _alike(), _some_ranks(), sharded([[], [3], [0, 2]])


@pytest.mark.dist
def test_four_ranks_agree_and_begin_again_are_told_where_they_differ_and_compare_shards_as_a_whole() -> None:
    alike, told, holders_of_shards = zip(*run_ranks(_of_four, 4), strict=True)
    assert all(alike)
    assert (
        list(told)
        == [f"a test: the ranks disagree: step is 0 on rank {r} and 1 on rank {r + 2}. Do so." for r in (0, 1)] * 2
    )
    assert [list(of) for of in zip(*holders_of_shards, strict=True)] == [[0] * 4, [0, 0, 2, 2], [0] * 4]


def _some_ranks() -> str:
    rank = dist.get_rank()
    pair = Agreement([0, 2] if rank % 2 == 0 else [1, 3], subject="a test")
    with pytest.raises(RankDisagreementError) as caught:
        pair.check({"step": rank // 2}, hint="Do so.")
    return str(caught.value)


def _late(who: int, how: str) -> tuple[str, float] | None:
    everyone = Agreement(range(dist.get_world_size()), subject="a test", timeout=LIMIT)
    everyone.check({"step": 6}, hint="")
    if dist.get_rank() == who:
        if how == "dies":
            os._exit(1)
        dist.barrier()  # not here until all others were told
        return None
    begun = monotonic()
    with pytest.raises(RankDisagreementError) as caught:
        everyone.check({"step": 7}, hint="")
    took = monotonic() - begun
    with pytest.raises(RankDisagreementError, match="disagreed earlier"):
        everyone.check({"step": 7}, hint="")
    everyone.close()
    if how != "dies":
        dist.barrier()
    return str(caught.value), took


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "who", "how"), [(2, 0, "dies"), (5, 1, "stays away")])
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
        Agreement(range(2), subject="a test", timeout=1.0)
    return str(caught.value)


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
def test_messages_grow_with_the_logarithm_of_the_ranks() -> None:
    ranks = 5
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


def _shared() -> tuple[float, float, str]:
    own = torch.tensor(float(dist.get_rank()))
    return mean_over_ranks(own), float(own), from_first_rank(f"of rank {dist.get_rank()}")


CHANGES = ("one bit", "sign of a zero", "shape", "precision", "a number", "a name", "order of the names")


def _of_two() -> tuple[Any, list[int], str]:
    return _shared(), holders(CHANGES), _absent_from_the_beginning()


@pytest.mark.dist
def test_two_ranks_share_a_mean_what_differs_has_another_holder_and_one_that_does_not_begin_is_an_error():
    shared, held, absent = zip(*run_ranks(_of_two, 2), strict=True)
    assert "not all of them started within 1 s" in absent[0]
    assert list(shared) == [(0.5, 0.0, "of rank 0"), (0.5, 1.0, "of rank 0")]
    assert list(held) == [[0] * 7, [1] * 6 + [0]]


def test_without_a_group_they_are_those_of_the_process():
    value = object()
    assert from_first_rank(value) is value
    assert mean_over_ranks(torch.tensor(0.25)) == 0.25


def _heard(uses: list[tuple[str, list[int]]]) -> list[list[str]]:
    """Say where one stands in each use, and listen to the others there."""
    rank, found = dist.get_rank(), []
    for number, (purpose, ranks) in enumerate(uses):
        if rank in ranks:
            store = own_store(purpose, ranks)
            store.set(f"said/{rank}", f"{purpose} {number}")
            found.append([store.get(f"said/{other}").decode() for other in ranks])
    return found


def _of_three(uses: list[tuple[str, list[int]]]) -> tuple[list[list[str]], dict[str, tuple[str, list[float]]]]:
    return _heard(uses), {how: _different(how) for how in ("length", "check")}


@pytest.mark.dist
def test_uses_have_rooms_of_their_own_and_comparing_different_things_is_an_error_on_all_of_three_ranks():
    uses = [("a", [0, 1]), ("a", [1, 2]), ("a", [0, 1]), ("b", [0, 1]), ("a", [0, 1, 2])]
    (first, second, third), different = zip(*run_ranks(_of_three, 3, uses), strict=True)
    for rank, errors in enumerate(different):
        for how, (said, after) in errors.items():
            assert f"different things; rank {rank} has {20 if (how, rank) == ('length', 1) else 2} numbers" in said
            assert after == [2.0]
    assert first == [["a 0"] * 2, ["a 2"] * 2, ["b 3"] * 2, ["a 4"] * 3]
    assert second == [["a 0"] * 2, ["a 1"] * 2, ["a 2"] * 2, ["b 3"] * 2, ["a 4"] * 3]
    assert third == [["a 1"] * 2, ["a 4"] * 3]


STATE: dict[str, Any] = {
    "weight": {"step": torch.tensor(3.0), "exp_avg": torch.arange(12.0).reshape(3, 4).T, "empty": torch.empty(0, 2)},
    "half": [torch.ones(3).bfloat16(), torch.ones(3, dtype=torch.bool), torch.ones(2, dtype=torch.complex128)],
    "plain": (0.1, float("nan"), None, "name", object),
}


def changed(what: str) -> dict[str, Any]:
    state = copy.deepcopy(STATE)
    if what == "one bit":
        state["weight"]["exp_avg"].view(torch.int32)[0, 0] += 1
    elif what == "sign of a zero":
        state["weight"]["exp_avg"][0, 0] = -0.0
    elif what == "shape":
        state["weight"]["exp_avg"] = state["weight"]["exp_avg"].reshape(-1)
    elif what == "precision":
        state["half"][0] = state["half"][0].float()
    elif what == "a number":
        state["plain"] = (0.2, *state["plain"][1:])
    elif what == "a name":
        state["half "] = state.pop("half")
    elif what == "order of the names":
        state = dict(reversed(state.items()))
    return state


def holders(changes: tuple[str, ...]) -> list[int]:
    rank = dist.get_rank()
    return [first_holder(changed(what) if rank else STATE, [rank]) for what in changes]


def sharded(cases: list[list[int]]) -> list[int]:
    """Two nodes, each of which holds one state in two shards."""
    rank = dist.get_rank()
    first = rank - rank % 2
    shards = [{"shard": torch.full((2,), float(rank % 2 + 2 * (rank in odd)))} for odd in cases]
    return [first_holder(shard, [first, first + 1]) for shard in shards]


def bytes_told(shards: int) -> int:
    """Return how many bytes a rank tells the others about a state in so many shards."""
    told: list[int] = []

    def gather(said: list[Any], own: Any) -> None:
        told.append(len(pickle.dumps(own)))
        said[:] = [own] * len(said)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda: shards)
        patch.setattr(dist, "get_rank", lambda: 0)
        patch.setattr(dist, "all_gather_object", gather)
        assert first_holder(STATE, list(range(shards))) == 0
    return told[0]


def test_what_is_told_of_shards_does_not_grow_with_their_number():
    assert bytes_told(1024) <= bytes_told(2) + 8


def test_the_sum_of_the_bits_is_the_same_in_any_order():
    numbers = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    total = int(bit_sum(numbers))
    assert total == sum(numbers.view(torch.int32).tolist())
    assert int(bit_sum(numbers.flip(0))) == total
    assert int(bit_sum(numbers[1:].reshape(2, -1).t())) == total - int(bit_sum(numbers[:1]))
    assert bit_sum(torch.empty(0, 3)).tolist() == 0
    assert bit_sum(torch.tensor(torch.nan)) == bit_sum(torch.tensor(torch.nan)) != bit_sum(torch.tensor(0.0))
