"""DeepSpeed's ZeRO on two ranks of a CPU, with the algorithms that leave its optimizer alone."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import torchboost
from tests.support.ranks import run_ranks


def losses(stage: int, autocast: bool, boosted: bool) -> list[float]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    blocks = [m for w in (3, 16, 16, 16) for m in (nn.Conv2d(w, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    extra: dict[str, Any] = dict.fromkeys(("fused_optimizer", "channels_last", "compile"), False)
    config = {"extra": extra | {"less_bn": {"keep_every": 2}, "autocast": autocast}}
    if boosted:
        on = torchboost.boost(model, optimizer, config=config, total_steps=10_000, calibrate=False, verify=False).plan
        assert {a.name for a in on.algorithms} == {"less_bn", *(["autocast"] if autocast else [])}
    else:
        torchboost.prepare(model, optimizer, config=config)
    settings = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True}
    settings |= {"zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    found, generator = [], torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        x, y = torch.randn(4, 3, 32, 32, generator=generator), torch.randint(0, 4, (4,), generator=generator)
        loss = F.cross_entropy(engine(x).float(), y)
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    return found


def compared(stage: int) -> list[Any]:
    alone, ours, cast = losses(stage, False, False), losses(stage, False, True), losses(stage, True, True)
    return [alone == ours, cast != ours, max(abs(a - b) for a, b in zip(cast, ours, strict=True))]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # DeepSpeed has many of its own
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_leaves_the_optimizer_alone_works_under_zero(stage: int) -> None:
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install deepspeed")
    for same, cast, distance in run_ranks(compared, 2, stage):
        assert same
        assert cast
        assert math.isfinite(distance)
        assert distance < 0.5
