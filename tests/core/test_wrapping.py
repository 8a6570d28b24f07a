"""Recognising wrapped models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.support.ranks import run_ranks
from torchboost.core.wrapping import is_compiled, unwrap, wrapper_of


def test_bare_module():
    model = nn.Linear(2, 2)
    assert wrapper_of(model) is None
    assert unwrap(model) is model


def test_compiled_module_object():
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    assert wrapper_of(compiled) == "torch.compile"
    assert unwrap(compiled) is model


def _sharded_the_old_way() -> str | None:
    return wrapper_of(nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))))


@pytest.mark.dist
def test_fsdp1_inside():
    assert run_ranks(_sharded_the_old_way, 2) == ["FullyShardedDataParallel"] * 2


def test_module_compiled_in_place():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].compile(backend="eager")
    assert wrapper_of(model) == "nn.Module.compile"
    assert unwrap(model) is model


def test_data_parallel_around_compiled():
    model = nn.Linear(2, 2)
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    assert wrapper_of(wrapped) == "DataParallel"
    assert unwrap(wrapped) is model


def test_compiled_parts_are_found_wherever_they_are():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not is_compiled(model)
    model[1].compile(backend="eager")
    assert is_compiled(model)
    assert is_compiled(torch.compile(nn.Linear(2, 2), backend="eager"))
