"""Steps that stay slower and inputs that stay of another size are reported once; noise, pauses and padding are not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchboost.calibration.watch import Gate, StepWatch
from torchboost.core.torch_private import compiled_graphs, interceptor_of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watched() -> tuple[torch.optim.Optimizer, Clock, list[str], StepWatch]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock, reports = Clock(), []
    return optimizer, clock, reports, StepWatch(model, optimizer, reports.append, read=clock)


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
    assert reports == ["a step takes 200.0 ms, after the trial it took 100.0 ms"]


def test_hooks_after_the_watch_run_in_the_step_that_it_reports():
    optimizer, clock, reports, watch = watched()
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(len(reports)))
    run(optimizer, clock, 0.1, 60)
    run(optimizer, clock, 0.2, 200)
    assert len(seen) == 260
    assert seen[-1] == 1
    watch.remove()


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


class Fed:
    """A model that is trained on inputs of given lengths, and watched."""

    def __init__(self, entries: int | None = 100) -> None:
        self.model = nn.Linear(1, 1)
        self.loop_model: Callable[[Tensor], Tensor] = self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.clock, self.reports = Clock(), []
        self.watch = StepWatch(self.model, self.optimizer, self.reports.append, entries=entries, read=self.clock)

    def train(self, lengths: Iterable[int], seconds: float = 0.1) -> None:
        for length in lengths:
            self.clock.now += seconds
            self.loop_model(torch.ones(length, 1)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def test_inputs_of_another_size_are_reported_once_without_a_trace():
    fed = Fed()
    fed.train([100] * 200)
    fed.train([126] * 300)
    assert fed.reports == ["the inputs have 126 entries, at the trial 100"]
    assert interceptor_of(fed.model) is None
    fed.train([500] * 600, seconds=1.0)
    assert len(fed.reports) == 1
    fed.watch.remove()
    assert not fed.optimizer._optimizer_step_post_hooks


def test_smaller_inputs_are_reported():
    fed = Fed()
    fed.train([74] * 300)
    assert fed.reports == ["the inputs have 74 entries, at the trial 100"]


@pytest.mark.parametrize("length", [75, 100, 125])
def test_inputs_of_about_the_same_size_are_not_reported(length: int):
    fed = Fed()
    fed.train([length] * 600)
    assert fed.reports == []


@pytest.mark.parametrize("seed", range(5))
def test_padding_to_varying_lengths_is_not_reported(seed: int):
    generator = random.Random(seed)
    fed = Fed()
    fed.train(generator.choice([60, 80, 90, 100, 110, 120, 140]) for _ in range(2000))
    assert fed.reports == []


def test_inputs_that_are_larger_and_smaller_in_turn_are_not_reported():
    fed = Fed()
    fed.train((60, 140)[(step // 50) % 2] for step in range(600))
    assert fed.reports == []


@pytest.mark.parametrize("epoch", [10, 25, 51])
def test_the_short_last_batch_of_an_epoch_is_not_reported(epoch: int):
    for start in range(epoch):
        fed = Fed()
        fed.train((20 if (step + start) % epoch == 0 else 100) for step in range(320))
        assert fed.reports == []


def test_an_unknown_size_is_that_of_the_first_inputs_that_are_counted():
    fed = Fed(entries=None)
    fed.train([40] * 200)
    fed.train([80] * 300)
    assert fed.reports == ["the inputs have 80 entries, before 40"]


def test_slower_steps_on_larger_inputs_are_one_report_that_gives_both():
    fed = Fed()
    fed.train([100] * 120)
    fed.train([300] * 600, seconds=0.3)
    assert fed.reports == [
        "a step takes 300.0 ms, after the trial it took 100.0 ms, and the inputs have 300 entries, at the trial 100"
    ]


def test_only_one_call_in_a_window_is_looked_at(monkeypatch: pytest.MonkeyPatch):
    looks, look = [], Gate.__call__

    def counted(self: Gate, *args: Any) -> Any:
        looks.append(1)
        return look(self, *args)

    monkeypatch.setattr(Gate, "__call__", counted)
    fed = Fed()
    fed.train([100] * 505)
    assert len(looks) == 9


def test_removal_while_a_call_is_awaited_leaves_no_trace():
    fed = Fed()
    fed.train([100] * 55)
    assert interceptor_of(fed.model) is not None
    fed.watch.remove()
    assert "_compiled_call_impl" not in vars(fed.model)


class Net(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # code of the user, which the compiler does not skip
        return super().forward(input)


def test_a_model_that_the_loop_compiles_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    monkeypatch.setattr(nn, "Linear", Net)
    fed = Fed()
    fed.train([100])
    fed.loop_model = torch.compile(fed.model, backend="eager")
    fed.train([100] * 10)
    graphs = compiled_graphs()
    fed.train([100] * 300)
    assert compiled_graphs() == graphs
    assert interceptor_of(fed.model) is None


def test_inputs_are_counted_inside_ddp(one_rank: None):
    fed = Fed()
    fed.train([100] * 55)
    assert interceptor_of(fed.model) is not None
    fed.loop_model = DistributedDataParallel(fed.model)
    fed.train([300] * 300)
    assert fed.reports == ["the inputs have 300 entries, at the trial 100"]
