"""Checkpoints of AdaSum on ranks in nodes: on updates every node has an optimizer of its own, and gets it back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import cnn, mlp
from tests.support.nodes import fresh, node_wrapped, tensors, train
from tests.support.ranks import RankError, run_ranks
from torchboost.algorithms.adaptive_sum.algorithm import AdaptiveSum
from torchboost.core.algorithm import Target, attach_all
from torchboost.distributed import checkpoint

pytestmark = pytest.mark.dist

WAYS = [("bare", "delta"), ("ddp", "delta"), ("fsdp", "delta"), ("ddp", "gradient"), ("fsdp", "gradient")]
SAVED_AT, STEPS = 3, 6


def started(how: str, on: Any, make: Callable[[], nn.Module] = mlp) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = node_wrapped(fresh(make), how, on, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, attach_all(Target(model, optimizer), [AdaptiveSum(on=on, devices_per_node=2)])


def trained(root: Path) -> dict[tuple[str, str], list[list[float]]]:
    found = {}
    for how, on in WAYS:
        model, optimizer, attached = started(how, on)
        train(model, optimizer, SAVED_AT)
        checkpoint.save(root / f"{how} {on}", SAVED_AT, model, optimizer, boost=attached)
        train(model, optimizer, STEPS - SAVED_AT, first=SAVED_AT)
        found[how, on] = tensors(model)
    return found


def resumed(root: Path, ways: list[tuple[str, str]]) -> dict[tuple[str, str], list[list[float]]]:
    found = {}
    for how, on in ways:
        model, optimizer, attached = started(how, on)
        if how == "ddp":  # DDP's buckets are sorted anew after its first pass
            train(model, torch.optim.SGD(model.parameters(), lr=0.0), 1)
        newest = checkpoint.latest(root / f"{how} {on}")
        assert newest is not None
        checkpoint.load(newest, model, optimizer, boost=attached)
        train(model, optimizer, STEPS - SAVED_AT, first=SAVED_AT)
        found[how, on] = tensors(model)
    return found


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(tmp_path):
    wanted = run_ranks(trained, 4, tmp_path)
    assert all(other == wanted[0] for other in wanted)
    assert run_ranks(resumed, 4, tmp_path, WAYS) == wanted


def test_states_of_two_nodes_are_not_shared_out_among_others(tmp_path):
    run_ranks(trained, 4, tmp_path)
    with pytest.raises(RankError, match=r"optimizer's state differs between ranks 0, 2 .*Resume on 4 ranks"):
        run_ranks(resumed, 2, tmp_path, [("ddp", "delta")])
    run_ranks(resumed, 2, tmp_path, [("ddp", "gradient")])


def buffers(model: nn.Module) -> list[list[float]]:
    return [buffer.flatten().tolist() for buffer in model.buffers()]


def with_statistics(root: Path) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Return weights and statistics after a save on the way."""
    found = {}
    for how, on in WAYS:
        like = fresh(cnn)
        model, optimizer, attached = started(how, on, cnn)
        train(model, optimizer, SAVED_AT, like=like)
        checkpoint.save(root / f"{how} {on}", SAVED_AT, model, optimizer, boost=attached)
        train(model, optimizer, STEPS - SAVED_AT, first=SAVED_AT, like=like)
        found[how, on] = tensors(model), buffers(model)
    return found


def resumed_with_statistics(root: Path) -> dict[tuple[str, str], tuple[Any, Any]]:
    found = {}
    for how, on in WAYS:
        like = fresh(cnn)
        model, optimizer, attached = started(how, on, cnn)
        if how == "ddp":
            train(model, torch.optim.SGD(model.parameters(), lr=0.0), 1, like=like)
        newest = checkpoint.latest(root / f"{how} {on}")
        assert newest is not None
        checkpoint.load(newest, model, optimizer, boost=attached)
        train(model, optimizer, STEPS - SAVED_AT, first=SAVED_AT, like=like)
        found[how, on] = tensors(model), buffers(model)
    return found


def test_every_node_gets_its_own_statistics_of_batch_norms_back(tmp_path):
    wanted = run_ranks(with_statistics, 4, tmp_path)
    for way in (("bare", "delta"), ("ddp", "delta")):
        assert wanted[0][way][1] != wanted[2][way][1], "the nodes differ"
    found = run_ranks(resumed_with_statistics, 4, tmp_path)
    for rank, (before, after) in enumerate(zip(wanted, found, strict=True)):
        for how, on in WAYS:
            assert after[how, on][0] == before[how, on][0], (rank, how, on)
            # FSDP2 exchanges no statistics: those of the first rank of its mesh are written.
            if how != "fsdp" or rank % 2 == 0:
                assert after[how, on][1] == before[how, on][1], (rank, how, on)


def loaded_statistics(root: Path) -> list[list[float]]:
    model = fresh(cnn)
    newest = checkpoint.latest(root / "bare")
    assert newest is not None
    checkpoint.load(newest, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return buffers(model)


def saved_statistics(root: Path) -> list[list[float]]:
    model = fresh(cnn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, optimizer, 2, like=model)
    checkpoint.save(root / "bare", 1, model, optimizer)
    return buffers(model)


def test_on_another_number_of_ranks_the_statistics_are_those_of_rank_0(tmp_path):
    wanted = run_ranks(saved_statistics, 4, tmp_path)
    assert wanted[0] != wanted[1]
    assert run_ranks(loaded_statistics, 4, tmp_path) == wanted
    assert run_ranks(loaded_statistics, 2, tmp_path) == wanted[:1] * 2
