"""The trial of a model that FSDP2 shards: all ranks choose the same, and the run is that of one with this choice."""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

import torchboost
from tests.support.ranks import run_ranks
from tests.support.wrapped import all_weights
from torchboost.algorithms.fused_optimizer import FusedOptimizer
from torchboost.errors import NoEffectWarning
from torchboost.front import Boosted

CONFIG = {"compile": False}


class Net(nn.Module):
    """Has a BatchNorm, dropout and a counter that a pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten())
        self.head = nn.Linear(8 * 36, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.body(x))


def train(
    *, steps: int = 4, accumulate: bool = False, evaluated: bool = False, extra: Any = None, **options: Any
) -> tuple[Any, Boosted]:
    """Return all that a run leaves behind, and the boosted pair."""
    torch.manual_seed(0)
    model = Net()
    fully_shard(model.body)
    fully_shard(model)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    boosted = torchboost.boost(
        model, optimizer, total_steps=10_000, config={"extra": {**CONFIG, **(extra or {})}}, **options
    )
    if evaluated:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, 8, 8))
        model.train()
    for step in range(steps):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        if accumulate:
            model.set_requires_gradient_sync(step % 2 == 1)
        model(x).square().mean().backward()
        if not accumulate or step % 2:
            optimizer.step()
            optimizer.zero_grad()
    buffers = [buffer.tolist() for buffer in model.buffers()]
    return (all_weights(model), buffers, model.calls, torch.get_rng_state().tolist()), boosted


def too_early() -> str:
    model, said = Net(), list[str]()
    extra = {"extra": {**CONFIG, "channels_last": False}}
    boosted = torchboost.boost(model, torch.optim.AdamW(model.parameters()), total_steps=10_000, config=extra)
    fully_shard(model)
    model(torch.zeros(1, 3, 8, 8)).sum().backward()
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            boosted.optimizer.step()
        said += [str(warning.message) for warning in caught if warning.category is NoEffectWarning]
    return " | ".join(said)


@pytest.mark.dist
def test_an_optimizer_that_sharding_has_cut_off_is_said_once():
    (said,) = set(run_ranks(too_early, 2))
    assert said.startswith("none of the 6 parameters of the optimizer belongs to the model, a FSDPNet; build")
    assert said.endswith("after fully_shard if that shards it. This step trains nothing of it.")


def tried(evaluated: bool, raising: int) -> list[Any]:
    tried_on = []

    def planted(self: FusedOptimizer, target: torchboost.Target) -> Any:
        tried_on.append(target.optimizer)
        if dist.get_rank() == raising and not target.optimizer.param_groups[0]["lr"]:  # a copy of the trial
            raise RuntimeError("planted")
        return attach(self, target)

    attach, FusedOptimizer.attach = FusedOptimizer.attach, planted
    try:
        left, boosted = train(calibrate=1.0, evaluated=evaluated)
    finally:
        FusedOptimizer.attach = attach
    choice = boosted.choice
    assert choice is not None
    assert choice.source == "trial", choice
    assert tried_on[0] is not boosted.optimizer, "levers were attached to copies of the optimizer"
    kept = {name: name in choice.kept for name in ("autocast", "fused_optimizer")}
    again, _ = train(calibrate=False, evaluated=evaluated, extra=kept)
    return [left == again, kept, boosted.explain()]


TRIED = [(True, -1), (False, 1)]


def tried_each() -> list[list[Any]]:
    return [tried(*case) for case in TRIED]


@pytest.mark.dist
def test_the_run_is_that_of_one_that_was_given_the_choice() -> None:
    for (_, raising), first, second in zip(TRIED, *run_ranks(tried_each, 2), strict=True):
        assert first[1] == second[1]
        assert first[0]
        assert second[0]
        assert "not checked: under FSDP2" in first[2]
        assert ("another rank could not run it" in first[2]) == ("planted" in second[2]) == (raising == 1)


def accumulated() -> tuple[bool, str]:
    left, boosted = train(calibrate=2.0, accumulate=True)
    names = {algorithm.name for algorithm in boosted.plan.algorithms}
    given = {name: name in names for name in ("autocast", "fused_optimizer")}  # a rank alone may measure another speed
    again, _ = train(calibrate=False, accumulate=True, extra=given)
    return left == again, boosted.explain()


@pytest.mark.dist
def test_a_window_of_accumulation_is_not_ended_by_a_trial() -> None:
    for same, said in run_ranks(accumulated, 2):
        assert same
        assert "FSDP2 adds up the gradients of several passes" in said


class Strict(nn.Linear):
    """A layer that refuses bfloat16, after its parent has begun."""

    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(input)
        assert made.dtype is torch.float32, "float32 only"
        return made


def refused(unit: bool) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Strict(4, 4), nn.Linear(4, 2))
    if unit:
        fully_shard(model[1])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted = torchboost.boost(model, optimizer, total_steps=10_000, config={"extra": CONFIG}, calibrate=1.0)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, boosted.explain()


def refused_each() -> list[tuple[list[float], str]]:
    return [refused(unit) for unit in (True, False)]


@pytest.mark.dist
def test_the_run_goes_on_after_a_lever_that_a_layer_refuses() -> None:
    for runs in run_ranks(refused_each, 2):
        for losses, text in runs:
            assert "float32 only" in text
            assert losses[1] < losses[0]


def lowered(calibrate: Any) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 256), nn.Linear(256, 256), nn.Linear(256, 2))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {"extra": CONFIG | {"autocast": {}}}  # whatever the speed of bfloat16 is on this machine
    boosted = torchboost.boost(model, optimizer, total_steps=10_000, config=config, calibrate=calibrate)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(3, 4)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, boosted.explain()


@pytest.mark.dist
def test_mixed_precision_of_fsdp2_leaves_autocast_out() -> None:
    for losses, said in run_ranks(lowered, 2, 1.0):
        assert "FSDP2 computes in bfloat16 itself, by its MixedPrecisionPolicy" in said
        assert losses[1] < losses[0]


class Outer(nn.Module):
    """Calls what is boosted inside its own forward."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.out = net, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(x)).square().mean()


def within(case: str, boosted: bool) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model = Outer(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    fully_shard(model.net[0])
    if case == "unit":
        fully_shard(model.net)
    fully_shard(model)
    if case == "method":
        model.loss = types.MethodType(Outer.__call__, model)
        register_fsdp_forward_method(model, "loss")
    target, run = (model, model.loss) if case == "method" else (model.net, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    extra = CONFIG if boosted else {**CONFIG, "autocast": False, "fused_optimizer": False}
    calibrate = 1.0 if boosted else False
    pair = torchboost.boost(target, optimizer, total_steps=10_000, config={"extra": extra}, calibrate=calibrate)
    losses = []
    for _ in range(3):
        loss = run(torch.ones(3, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, pair.explain()


def within_each() -> list[tuple[list[float], list[float], str]]:
    found = []
    for case in ("unit", "plain", "method"):
        plain, (losses, text) = within(case, False)[0], within(case, True)
        found.append((plain, losses, text))
    return found


@pytest.mark.dist
def test_nothing_is_measured_inside_another_forward() -> None:
    for runs in run_ranks(within_each, 2):
        for plain, losses, text in runs:
            assert "not measured: the call is inside another FSDP2 forward" in text
            assert losses == pytest.approx(plain, rel=0.02)
