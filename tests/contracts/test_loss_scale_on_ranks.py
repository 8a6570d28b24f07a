"""Overflow on one rank of two: no rank updates, all scales fall alike, and the next step is normal."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.support.models import batch_for, mlp
from tests.support.ranks import run_ranks
from tests.support.wrapped import Kind, all_weights, wrap
from torchboost import DynamicLossScale, GroupGradScaler
from torchboost.algorithms.grad_accumulation.algorithm import Accumulator
from torchboost.core.algorithm import Target
from torchboost.core.step import TrainStep

STEPS = 6
BAD = (1, 3)


def _share(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch_for(mlp(), torch.Generator().manual_seed(seed), 8)
    rank = dist.get_rank()
    return x[rank * 4 : rank * 4 + 4], y[rank * 4 : rank * 4 + 4]


def _state(optimizer: torch.optim.Optimizer) -> list[list[float]]:
    states = [state["momentum_buffer"] for state in optimizer.state.values()]
    return [getattr(s, "to_local", lambda s=s: s)().flatten().tolist() for s in states]


def _train(kind: Kind | str, how: str, window: int, bad: tuple[int, ...]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = mlp()
    # "own": every rank trains for itself, so that only the agreement keeps them in step.
    before_wrapping = GroupGradScaler(model, ["0", "2", "4"]) if how == "group first" else None
    wrapped: nn.Module = model if kind == "own" else wrap(model, kind)  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    scaler = DynamicLossScale(1024.0) if how == "dynamic" else before_wrapping
    scaler = scaler or GroupGradScaler(wrapped, ["0", "2", "4"])
    accumulator = Accumulator(window, wrapped) if window > 1 else None
    poison = {"value": 1.0}
    step = TrainStep(
        Target(wrapped, optimizer, scaler, accumulator), lambda x, y: F.cross_entropy(wrapped(x), y) * poison["value"]
    )
    overflow, scales, kept = [], [], True
    for number in range(STEPS * window):
        update = number // window
        here = dist.get_rank() == 1 and update in bad and number % window == 0
        poison["value"] = math.inf if here else 1.0
        before = all_weights(wrapped), _state(optimizer)
        out = step(*_share(number))
        if number % window == window - 1:
            overflow.append(bool(out.overflow))
            scales.append(float(out.loss_scale))
            if out.overflow:
                kept = kept and before == (all_weights(wrapped), _state(optimizer))
    return {"overflow": overflow, "scales": scales, "kept": kept, "weights": all_weights(wrapped)}


def _all() -> dict[str, dict[str, Any]]:
    found = {}
    for kind in ("own", "ddp", "fsdp"):
        for how in ("dynamic", "group", "group first"):
            for window in (1, 2):
                found[f"{kind} {how} {window}"] = _train(kind, how, window, BAD)
                found[f"{kind} {how} {window} clean"] = _train(kind, how, window, ())
    return found


@pytest.mark.dist
def test_an_overflow_on_one_rank_skips_the_update_on_every_rank() -> None:
    first, second = run_ranks(_all, 2)
    for what, one in first.items():
        other = second[what]
        bad = [] if what.endswith("clean") else list(BAD)
        assert one["overflow"] == other["overflow"] == [step in bad for step in range(STEPS)], what
        assert one["scales"] == other["scales"], what
        assert one["kept"], what
        assert other["kept"], what
        assert all(math.isfinite(weight) for weight in one["weights"]), what
        if bad:
            assert min(one["scales"]) < max(one["scales"])
        if not what.startswith("own"):
            assert one["weights"] == other["weights"], what
    for kind in ("ddp", "fsdp"):
        wanted = first[f"{kind} dynamic 1 clean"]["weights"]
        assert first[f"{kind} group 1 clean"]["weights"] == wanted
        assert first[f"{kind} group first 1 clean"]["weights"] == wanted
