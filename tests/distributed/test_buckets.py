"""Buckets of DDP at positions in the list of parameters, read from DDP's own log."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.versions import needs_bucket_sizes
from torchboost import IncompatibleError
from torchboost.distributed import buckets
from torchboost.distributed.buckets import bucket_options


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(6)))


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sizes(model: nn.Module, options: dict) -> list[int]:
    """Return the bytes of the buckets, the last layers first."""
    wrapped = DistributedDataParallel(model, **options)
    for _ in range(3):  # the log is a pass behind
        wrapped(torch.ones(2, 5)).sum().backward()
    return [int(size) for size in wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")]


@needs_bucket_sizes
@pytest.mark.usefixtures("group")
def test_a_bucket_begins_at_each_position():
    for points, layers in (([1, 4], [2, 3, 1]), ([2], [4, 2]), ([1, 2, 3, 4, 5], [1] * 6), ([50], [6]), ([], [6])):
        model = network()
        assert sizes(model, bucket_options(list(model.parameters()), points)) == [100 * count for count in layers]


@needs_bucket_sizes
def test_parameters_of_several_types_are_refused():
    mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))]
    with pytest.raises(IncompatibleError, match=r"float32 on cpu, torch\.float64 on cpu"):
        bucket_options(mixed, [1])


def test_a_torch_without_such_an_argument_is_refused(monkeypatch):
    monkeypatch.setattr(buckets, "_ARGUMENT", "no_such_argument")
    with pytest.raises(IncompatibleError, match="has no no_such_argument"):
        bucket_options(list(network().parameters()), [1])
