"""Checkpoints of AdaSum on ranks in nodes: on updates every node has an optimizer of its own, and gets it back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import cnn
from tests.support.nodes import fresh, node_wrapped, tensors, train
from tests.support.ranks import RankError, run_ranks
from torchboost.algorithms import AdaptiveSum
from torchboost.core import Target, attach_all
from torchboost.distributed import checkpoint

pytestmark = pytest.mark.dist

WAYS = ("bare", "ddp", "fsdp")
SAVED_AT, STEPS = 3, 6
Found = dict[str, tuple[list[list[float]], list[list[float]]]]


def started(how: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = node_wrapped(fresh(cnn), how, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, attach_all(Target(model, optimizer), [AdaptiveSum(devices_per_node=2)])


def buffers(model: nn.Module) -> list[list[float]]:
    return [buffer.flatten().tolist() for buffer in model.buffers()]


def trained(root: Path) -> Found:
    """Save on the way; return weights and statistics at the end."""
    found, like = {}, fresh(cnn)
    for how in WAYS:
        model, optimizer, attached = started(how)
        train(model, optimizer, SAVED_AT, like=like)
        checkpoint.save(root / how, SAVED_AT, model, optimizer, boost=attached)
        train(model, optimizer, STEPS - SAVED_AT, first=SAVED_AT, like=like)
        found[how] = tensors(model), buffers(model)
    return found


def resumed(root: Path, ways: Sequence[str]) -> Found:
    found, like = {}, fresh(cnn)
    for how in ways:
        model, optimizer, attached = started(how)
        if how == "ddp":  # DDP's buckets are sorted anew after its first pass
            train(model, torch.optim.SGD(model.parameters(), lr=0.0), 1, like=like)
        newest = checkpoint.latest(root / how)
        assert newest is not None
        checkpoint.load(newest, model, optimizer, boost=attached)
        train(model, optimizer, STEPS - SAVED_AT, first=SAVED_AT, like=like)
        found[how] = tensors(model), buffers(model)
    return found


def trained_and_resumed(root: Path) -> tuple[Found, Found]:
    return trained(root), resumed(root, WAYS)


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit_on_as_many_ranks(tmp_path):
    runs = run_ranks(trained_and_resumed, 4, tmp_path)
    for way in ("bare", "ddp"):
        assert runs[0][0][way][1] != runs[2][0][way][1], "every node has its own statistics of BatchNorms"
    for rank, (before, after) in enumerate(runs):
        for how in WAYS:
            assert after[how][0] == before[how][0] == runs[0][0][how][0], (rank, how)
            # FSDP2 exchanges no statistics: those of the first rank of its mesh are written.
            if how != "fsdp" or rank % 2 == 0:
                assert after[how][1] == before[how][1], (rank, how)
    with pytest.raises(RankError, match=r"optimizer's state differs between ranks 0, 2 .*Resume on 4 ranks"):
        run_ranks(resumed, 2, tmp_path, ["ddp"])
