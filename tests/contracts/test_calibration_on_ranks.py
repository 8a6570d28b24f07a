"""All ranks choose the same levers: the slowest rank counts, and what one rank cannot run is dropped on all."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchboost
from tests.support.ranks import run_ranks
from torchboost.algorithms.autocast import Autocast
from torchboost.algorithms.fused_optimizer import FusedOptimizer
from torchboost.calibration import calibration, passes
from torchboost.core import hardware
from torchboost.measure.machine import Products

CONFIG = {"extra": {"compile": False, "grad_freeze": False}}


class Slow(nn.Linear):
    """Sleeps where autocast is on, so that this lever is planted as slow on one rank."""

    on, seconds = -1, 0.02

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu") and dist.get_rank() == self.on:
            time.sleep(self.seconds)
        return super().forward(x)


def calibrated(slow: int, raising: int) -> tuple[list[str], list[str], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), Slow(4 * 36, 8), nn.Linear(8, 2))
    model[2].on = slow
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attach = FusedOptimizer.attach

    def raises(self: FusedOptimizer, target: torchboost.Target) -> object:
        if target.optimizer is not optimizer and dist.get_rank() == raising:
            raise RuntimeError("planted")
        return attach(self, target)

    FusedOptimizer.attach = raises
    try:
        boosted = torchboost.boost(model, optimizer, total_steps=10_000, config=CONFIG, calibrate=1.0)
        parallel = DistributedDataParallel(model)
        for step in range(2):
            x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            parallel(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        FusedOptimizer.attach = attach
    assert boosted.choice is not None
    kept = sorted(boosted.choice.kept)
    return kept, [v.reason for v in boosted.choice.verdicts], [float(p.detach().sum()) for p in model.parameters()]


def test_one_slow_and_one_raising_rank_decide_for_all():
    results = run_ranks(calibrated, 2, 0, 1)
    kept, reasons, weights = results[0]
    assert all(each == results[0] for each in results[1:]) or all(each[0] == kept for each in results)
    assert all(each[2] == weights for each in results)
    assert Autocast.name not in kept
    assert FusedOptimizer.name not in kept
    assert any("planted" in reason or "another rank" in reason for reason in reasons)
    assert all(any("lays out its buckets" in reason for reason in each[1]) for each in results)


def late() -> tuple[list[str], list[str]]:
    """The time of a trial is up in the first step of a lever, on one rank alone."""
    torch.manual_seed(0)
    model = nn.Sequential(Slow(8, 8), nn.Linear(8, 2))
    model[0].on, model[0].seconds = 0, 30.0
    boosted = torchboost.boost(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        total_steps=10_000,
        config=CONFIG,
        calibrate=1.0,
        verify=False,
    )
    DistributedDataParallel(model)(torch.ones(4, 8)).sum().backward()
    assert boosted.choice is not None
    return sorted(boosted.choice.kept), [verdict.reason for verdict in boosted.choice.verdicts]


def test_a_lever_that_takes_too_long_on_one_rank_does_so_on_all():
    first, second = run_ranks(late, 2)
    assert first == second
    assert Autocast.name not in first[0]
    assert any("take longer than" in reason for reason in first[1])


def untried() -> list[str]:
    """Rank 0 alone measured that bfloat16 is fast, and there is no memory for a trial."""
    ratio = 2.0 if dist.get_rank() == 0 else 0.5
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8_192), nn.Linear(8_192, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "half_speed", lambda kind, device: Products(kind=kind, ratio=ratio, pairs=9))
        patch.setattr(calibration, "free_bytes", lambda device: 0)
        boosted = torchboost.boost(model, optimizer, total_steps=10_000, config=CONFIG, calibrate=1.0)
        assert Autocast.name not in boosted.attached
        DistributedDataParallel(model)(torch.ones(4, 8)).sum().backward()
    assert boosted.choice is not None
    assert all("not measured" in verdict.reason for verdict in boosted.choice.verdicts)
    assert (Autocast.name in boosted.attached) is (Autocast.name in boosted.choice.kept)
    assert (Autocast.name in boosted.attached) is (Autocast.name in {one.name for one in boosted.plan.algorithms})
    return sorted(boosted.choice.kept)


def test_without_a_trial_the_ranks_keep_what_the_machines_of_all_suggest():
    results = run_ranks(untried, 2)
    assert results[0] == results[1]
    assert Autocast.name not in results[0]
    assert FusedOptimizer.name in results[0]


class Logged(nn.Sequential):
    """Holds a log on one rank, which is an iterator."""

    log: Iterator[str] | None = None


def uneven(how: str, sharded: bool) -> tuple[list[str], list[float], str]:
    first = dist.get_rank() == 0
    torch.manual_seed(0)
    model = Logged(nn.Linear(8, 8), nn.Linear(8, 2))
    options: dict[str, Any] = {"total_steps": 10_000, "calibrate": 0.5}
    if how == "length":
        options = {"total_steps": 10_000 if first else 299, "calibrate": True}
    elif how == "seconds":
        options["calibrate"] = 1e9 if first else 0.5
    elif how == "off":
        options["calibrate"] = False if first else 0.5
    elif how == "verify":
        options["verify"] = first
    else:
        model.log = iter([""]) if first else None
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    boosted = torchboost.boost(model, optimizer, config=CONFIG, **options)
    called = model if sharded else DistributedDataParallel(model)
    losses = []
    for _ in range(2):
        loss = called(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [a.name for a in boosted.plan.algorithms], losses, boosted.explain()


UNEVEN = [*itertools.product(["length", "seconds", "iterator"], [False, True]), ("off", False), ("verify", False)]


def uneven_each() -> list[tuple[list[str], list[float], str]]:
    return [uneven(how, sharded) for how, sharded in UNEVEN]


def test_ranks_with_other_settings_decide_the_same() -> None:
    told = {
        "length": "a run of 299 steps is short",
        "off": "another rank has a reason",
        "iterator": "can be read only once",
    }
    for (how, _), first, second in zip(UNEVEN, *run_ranks(uneven_each, 2), strict=True):
        assert first[:2] == second[:2], how
        assert told.get(how, "") in second[2]
        assert how != "verify" or not first[0] or "not checked: verify=False" in first[2]


def stepped() -> list[str]:
    """The trial of a step over DDP runs the bare model: DDP would exchange buffers in timed steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run: list[nn.Module] = []
    with pytest.MonkeyPatch.context() as patch:
        first = passes.Passes.run
        patch.setattr(passes.Passes, "run", lambda self: run.append(self.model) or first(self))
        boosted = torchboost.boost(model, optimizer, total_steps=10_000, config=CONFIG, calibrate=0.5)
        parallel = DistributedDataParallel(model)
        step = boosted.step(nn.functional.cross_entropy, model=parallel)
        for _ in range(2):
            step(torch.randn(4, 3, 8, 8), torch.randint(0, 2, (4,)))
    assert run
    assert all(each is model for each in run)
    assert boosted.choice is not None
    assert boosted.choice.source == "trial"
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), parallel.module.parameters(), strict=True))
    return sorted(boosted.choice.kept)


