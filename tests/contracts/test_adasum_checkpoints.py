"""Checkpoints of AdaSum on ranks in nodes: on updates every node has an optimizer of its own, and gets it back."""

from __future__ import annotations

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

WAYS = [("bare", "delta"), ("ddp", "delta"), ("fsdp", "delta"), ("ddp", "gradient"), ("fsdp", "gradient")]
SAVED_AT, STEPS = 3, 6
Found = dict[tuple[str, str], tuple[list[list[float]], list[list[float]]]]


def started(how: str, on: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = node_wrapped(fresh(cnn), how, on, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, attach_all(Target(model, optimizer), [AdaptiveSum(on=on, devices_per_node=2)])


def buffers(model: nn.Module) -> list[list[float]]:
    return [buffer.flatten().tolist() for buffer in model.buffers()]


def trained(root: Path) -> Found:
    """Save on the way; return weights and statistics at the end."""
    found, like = {}, fresh(cnn)
    for how, on in WAYS:
        model, optimizer, attached = started(how, on)
        train(model, optimizer, SAVED_AT, like=like)
        checkpoint.save(root / f"{how} {on}", SAVED_AT, model, optimizer, boost=attached)
        train(model, optimizer, STEPS - SAVED_AT, first=SAVED_AT, like=like)
        found[how, on] = tensors(model), buffers(model)
    return found


def resumed(root: Path, ways: list[tuple[str, str]]) -> Found:
    found, like = {}, fresh(cnn)
    for how, on in ways:
        model, optimizer, attached = started(how, on)
        if how == "ddp":  # DDP's buckets are sorted anew after its first pass
            train(model, torch.optim.SGD(model.parameters(), lr=0.0), 1, like=like)
        newest = checkpoint.latest(root / f"{how} {on}")
        assert newest is not None
        checkpoint.load(newest, model, optimizer, boost=attached)
        train(model, optimizer, STEPS - SAVED_AT, first=SAVED_AT, like=like)
        found[how, on] = tensors(model), buffers(model)
    return found


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit_on_as_many_ranks(tmp_path):
    wanted = run_ranks(trained, 4, tmp_path)
    for way in (("bare", "delta"), ("ddp", "delta")):
        assert wanted[0][way][1] != wanted[2][way][1], "every node has its own statistics of BatchNorms"
    for rank, (before, after) in enumerate(zip(wanted, run_ranks(resumed, 4, tmp_path, WAYS), strict=True)):
        for how, on in WAYS:
            assert after[how, on][0] == before[how, on][0] == wanted[0][how, on][0], (rank, how, on)
            # FSDP2 exchanges no statistics: those of the first rank of its mesh are written.
            if how != "fsdp" or rank % 2 == 0:
                assert after[how, on][1] == before[how, on][1], (rank, how, on)
    with pytest.raises(RankError, match=r"optimizer's state differs between ranks 0, 2 .*Resume on 4 ranks"):
        run_ranks(resumed, 2, tmp_path, [("ddp", "delta")])
    run_ranks(resumed, 2, tmp_path, [("ddp", "gradient")])
