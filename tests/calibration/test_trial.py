"""A trial runs the model itself: it, its hooks, its optimizer and all random generators stay as they are."""

from __future__ import annotations

import math
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.portraits import changes, portrait
from torchboost.algorithms import Autocast, ChannelsLast, Compile, FusedOptimizer
from torchboost.calibration.passes import Passes
from torchboost.calibration.snapshot import Snapshot, plain
from torchboost.calibration.trial import Trial, free_bytes, needed_bytes, optimizer_over
from torchboost.core.algorithm import Target
from torchboost.core.hardware import streams_kept
from torchboost.core.torch_private import compiled_graphs
from torchboost.errors import IncompatibleError
from torchboost.measure.stopwatch import Clock

LEVERS = {"fused_optimizer": FusedOptimizer(), "channels_last": ChannelsLast(), "autocast": Autocast()}


def network() -> nn.Sequential:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 36, 2)]
    return nn.Sequential(*layers)


def passes(model: nn.Module, *args: Any, **kwargs: Any) -> Passes:
    call = args, kwargs
    return Passes(model, call, Snapshot(model, call))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v.clone() for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]


def test_model_optimizer_and_random_streams_stay():
    model, x = network(), torch.randn(4, 3, 8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    gradients, called = [p.grad for p in model.parameters()], []
    model.register_forward_hook(lambda *_: called.append(1))
    model[0].weight.register_hook(lambda _: called.append(1))
    before, state, groups = portrait(model), state_of(optimizer), [{**group} for group in optimizer.param_groups]
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    call = (x,), {}
    with streams_kept(), plain(model):
        snapshot = Snapshot(model, call)
        trial = Trial(Passes(model, call, snapshot), [optimizer], LEVERS)
        for levers in ([], ["fused_optimizer"], list(LEVERS)):
            assert trial.build(levers, within=60) >= 0
            assert min(trial.sample(within=60)) > 0
            trial.promote()
        trial.close()
        snapshot.restore()
        random.random()
        np.random.rand()
        torch.rand(1)
    assert changes(before, portrait(model)) == {}
    assert all(map(torch.equal, state, state_of(optimizer)))
    assert [{**group} for group in optimizer.param_groups] == groups
    assert all(p.grad is grad for p, grad in zip(model.parameters(), gradients, strict=True))
    assert called == []
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert np.array_equal(np.random.get_state()[1], streams[2])


def test_the_copy_of_the_optimizer_does_not_learn():
    model, x = network(), torch.randn(4, 3, 8, 8)
    trial = Trial(passes(model, x), [sgd(model, lr=1e9)], LEVERS)
    for _ in range(3):
        assert all(seconds < float("inf") for seconds in trial.sample(within=60))
    assert all(torch.equal(p, copied) for p, copied in trial._incumbent.copies[0][1])


class ReturnsALoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, *, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x.zero_() + 1)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


def test_the_loss_of_the_model_is_used_and_inputs_are_copied():
    model = ReturnsALoss()
    x, labels = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    made = passes(model, x, labels=labels)
    Trial(made, [sgd(model)], {}).sample(within=60)
    assert x.abs().max() > 0
    assert made._seeds is not None
    assert [seed.shape for seed in made._seeds] == [()]


def test_a_model_without_a_backward_pass_is_refused():
    model = nn.Linear(2, 2)

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).detach()

    with pytest.raises(IncompatibleError, match="no output of the model depends"):
        Trial(passes(Detached(), torch.randn(1, 2)), [sgd(model)], {})


def test_what_cannot_be_copied_is_said():
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    optimizer.__class__ = type("Locked", (torch.optim.SGD,), {"__deepcopy__": lambda self, memo: self})
    with pytest.raises(TypeError, match="Locked cannot be copied"):
        Trial(passes(model, torch.randn(1, 2)), [optimizer], {})


def test_an_optimizer_is_copied_in_part_without_hooks_and_without_the_step_of_a_scheduler():
    """A scheduler binds ``step`` of the instance to the original, and an own ``__getstate__`` takes it along."""

    class Whole(torch.optim.SGD):
        def __getstate__(self) -> dict[str, Any]:
            return self.__dict__.copy()

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer, called = Whole(model.parameters(), lr=0.1, momentum=0.9), []
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    weights = [p.detach().clone() for p in model.parameters()]
    trial = Trial(passes(model, torch.randn(4, 8)), [optimizer], {"fused_optimizer": FusedOptimizer()})
    trial.build(["fused_optimizer"], within=60)
    trial.sample(within=60)
    trial.close()
    assert called == []
    assert all(map(torch.equal, weights, model.parameters()))
    assert not optimizer.state
    made, pairs, share = optimizer_over(optimizer, list(model.parameters()), 80)
    assert 0 < share < 1
    assert {id(p) for group in made.param_groups for p in group["params"]} == {id(copy) for _, copy in pairs}
    assert share == sum(p.numel() for p, _ in pairs) / sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "SGD"])
