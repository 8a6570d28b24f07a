from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from torchboost.distributed.checkpoint.copies import bit_sum, first_holder

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


def holders(odd: list[int], what: str) -> int:
    rank = dist.get_rank()
    return first_holder(changed(what) if rank in odd else STATE, [rank])


@pytest.mark.dist
def test_what_differs_has_another_holder():
    for what in ("one bit", "sign of a zero", "shape", "precision", "a number", "a name"):
        assert run_ranks(holders, 4, [1, 3], what) == [0, 1, 0, 1], what
    assert run_ranks(holders, 3, [1], "order of the names") == [0, 0, 0]
    assert run_ranks(holders, 2, [], "") == [0, 0]


def sharded(odd: list[int]) -> int:
    """Two nodes, each of which holds one state in two shards."""
    rank = dist.get_rank()
    first = rank - rank % 2
    shard = {"shard": torch.full((2,), float(rank % 2 + 2 * (rank in odd)))}
    return first_holder(shard, [first, first + 1])


@pytest.mark.dist
@pytest.mark.parametrize(("odd", "wanted"), [([], [0, 0, 0, 0]), ([3], [0, 0, 2, 2]), ([0, 2], [0, 0, 0, 0])])
def test_shards_are_compared_as_the_whole_they_make(odd, wanted):
    assert run_ranks(sharded, 4, odd) == wanted


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
