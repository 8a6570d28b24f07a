"""The parts of a step: each gets its own time, and only that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchboost.errors import IncompatibleError
from torchboost.measure.step_parts import LOADING, StepParts, time_step_parts
from torchboost.measure.stopwatch import Clock


class Planted:
    """A training whose parts move a clock by given seconds."""

    def __init__(self, loading: float, forward: float, backward: float, update: float) -> None:
        self.now = 0.0
        self.updates = 0
        self.begun = 0
        self._loading, self._forward, self._backward, self._update = loading, forward, backward, update
        self._weight = nn.Parameter(torch.ones(1))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def __iter__(self) -> Iterator[Tensor]:
        self.begun += 1
        for _ in range(4):
            self.pass_time(self._loading)
            yield torch.ones(1)

    def forward(self, batch: Tensor) -> Tensor:
        self.pass_time(self._forward)
        loss = (self._weight * batch).sum()
        loss.register_hook(lambda gradient: self.pass_time(self._backward))
        return loss

    def update(self) -> None:
        self.updates += 1
        self.pass_time(self._update)

    def timed(self, batches: Any = None, **options: Any) -> StepParts:
        return time_step_parts(
            self if batches is None else batches,
            load=lambda batch: batch,
            forward=self.forward,
            update=self.update,
            clock=Clock(read=lambda: self.now),
            **options,
        )


def test_every_part_has_its_own_time():
    here = Planted(0.5, 0.125, 0.25, 0.125)
    found = here.timed(steps=6)
    assert found.seconds == {
        LOADING: [0.5] * 6,
        "forward": [0.125] * 6,
        "backward": [0.25] * 6,
        "optimizer": [0.125] * 6,
    }
    assert (found.steps, found.share(LOADING), found.median("backward")) == (6, 0.5, 0.25)
    assert sum(map(found.share, found.seconds)) == 1.0


def test_the_warm_up_is_trained_and_not_measured():
    here = Planted(1.0, 1.0, 1.0, 1.0)
    assert here.timed(steps=2, warmup=5).steps == 2
    assert here.updates == 7


def test_the_epoch_is_begun_again():
    here = Planted(1.0, 0.0, 0.0, 0.0)
    assert here.timed(steps=9, warmup=0).steps == 9
    assert here.begun == 3


def test_batches_that_can_be_read_once_end_the_steps():
    here = Planted(0.0, 1.0, 0.0, 0.0)
    assert here.timed(iter([torch.ones(1)] * 5), steps=20, warmup=3).steps == 2


def test_shares_compare_totals():
    """Workers deliver four batches at once, then the loop waits."""
    timed = StepParts({LOADING: [0.0, 0.0, 0.0, 6.0], "forward": [0.5] * 4})
    assert timed.median(LOADING) == 0.0
    assert timed.share(LOADING) == 0.75
    assert StepParts({LOADING: [0.0], "forward": [0.0]}).share(LOADING) == 0.0


def test_moving_a_batch_counts_as_loading():
    here = Planted(0.0, 0.0, 0.0, 0.0)

    def load(batch: Tensor) -> Tensor:
        here.pass_time(2.0)
        return batch

    clock = Clock(read=lambda: here.now)
    found = time_step_parts(here, load=load, forward=here.forward, update=here.update, steps=3, clock=clock)
    assert found.seconds[LOADING] == [2.0] * 3


def test_the_device_is_waited_for_after_every_part():
    waited = []
    here = Planted(0.0, 0.0, 0.0, 0.0)
    clock = Clock(read=lambda: here.now, synchronize=lambda: waited.append(1))
    time_step_parts(here, load=lambda b: b, forward=here.forward, update=here.update, steps=2, warmup=0, clock=clock)
    assert len(waited) == 10


def test_progress_counts_every_step():
    seen = []
    here = Planted(0.0, 0.0, 0.0, 0.0)
    here.timed(steps=2, warmup=1, progress=lambda phase, done, total, note="": seen.append((phase, done, total)))
    assert seen == [("steps", 1, 3), ("steps", 2, 3), ("steps", 3, 3)]


@pytest.mark.parametrize("batches", [[], iter([torch.ones(1)] * 3)])
def test_too_few_batches_are_refused(batches):
    with pytest.raises(IncompatibleError, match="needed: more than 3 of them"):
        Planted(0.0, 0.0, 0.0, 0.0).timed(batches, steps=1)


def test_wrong_numbers_are_refused_before_a_step():
    here = Planted(0.0, 0.0, 0.0, 0.0)
    for wrong in ({"steps": 0}, {"warmup": -1}):
        with pytest.raises(ValueError, match="needed: steps >= 1, warmup >= 0"):
            here.timed(**wrong)
    assert here.updates == here.begun == 0
