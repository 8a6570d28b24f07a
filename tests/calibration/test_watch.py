"""Steps that stay slower are reported once; noise, pauses and faster steps are not."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from torchboost.calibration.watch import StepWatch


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watched() -> tuple[torch.optim.Optimizer, Clock, list[tuple[float, float]], StepWatch]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    clock, reports = Clock(), []
    watch = StepWatch(optimizer, lambda before, now: reports.append((before, now)), read=clock)
    return optimizer, clock, reports, watch


def run(optimizer: torch.optim.Optimizer, clock: Clock, seconds: float, steps: int, noise: float = 0.0) -> None:
    generator = random.Random(0)
    for _ in range(steps):
        clock.now += seconds * generator.lognormvariate(0, noise)
        optimizer.step()


def test_slower_steps_are_reported_once():
    optimizer, clock, reports, _ = watched()
    run(optimizer, clock, 5.0, 6)  # compilation
    run(optimizer, clock, 0.1, 200)
    run(optimizer, clock, 0.2, 400)
    run(optimizer, clock, 0.4, 400)
    assert reports == [(pytest.approx(0.1), pytest.approx(0.2))]


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.2])
def test_steps_that_are_as_fast_are_not_reported(factor):
    optimizer, clock, reports, _ = watched()
    run(optimizer, clock, 0.1, 100, noise=0.2)
    run(optimizer, clock, 0.1 * factor, 500, noise=0.2)
    assert reports == []


def test_pauses_are_not_reported():
    optimizer, clock, reports, _ = watched()
    for _ in range(50):
        run(optimizer, clock, 0.1, 20)
        clock.now += 60
    run(optimizer, clock, 0.2, 60)  # one busy window
    run(optimizer, clock, 0.1, 200)
    assert reports == []


def test_a_removed_watch_sees_nothing():
    optimizer, clock, reports, watch = watched()
    run(optimizer, clock, 0.1, 100)
    watch.remove()
    run(optimizer, clock, 1.0, 300)
    assert reports == []
    assert not optimizer._optimizer_step_post_hooks