def test_an_optimizer_that_has_stepped_is_copied_in_part(kind: str):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    duplicate, pairs, _ = optimizer_over(optimizer, list(model.parameters()), 80)
    assert 0 < len(pairs) < 6
    for parameter, copied in pairs:
        copied.grad = torch.zeros_like(copied)
        assert duplicate.state[copied].keys() == optimizer.state[parameter].keys()
    duplicate.step()
    assert set(duplicate.state) <= {copied for _, copied in pairs}


@pytest.mark.parametrize("name", ["cuda", "xpu"])
def test_memory_that_the_allocator_of_a_device_holds_unused_is_free(name, monkeypatch):
    held = {"mem_get_info": (5, 100), "memory_reserved": 60, "memory_allocated": 20}
    answers = {key: lambda device, answer=answer: answer for key, answer in held.items()}
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**answers))
    assert free_bytes(torch.device(name)) == 45


def test_memory_is_estimated():
    model = nn.Linear(1000, 1000, bias=False)
    assert needed_bytes(model) == 3 * 4_000_000 + 2 * 3 * 4_000_000
    model.register_buffer("table", torch.zeros(1000))
    assert needed_bytes(model) == 9 * 4_000_000 + 4000
    wide = nn.Linear(8000, 2000, bias=False, device="meta")
    assert needed_bytes(wide) == 3 * 64_000_000 + 2 * 3 * 4 * 2**22  # a part of the optimizer is stepped
    free = free_bytes(torch.device("cpu"))
    assert free is None or free > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
def test_a_graph_that_the_trial_compiled_serves_the_model():
    """Also if the loop passes a tensor twice, as language models get their tokens as labels."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return (self.layer(x) - labels).square().mean()

    model, x = Twice(), torch.randn(4, 3)
    compile_only = Compile(backend="aot_eager")
    trial = Trial(passes(model, x, labels=x), [sgd(model)], {"compile": compile_only})
    trial.build(["compile"], within=600)
    trial.close()
    graphs = compiled_graphs()
    with compile_only.attach(Target(model, sgd(model))):
        model(x, labels=x).backward()
    assert compiled_graphs() == graphs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
def test_a_compilation_that_takes_too_long_is_interrupted_and_a_later_one_works():
    model, x = network(), torch.randn(4, 3, 8, 8)
    trial = Trial(passes(model, x), [sgd(model)], {"compile": Compile()})
    with pytest.raises(TimeoutError, match=r"longer than the 0\.5 s"):
        trial.build(["compile"], within=0.5)
    assert max(trial.sample(within=60)) < float("inf")
    assert trial.build(["compile"], within=600) > 0
    assert max(trial.sample(within=60)) < float("inf")


def test_what_an_interrupted_step_leaves_is_undone_when_the_trial_is_closed():
    class Pauses(nn.Linear):
        pause = 0.0

        def forward(self, input: Tensor) -> Tensor:
            self.bias.data.neg_()
            time.sleep(Pauses.pause)
            self.bias.data.neg_()
            return super().forward(input)

    model, x = Pauses(2, 2), torch.randn(4, 2)
    before = portrait(model)
    trial = Trial(passes(model, x), [sgd(model)], LEVERS)
    Pauses.pause = 60.0
    assert math.inf in trial.sample(within=0.05)
    trial.close()
    assert changes(before, portrait(model)) == {}


def test_steps_that_take_too_long_count_as_infinitely_slow():
    class Slow(nn.Module):
        pause = 0.0

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            time.sleep(Slow.pause)
            return self.layer(x)

    model, x = Slow(), torch.randn(4, 2)
    trial = Trial(passes(model, x), [sgd(model)], LEVERS)
    trial.build(["fused_optimizer"], within=60)
    Slow.pause = 60.0
    assert sorted(map(math.isinf, trial.sample(within=0.05))) in ([False, True], [True, True])
    with pytest.raises(TimeoutError, match="longer than"):
        trial.build([], within=0.05)


@pytest.mark.parametrize("device", [0.0, 8.0])
def test_the_share_of_the_host_is_small_if_the_device_takes_longer(device: float, monkeypatch: pytest.MonkeyPatch):
    """The clock goes by a second at each reading, and by the time of the device whenever that is waited for."""
    now = [0.0]

    def passed(seconds: float) -> float:
        now[0] += seconds
        return now[0]

    clock = Clock(read=lambda: passed(1.0), synchronize=lambda: passed(device))
    monkeypatch.setattr(Clock, "of", lambda device: clock)
    model = network()
    trial = Trial(passes(model, torch.randn(4, 3, 8, 8)), [sgd(model)], LEVERS)
    assert trial.host_share() == 1 / (2 + device)