def ragged() -> list[float]:
    """One rank has inputs of another shape in the second step, the other one in the third."""
    losses = []
    for boosted in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if boosted:
            asked = {"extra": {"channels_last": True, "fused_optimizer": True, "autocast": False}}
            torchboost.boost(model, optimizer, calibrate=False, config=asked)
        parallel = DistributedDataParallel(model)
        for step in range(4):
            samples = 4 + 3 * (step - 1 == dist.get_rank())
            loss = parallel(torch.ones(samples, 3, 8, 8) * step).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def probed() -> tuple[bool, str]:
    """Rank 0 calls the bare model once before DDP, as a summary of its layers does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asked = {"extra": {"channels_last": True, "fused_optimizer": True, "autocast": False}}
    boosted = torchboost.boost(model, optimizer, calibrate=False, config=asked)
    if dist.get_rank() == 0:
        model(torch.ones(2, 3, 8, 8))
    early = "exact here" in boosted.explain()
    DistributedDataParallel(model)(torch.ones(4, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    return early, boosted.explain()


def by_hand() -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    boosted = torchboost.boost(model, optimizer, calibrate=False)
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    return boosted.explain()


def in_one_launch() -> tuple[list[str], list[float], tuple[bool, str], str]:
    return stepped(), ragged(), probed(), by_hand()


def test_ranks_run_the_bare_model_wait_for_no_other_shape_decide_together_and_need_ddp():
    first, second = run_ranks(in_one_launch, 2)
    assert first[0] == second[0]
    for _, losses, (early, checked), alone in (first, second):
        assert losses[4:] == pytest.approx(losses[:4], rel=1e-4)
        assert not early
        assert "exact here" in checked
        assert "not checked" in alone
        assert "without DDP" in alone
