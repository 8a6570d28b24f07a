from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks
from torchboost.distributed.store import own_store


def _heard(uses: list[tuple[str, list[int]]]) -> list[list[str]]:
    """Say where one stands in each use, and listen to the others there."""
    rank, found = dist.get_rank(), []
    for number, (purpose, ranks) in enumerate(uses):
        if rank in ranks:
            store = own_store(purpose, ranks)
            store.set(f"said/{rank}", f"{purpose} {number}")
            found.append([store.get(f"said/{other}").decode() for other in ranks])
    return found


@pytest.mark.dist
def test_each_use_has_room_of_its_own_and_takes_only_the_ranks_it_is_for():
    uses = [("a", [0, 1]), ("a", [1, 2]), ("a", [0, 1]), ("b", [0, 1]), ("a", [0, 1, 2])]
    first, second, third = run_ranks(_heard, 3, uses)
    assert first == [["a 0"] * 2, ["a 2"] * 2, ["b 3"] * 2, ["a 4"] * 3]
    assert second == [["a 0"] * 2, ["a 1"] * 2, ["a 2"] * 2, ["b 3"] * 2, ["a 4"] * 3]
    assert third == [["a 1"] * 2, ["a 4"] * 3]
