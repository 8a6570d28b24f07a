"""A lever that draws from and reseeds every random generator leaves no trace in the run that follows a trial."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchboost.core.algorithm import Algorithm, Attachment, Target
from torchboost.levers import Levers
from torchboost.plan import Plan
from torchboost.registry import Host


def corrupt() -> None:
    """Draw from each global generator, and set it to another seed."""
    for draw in (lambda: torch.rand(3), random.random, lambda: np.random.rand(2), lambda: random.gauss(0, 1)):
        draw()
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    torch.randn(5)
    np.random.standard_normal()  # the second of a pair stays in the generator


@dataclass(frozen=True, kw_only=True)
class Corrupting(Algorithm):
    """Corrupts the streams in transform, attach, forward and update; slow, so that a trial drops it."""

    name: ClassVar[str] = "autocast"  # a trial looks up the price of a lever by its name
    end: str = "dropped"
    seen: list[str]

    def _reach(self, place: str) -> None:
        corrupt()
        self.seen.append(place)
        if self.end.endswith(f"in {place}") and self.seen.count(place) > 1 - self.end.startswith("raises"):
            raise KeyboardInterrupt if self.end.startswith("interrupted") else RuntimeError("planted")

    def needs_transform(self, model: nn.Module) -> bool:
        return True

    def transform(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Attachment:
        self._reach("transform")
        return Attachment()

    def attach(self, target: Target) -> Attachment:
        self._reach("attach")

        def forward(*_: Any) -> None:
            time.sleep(0.02)
            self._reach("forward")

        def update(*_: Any) -> None:
            self._reach("update")

        return Attachment(
            target.model.register_forward_pre_hook(forward), target.optimizer.register_step_pre_hook(update)
        )


class Drawing(nn.Module):
    """A model that draws from all three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + 0.01 * random.gauss(0, 1) + 0.01 * float(np.random.standard_normal()))


def streams() -> list[Any]:
    numpy: Any = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), numpy[0], numpy[1].tolist(), *numpy[2:]]


def seeded() -> tuple[Drawing, torch.optim.Optimizer]:
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)
    np.random.standard_normal()
    model = Drawing()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, first_call: Callable[[Tensor], object] | None = None
) -> list[Any]:
    """Train, and return everything that a run leaves behind. ``first_call`` comes before the first forward."""
    losses: list[float] = []
    for step in range(5):
        x = torch.randn(8, 6)
        if step == 0 and first_call is not None:
            first_call(x)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = [value.tolist() for entry in optimizer.state.values() for value in entry.values()]
    return [*losses, *(value.tolist() for value in model.state_dict().values()), *state, *streams()]


def waiting(lever: Corrupting) -> tuple[Drawing, torch.optim.Optimizer, Levers]:
    """Return a seeded pair in front of which a trial of the lever waits."""
    model, optimizer = seeded()
    plan = Plan(level="O1", mode="auto", algorithms=(), levers=(lever,), total_steps=10_000)
    target = Target(model, optimizer)
    return model, optimizer, Levers(plan, target, calibrate=5.0, verify=True, wrapper=None, host=Host())


@pytest.mark.parametrize(
    "end", ["dropped", "raises in transform", "raises in attach", "raises in forward", "raises in update"]
)
def test_a_run_after_a_trial_is_the_run_that_never_had_the_lever(end: str) -> None:
    expected = trained(*seeded())
    seen: list[str] = []
    model, optimizer, levers = waiting(Corrupting(end=end, seen=seen))
    found, choice = trained(model, optimizer), levers.choice
    levers.attached.remove()
    assert choice is not None
    (verdict,) = choice.verdicts
    assert choice.source == "trial"
    assert not verdict.kept
    assert ("RuntimeError: planted" in verdict.reason) is end.startswith("raises")
    reached = {"transform", "attach", "forward", "update"} if end == "dropped" else {end.split(" in ")[1]}
    assert reached <= set(seen)
    assert found == expected
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("place", ["forward", "update"])
def test_a_run_that_is_resumed_after_an_interrupt_is_the_run_that_never_had_the_lever(place: str) -> None:
    expected = trained(*seeded())
    model, optimizer, levers = waiting(Corrupting(end=f"interrupted in {place}", seen=[]))

    def interrupted(x: Tensor) -> None:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        assert levers.state == "waiting"
        levers.attached.remove()

    assert trained(model, optimizer, interrupted) == expected
    assert levers.choice is None
