from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from torchboost.distributed.shared import from_first_rank, is_first_rank, mean_over_ranks


def _mean() -> tuple[float, float]:
    own = torch.tensor(float(dist.get_rank()))
    return mean_over_ranks(own), float(own)


@pytest.mark.dist
def test_the_mean_of_two_ranks_and_the_number_is_left_alone():
    assert run_ranks(_mean, 2) == [(0.5, 0.0), (0.5, 1.0)]


def test_without_a_group_it_is_the_number():
    assert mean_over_ranks(torch.tensor(0.25)) == 0.25


def _first() -> tuple[str, bool]:
    return from_first_rank(f"of rank {dist.get_rank()}"), is_first_rank()


@pytest.mark.dist
def test_all_ranks_get_the_value_of_the_first():
    assert run_ranks(_first, 2) == [("of rank 0", True), ("of rank 0", False)]


def test_without_a_group_the_value_is_the_same_object():
    value = object()
    assert from_first_rank(value) is value
    assert is_first_rank()
