"""Accumulation on two ranks, under DDP and FSDP2, equals one full batch.

``test_distributed_checkpoints.py`` resumes in mid-window.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import batch_for, mlp
from tests.support.ranks import run_ranks
from tests.support.wrapped import Kind, all_weights, wrap
from torchboost.algorithms.grad_accumulation import Accumulator, GradAccumulation
from torchboost.algorithms.loss_scale_group.scalers import DynamicLossScale
from torchboost.compat.cells import WithLoss
from torchboost.core.algorithm import Target, attach_all
from torchboost.core.step import TrainStep
from torchboost.errors import IncompatibleError


def data(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    return batch_for(mlp(), torch.Generator().manual_seed(seed), samples)


def _train(kind: Kind, how: str) -> list[float]:
    torch.manual_seed(0)
    model = mlp()
    wrapped = wrap(model, kind)
    called = torch.compile(wrapped, backend="eager") if how == "compiled" else wrapped
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    accumulator = Accumulator(2 if how != "flush" else 3, called)
    parts = [[3, 3], [3, 3]] if how == "equal" else [[3, 1], [2, 0 if how == "empty" else 6]]
    mine = parts[dist.get_rank()] if kind != "single" else []
    for update in range(2):
        inputs, labels = batch_for(model, torch.Generator().manual_seed(update), sum(parts[0] + parts[1]))
        if kind == "single":
            F.cross_entropy(model(inputs), labels).backward()
            mine = []
        offset = sum(parts[0]) * dist.get_rank() if mine else 0
        for count in mine:
            x, y = inputs[offset : offset + count], labels[offset : offset + count]
            with accumulator.micro_step():
                if how == "equal":
                    accumulator.share(F.cross_entropy(called(x), y)).backward()
                else:
                    loss = F.cross_entropy(called(x), y, reduction="sum") / max(count, 1)
                    accumulator.share(loss, count).backward()
            offset += count
        assert not mine or accumulator.flush() == (how == "flush")
        optimizer.step()
        optimizer.zero_grad()
    return all_weights(wrapped)


def _train_all_on_ranks() -> dict[str, list[float]]:
    done = {f"{kind} {how}": _train(kind, how) for kind in ("ddp", "fsdp") for how in ("equal", "ragged", "empty")}
    done |= {f"ddp {how}": _train("ddp", how) for how in ("flush", "compiled")}
    with pytest.raises(IncompatibleError, match=r"micro_step\(last=True\)"):
        _train("fsdp", "flush")
    return done


@pytest.mark.dist
def test_ranks_under_ddp_and_fsdp_train_like_one_full_batch(on_ranks: dict[str, Any]) -> None:
    for what, weights in on_ranks["_train_all_on_ranks"].items():
        torch.testing.assert_close(weights, _train("single", what.split()[1]), rtol=0, atol=1e-6, msg=what)


SUM = nn.CrossEntropyLoss(reduction="sum")


def _inside_the_loss(ranks: int = 2) -> list[float]:
    """Train windows of 2 ragged batches with DDP inside the network, or what both ranks see as one batch."""
    torch.manual_seed(0)
    model = mlp()
    network = WithLoss(wrap(model, "ddp" if ranks == 2 else "single"), SUM)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accumulator = Accumulator(2, network)
    for update in range(3):
        parts = [data(size, seed=4 * update + i) for i, size in enumerate((8, 3, 8, 8))]
        if ranks == 1:
            (sum(network(*part) for part in parts) / 27).backward()
        for x, y in parts[2 * dist.get_rank() :][:2] if ranks == 2 else ():
            with accumulator.micro_step():
                accumulator.share(network(x, y) / len(y), len(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return all_weights(model)


EPOCHS = {
    "a batch more": ((5, 4), (5, 4)),
    "a batch less": ((8, 9), (3, 2)),
    "none at first": ((2, 0), (4, 4), (0, 3)),
    "none at all": ((0, 0), (1, 2)),
}
"""Batches of the two ranks in each epoch, in windows of 4; the last window is flushed."""


def _part(epoch: int, number: int, rank: int, counts: bool) -> tuple[Tensor, Tensor]:
    seed = 100 * epoch + 10 * rank + number
    return data(2 + seed % 4 if counts else 4, seed)


def _uneven(epochs: tuple[tuple[int, int], ...], counts: bool, norm: bool, scaled: bool) -> list[float]:
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)) if norm else mlp()
    model = wrap(bare, "ddp", find_unused_parameters=scaled)
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    target.scaler = DynamicLossScale(64.0) if scaled else None
    attached = attach_all(target, [GradAccumulation(steps=4)])

    def loss(x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, int]:
        mean = F.cross_entropy(model(x), y)
        return (mean, len(y)) if counts else mean

    step = TrainStep(target, loss, attached=attached)
    for epoch, batches in enumerate(epochs):
        for number in range(batches[dist.get_rank()]):
            step(*_part(epoch, number, dist.get_rank(), counts))
        assert (step.flush() is not None) == any(number % 4 for number in batches)
        assert step.flush() is None
    return all_weights(model)


def _uneven_alone(epochs: tuple[tuple[int, int], ...], counts: bool) -> list[float]:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch, batches in enumerate(epochs):
        for first in range(0, max(batches), 4):
            numbers = [(n, rank) for rank in range(2) for n in range(first, min(first + 4, batches[rank]))]
            parts = [_part(epoch, number, rank, counts) for number, rank in numbers]
            x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return all_weights(model)


WAYS = [(counts, *way) for counts in (False, True) for way in ((False, False), (False, True), (True, False))]
"""Whether micro-batches have counts, the network has norms, and the loss is scaled."""


def _uneven_all() -> dict[str, list[list[float]]]:
    return {case: [_uneven(epochs, *way) for way in WAYS] for case, epochs in EPOCHS.items()}


@pytest.mark.dist
def test_ranks_whose_last_windows_differ_flush_together(on_ranks: dict[str, Any]) -> None:
    for case, epochs in EPOCHS.items():
        for (counts, norm, _), weights in zip(WAYS, on_ranks["_uneven_all"][case], strict=True):
            assert norm or weights == pytest.approx(_uneven_alone(epochs, counts), abs=1e-6), case


def _exchanged() -> list[int]:
    """How often DDP reduces in each micro-step of a window of three, and refusals of what cannot skip that."""
    model = DistributedDataParallel(mlp())
    reduced: list[int] = []

    def counted(state, bucket):  # DDP does not read annotations that are strings
        reduced.append(bucket.index())
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, counted)
    called = torch.compile(model, backend="eager")
    accumulator, seen = Accumulator(3, called), []
    for number in range(3):
        x, y = data(4, number)
        with accumulator.micro_step():
            accumulator.share(F.cross_entropy(called(x), y)).backward()
        seen.append(len(reduced))
    static = DistributedDataParallel(mlp(), static_graph=True)
    for refused, message in (
        (static, "static_graph"),
        (nn.Sequential(static), "static_graph"),
        (nn.Sequential(model, DistributedDataParallel(mlp())), r"2 modules are wrapped .*; wrap"),
        (FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")), "use fully_shard"),
    ):
        with pytest.raises(IncompatibleError, match=message):
            Accumulator(2, refused)
    return seen


def _other_lengths() -> str:
    model = wrap(mlp(), "ddp")
    accumulator = Accumulator(3 + dist.get_rank(), model)
    x, y = data(4, 0)
    with accumulator.micro_step():
        accumulator.share(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(IncompatibleError) as caught:
        accumulator.flush()
    return str(caught.value)


PARTS = (_train_all_on_ranks, _inside_the_loss, _uneven_all, _exchanged, _other_lengths)


def _all_parts() -> dict[str, Any]:
    return {part.__name__: part() for part in PARTS}


@pytest.fixture(scope="module")
def on_ranks() -> dict[str, Any]:
    """What every part returned on two ranks, on both the same."""
    first, second = run_ranks(_all_parts, 2, timeout=240)
    assert first == second
    return first


@pytest.mark.dist
def test_ddp_reduces_once_in_a_window_and_what_cannot_wait_or_differs_is_refused(on_ranks: dict[str, Any]) -> None:
    assert on_ranks["_exchanged"] == [0, 0, 1]
    told = "windows of 3 micro-steps on one rank and of 4 on another; set the same steps"
    assert told in on_ranks["_other_lengths"]


@pytest.mark.dist
def test_ddp_inside_the_network_is_seen(on_ranks: dict[str, Any]) -> None:
    torch.testing.assert_close(on_ranks["_inside_the_loss"], _inside_the_loss(1), rtol=0, atol=1e-6)
