"""A trial runs copies: the originals, their hooks and all random generators stay as they are."""

from __future__ import annotations

import math
import random
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchboost.algorithms import Autocast, ChannelsLast, Compile, FusedOptimizer
from torchboost.calibration.trial import Trial, _Contestant, free_bytes, needed_bytes, streams_kept
from torchboost.core.algorithm import Target
from torchboost.core.torch_private import compiled_graphs
from torchboost.errors import IncompatibleError

LEVERS = {"fused_optimizer": FusedOptimizer(), "channels_last": ChannelsLast(), "autocast": Autocast()}


def network() -> nn.Sequential:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 36, 2)]
    return nn.Sequential(*layers)


def portrait(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return [tensor.clone() for tensor in [*model.state_dict().values(), *state]]


def test_the_originals_and_the_random_streams_stay():
    model, x = network(), torch.randn(4, 3, 8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    gradients = [p.grad for p in model.parameters()]
    called = []
    model.register_forward_hook(lambda *_: called.append(1))
    before, groups = portrait(model, optimizer), [{**group} for group in optimizer.param_groups]
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with streams_kept(model):
        trial = Trial(model, optimizer, ((x,), {}), LEVERS)
        for levers in ([], ["fused_optimizer"], list(LEVERS)):
            assert trial.build(levers, within=60) >= 0
            assert min(trial.sample(within=60)) > 0
            trial.promote()
        random.random()
        np.random.rand()
        torch.rand(1)
    assert all(map(torch.equal, before, portrait(model, optimizer)))
    assert [{**group} for group in optimizer.param_groups] == groups
    assert all(p.grad is grad for p, grad in zip(model.parameters(), gradients, strict=True))
    assert called == []
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert np.array_equal(np.random.get_state()[1], streams[2])


def test_weights_of_the_copies_do_not_move():
    model, x = network(), torch.randn(4, 3, 8, 8)
    trial = Trial(model, torch.optim.SGD(model.parameters(), lr=1e9), ((x,), {}), LEVERS)
    for _ in range(3):
        assert all(seconds < float("inf") for seconds in trial.sample(within=60))
    copied = trial._incumbent.model
    assert all(map(torch.equal, model.parameters(), copied.parameters()))
    assert not torch.equal(model[1].running_mean, copied[1].running_mean)


class ReturnsALoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, *, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


def test_the_loss_of_the_model_is_used_and_inputs_are_copied():
    model = ReturnsALoss()
    x, labels = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    trial = Trial(model, torch.optim.SGD(model.parameters(), lr=0.1), ((x,), {"labels": labels}), {})
    model.layer.register_forward_pre_hook(lambda module, args: args[0].zero_())
    trial.sample(within=60)
    assert x.abs().max() > 0
    assert trial._incumbent._gradients is not None
    assert [gradient.shape for gradient in trial._incumbent._gradients] == [()]


def test_a_model_without_a_backward_pass_is_refused():
    model = nn.Linear(2, 2)

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).detach()

    with pytest.raises(IncompatibleError, match="no output of the model depends"):
        Trial(Detached(), torch.optim.SGD(model.parameters(), lr=0.1), ((torch.randn(1, 2),), {}), {})


def test_what_cannot_be_copied_is_said():
    model = nn.Linear(2, 2)
    model.lock = (each for each in ())  # generators cannot be copied
    with pytest.raises(TypeError, match="cannot be copied"):
        Trial(model, torch.optim.SGD(model.parameters(), lr=0.1), ((torch.randn(1, 2),), {}), {})


def test_a_lever_that_fails_on_this_rank_is_told_to_the_others_before_it_raises():
    model, x = nn.Linear(2, 2), torch.randn(1, 2)
    told: list[list[float]] = []

    def reduce(numbers: list[float]) -> list[float]:
        told.append(numbers)
        return numbers

    trial = Trial(model, torch.optim.SGD(model.parameters(), lr=0.1), ((x,), {}), {}, reduce=reduce)
    with pytest.raises(KeyError):
        trial.build(["unknown"], within=60)
    assert told[-1][1] == float("inf")


def test_a_failure_of_another_rank_raises_here_too():
    model, x = nn.Linear(2, 2), torch.randn(1, 2)
    failing: list[bool] = []

    def reduce(numbers: list[float]) -> list[float]:
        return [float("inf")] * len(numbers) if failing else numbers

    trial = Trial(model, torch.optim.SGD(model.parameters(), lr=0.1), ((x,), {}), LEVERS, reduce=reduce)
    failing.append(True)
    with pytest.raises(IncompatibleError, match="another rank"):
        trial.build(["fused_optimizer"], within=60)


class Sharing(nn.Linear):
    """A copy of it has the same weight."""

    def __deepcopy__(self, memo: dict[int, object]) -> Sharing:
        made = Sharing(self.in_features, self.out_features)
        made.weight = self.weight
        return made


def test_a_closed_trial_holds_no_tensors_and_leaves_shared_ones():
    model, x = nn.Sequential(nn.Linear(3, 3), Sharing(3, 3)), torch.randn(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    before = portrait(model, optimizer)
    trial = Trial(model, optimizer, ((x,), {}), LEVERS)
    first = trial._incumbent
    trial.build(["autocast"], within=60.0)
    dropped = trial._challenger
    trial.build(["fused_optimizer"], within=60.0)
    assert dropped.model[0].weight.numel() == 0
    assert first.model[0].weight.numel() == 9
    trial.promote()
    assert first.model[0].weight.numel() == 0
    last = trial._incumbent
    trial.close()
    for each in (first, dropped, last):
        assert {p.numel() for p in each.model[0].parameters()} == {0}
        assert not each.optimizer.state
    assert all(map(torch.equal, before, portrait(model, optimizer)))


def test_memory_is_estimated():
    model = nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert needed_bytes(model, optimizer) == 2 * 4 * 4_000_000
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    assert needed_bytes(model, optimizer) == 2 * 4 * 4_000_000 + 2 * 4  # and the counters of steps
    momentum = torch.optim.SGD(model.parameters(), momentum=0.9)
    momentum.step()
    assert needed_bytes(model, momentum) == 2 * 3 * 4_000_000
    model.register_buffer("table", torch.zeros(1000))
    assert needed_bytes(model, momentum) == 2 * 3 * 4_000_000 + 2 * 4000
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compile_only = Compile(backend="aot_eager")
    trial = Trial(model, optimizer, ((x,), {"labels": x}), {"compile": compile_only})
    trial.build(["compile"], within=600)
    graphs = compiled_graphs()
    with compile_only.attach(Target(model, optimizer)):
        model(x, labels=x).backward()
    assert compiled_graphs() == graphs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
def test_a_compilation_that_takes_too_long_is_interrupted_and_a_later_one_works():
    model, x = network(), torch.randn(4, 3, 8, 8)
    trial = Trial(model, torch.optim.SGD(model.parameters(), lr=0.1), ((x,), {}), {"compile": Compile()})
    with pytest.raises(TimeoutError, match=r"longer than the 0\.5 s"):
        trial.build(["compile"], within=0.5)
    assert max(trial.sample(within=60)) < float("inf")
    assert trial.build(["compile"], within=600) > 0
    assert max(trial.sample(within=60)) < float("inf")


def test_steps_that_take_too_long_count_as_infinitely_slow():
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.pause = nn.Linear(2, 2), 0.0

        def forward(self, x: Tensor) -> Tensor:
            time.sleep(self.pause)
            return self.layer(x)

    model, x = Slow(), torch.randn(4, 2)
    trial = Trial(model, torch.optim.SGD(model.parameters(), lr=0.1), ((x,), {}), {})
    model.pause = 60.0
    with pytest.raises(TimeoutError, match="longer than"):
        trial.build([], within=0.05)
    trial._challenger = trial_contestant(model, x)
    assert sorted(map(math.isinf, trial.sample(within=0.05))) in ([False, True], [True, True])


def trial_contestant(model: nn.Module, x: Tensor) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _Contestant((model, optimizer), ((x,), {}), [], None, nullcontext)
