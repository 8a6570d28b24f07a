"""Accumulation: any ragged split gives the gradient of the full batch; windows, checkpoints, failures."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import TinyGPT, batch_for, mlp
from tests.support.trajectories import snapshot
from torchboost import DynamicLossScale
from torchboost.algorithms.compile import Compile
from torchboost.algorithms.grad_accumulation import Accumulator, GradAccumulation
from torchboost.core.algorithm import Target, attach_all
from torchboost.core.step import TrainStep
from torchboost.errors import IncompatibleError


def data(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return batch_for(mlp(), torch.Generator().manual_seed(seed), samples)


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def fresh(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return mlp()


def full_batch(inputs: Tensor, labels: Tensor, model: nn.Module) -> Tensor:
    twin = copy.deepcopy(model)
    F.cross_entropy(twin(inputs), labels).backward()
    return gradients(twin)


def accumulated(sizes: list[int], model: nn.Module, *, counts: bool, spare: int = 0) -> Tensor:
    """Return the gradients of a window over batches of these sizes; ``spare`` micro-steps are missing at its end."""
    model = copy.deepcopy(model)
    inputs, labels = data(sum(sizes))
    accumulator = Accumulator(len(sizes) + spare, model)
    for x, y in zip(inputs.split(sizes), labels.split(sizes), strict=True):
        with accumulator.micro_step():
            accumulator.share(F.cross_entropy(model(x), y), len(y) if counts else None).backward()
    assert accumulator.ready == (spare == 0)
    assert accumulator.flush() == (spare > 0)
    assert accumulator.ready
    return gradients(model)


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@settings(max_examples=60)
@given(sizes=SIZES, spare=st.integers(0, 2))
def test_any_ragged_split_has_the_gradient_of_the_full_batch(sizes: list[int], spare: int) -> None:
    model = fresh()
    wanted = full_batch(*data(sum(sizes)), model)
    assert distance(accumulated(sizes, model, counts=True, spare=spare), wanted) < 1e-6


def test_token_means_are_exact_by_their_tokens() -> None:
    torch.manual_seed(0)
    model = TinyGPT()
    inputs, targets = (tokens.clone() for tokens in batch_for(model, torch.Generator().manual_seed(0), 6))
    for row, valid in enumerate((8, 1, 3, 8, 2, 0)):
        targets[row, valid:] = -100
    twin = copy.deepcopy(model)
    F.cross_entropy(twin(inputs), targets, ignore_index=-100).backward()
    accumulator = Accumulator(3, model)
    for x, y in zip(inputs.split(2), targets.split(2), strict=True):
        with accumulator.micro_step():
            loss = F.cross_entropy(model(x), y, ignore_index=-100)
            accumulator.share(loss, (y != -100).sum()).backward()
    assert distance(gradients(model), gradients(twin)) < 1e-6


def test_micro_batches_without_a_sample_count_nothing() -> None:
    model = fresh()
    inputs, labels = data(6)
    accumulator = Accumulator(2, model)
    for x, y in ((inputs, labels), (inputs[:0], labels[:0])):
        with accumulator.micro_step():
            accumulator.share(F.cross_entropy(model(x), y, reduction="sum") / max(len(y), 1), len(y)).backward()
    assert distance(gradients(model), full_batch(inputs, labels, model)) < 1e-6
    with pytest.raises(ValueError, match=r"found 0 for every micro-batch"), accumulator.micro_step(last=True):
        accumulator.share(model(inputs[:0]).sum(), 0).backward()
    with pytest.raises(ValueError, match=r"loss of nan; .*divide the sum by at least 1"), accumulator.micro_step():
        accumulator.share(F.cross_entropy(model(inputs[:0]), labels[:0]), 0)


def test_equal_batches_give_the_bits_of_a_loop_by_hand() -> None:
    ours = fresh()
    raw = copy.deepcopy(ours)
    target = Target(ours, torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9))
    attached = attach_all(target, [GradAccumulation(steps=3)])
    step = TrainStep(target, lambda x, y: (F.cross_entropy(ours(x), y), len(y)), attached=attached)
    plain = torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9)
    for i in range(9):
        x, y = data(4, seed=i)
        (F.cross_entropy(raw(x), y) / 3).backward()
        if i % 3 == 2:
            plain.step()
            plain.zero_grad()
        step(x, y)
        assert step.updated == (i % 3 == 2)
        assert snapshot(ours) == snapshot(raw)


def test_a_window_can_be_ended_by_its_last_pass() -> None:
    model = fresh()
    inputs, labels = data(7)
    accumulator = Accumulator(5, model)
    for i, part in enumerate((slice(0, 3), slice(3, 7))):
        with accumulator.micro_step(last=i == 1):
            accumulator.share(F.cross_entropy(model(inputs[part]), labels[part]), len(labels[part])).backward()
    assert accumulator.ready
    assert not accumulator.flush()
    assert distance(gradients(model), full_batch(inputs, labels, model)) < 1e-6


def test_another_length_holds_from_the_next_window_on() -> None:
    model = fresh()
    accumulator = Accumulator(3, model)
    ready = []
    for i in range(7):
        with accumulator.micro_step():
            accumulator.share(F.cross_entropy(model(data(2)[0]), data(2)[1])).backward()
        accumulator.steps = 2 if i < 4 else 1
        ready.append(accumulator.ready)
    assert ready == [False, False, True, False, True, True, True]


def test_resume_in_and_between_windows_is_bit_identical() -> None:
    def start(seed: int) -> tuple[nn.Module, TrainStep]:
        model = fresh(seed)
        target = Target(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        target.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        attached = attach_all(target, [GradAccumulation(steps=5)])
        return model, TrainStep(target, lambda x, y: (F.cross_entropy(model(x), y), len(y)), attached=attached)

    batches = [data(3 + i % 3, seed=i) for i in range(12)]
    for stop in (1, 4, 5, 8, 11):
        model, step = start(0)
        for batch in batches[:stop]:
            step(*batch)
        saved = copy.deepcopy((model.state_dict(), step.target.optimizer.state_dict(), step.state_dict()))
        again, resumed = start(1)
        again.load_state_dict(saved[0])
        resumed.target.optimizer.load_state_dict(saved[1])
        resumed.load_state_dict(saved[2])
        for batch in batches[stop:]:
            step(*batch)
            resumed(*batch)
            assert snapshot(model) == snapshot(again), stop
        assert (step.flush() is None) == (resumed.flush() is None)
        assert snapshot(model) == snapshot(again), stop


def test_schedulers_and_scalers_advance_once_per_update() -> None:
    model = fresh()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler)
    attach_all(target, [GradAccumulation(steps=3)])
    factor = [1.0] * 12
    factor[10] = math.inf  # one micro-batch of the last window overflows, and takes its whole update with it
    calls = iter(factor)
    step = TrainStep(target, lambda x, y: F.cross_entropy(model(x), y) * next(calls))
    scheduler = torch.optim.lr_scheduler.StepLR(target.optimizer, 1, gamma=0.5)
    scales, overflows = [], []
    for i in range(12):
        out = step(*data(4, seed=i))
        scales.append(float(out.loss_scale))
        overflows.append(bool(out.overflow))
        if step.updated:
            scheduler.step()
    assert scales == [16.0] * 5 + [32.0] * 6 + [16.0]
    assert overflows == [False] * 11 + [True]
    assert not step.updated
    assert scheduler.last_epoch == 3


def test_a_pass_that_fails_before_its_loss_is_shared_does_not_count() -> None:
    model = fresh()
    inputs, labels = data(6)
    accumulator = Accumulator(2, model)
    with pytest.raises(RuntimeError, match="out of memory"), accumulator.micro_step():
        raise RuntimeError("out of memory")
    for part in (slice(0, 2), slice(2, 6)):
        with accumulator.micro_step():
            accumulator.share(F.cross_entropy(model(inputs[part]), labels[part]), len(labels[part])).backward()
    assert accumulator.ready
    assert distance(gradients(model), full_batch(inputs, labels, model)) < 1e-6


def test_a_pass_that_fails_later_ends_the_window_until_it_is_reset() -> None:
    model = fresh()
    inputs, labels = data(6)
    accumulator = Accumulator(2, model)
    loss = F.cross_entropy(model(inputs[:1]), labels[:1])
    loss.backward()  # a second one through the same graph fails
    with pytest.raises(RuntimeError, match="second time"), accumulator.micro_step():
        accumulator.share(loss, 1).backward()
    for refused in (accumulator.flush, accumulator.state_dict, accumulator.micro_step().__enter__):
        with pytest.raises(RuntimeError, match=r"failed half-way.*reset\(\)"):
            refused()
    accumulator.reset()
    assert all(p.grad is None for p in model.parameters())
    for part in (slice(0, 2), slice(2, 6)):
        with accumulator.micro_step():
            accumulator.share(F.cross_entropy(model(inputs[part]), labels[part]), len(labels[part])).backward()
    assert distance(gradients(model), full_batch(inputs, labels, model)) < 1e-6


def test_one_loss_is_shared_per_micro_step() -> None:
    accumulator, loss = Accumulator(3, mlp()), torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match="outside a micro-step"):
        accumulator.share(loss)
    with accumulator.micro_step():
        with pytest.raises(RuntimeError, match="still open"):
            accumulator.flush()
        accumulator.share(loss).backward()
        with pytest.raises(RuntimeError, match="already called in this micro-step"):
            accumulator.share(loss)
        with pytest.raises(RuntimeError, match="still open"), accumulator.micro_step():
            pass
    with pytest.raises(RuntimeError, match="without a call of share"), accumulator.micro_step():
        (loss / 3).backward()


def test_bad_input_is_refused() -> None:
    for steps in (0, -1, True, 2.0):
        with pytest.raises(ValueError, match=f"steps: found {steps!r}"):
            Accumulator(steps, mlp())  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match=f"steps: found {steps!r}"):
            GradAccumulation(steps=steps)  # pyright: ignore[reportArgumentType]
    accumulator, loss = Accumulator(3, mlp()), torch.ones(())
    with accumulator.micro_step():
        for count in (-1, math.nan, math.inf):
            with pytest.raises(ValueError, match=f"found {float(count)}"):
                accumulator.share(loss, count)
        accumulator.share(loss, 4)
    with accumulator.micro_step():
        with pytest.raises(ValueError, match="found none, but the window began with counts"):
            accumulator.share(loss)
        accumulator.share(loss, 2)
    plain = Accumulator(3, mlp())
    with plain.micro_step():
        plain.share(loss)
    with pytest.raises(ValueError, match="found one, but the window began without"), plain.micro_step():
        plain.share(loss, 4)


def test_checkpoints_that_do_not_fit_are_refused() -> None:
    model = mlp()
    accumulator = Accumulator(3, model)
    x, y = data(4)
    with accumulator.micro_step():
        accumulator.share(F.cross_entropy(model(x), y)).backward()
    state = accumulator.state_dict()
    with pytest.raises(ValueError, match="6 gradients do not fit the 2 parameters"):
        Accumulator(3, nn.Linear(2, 2)).load_state_dict(state)
    with pytest.raises(ValueError, match="do not fit"):
        Accumulator(3, nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))).load_state_dict(state)
    other = Accumulator(2, model)  # ends the window of 3 that was begun
    other.load_state_dict(state)
    ready = []
    for _ in range(4):
        with other.micro_step():
            other.share(F.cross_entropy(model(x), y)).backward()
        ready.append(other.ready)
    assert ready == [False, True, False, True]


@pytest.mark.parametrize(
    "damage", [{"index": 3}, {"index": None}, {"weight": math.nan}, {"phase": "open"}, {"more": 1}]
)
def test_a_damaged_window_is_refused_and_nothing_changes(damage: dict[str, Any]) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = Target(model, optimizer, DynamicLossScale(2.0))
    attached = attach_all(target, [GradAccumulation(steps=3)])
    step = TrainStep(target, lambda x, y: F.cross_entropy(model(x), y), attached=attached)
    step(*data(4))
    saved = copy.deepcopy(step.state_dict())
    step(*data(4))
    before = copy.deepcopy(step.state_dict())
    saved["accumulator"]["window"] |= damage
    saved["scaler"]["state"][0] = 64.0
    with pytest.raises(ValueError, match="the checkpoint's window is damaged"):
        step.load_state_dict(saved)
    assert repr(step.state_dict()) == repr(before)


def test_the_target_has_one_accumulator_and_gives_it_back() -> None:
    model = mlp()
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1))
    attached = attach_all(target, [GradAccumulation(steps=2)])
    accumulator = target.accumulator
    assert isinstance(accumulator, Accumulator)
    with pytest.raises(IncompatibleError, match="already"):
        attach_all(target, [GradAccumulation(steps=2)])
    attached.remove()
    assert target.accumulator is None
    with accumulator.micro_step():
        accumulator.share(model(data(2)[0]).sum()).backward()
    assert accumulator.ready


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_refused(mode: str) -> None:
    on_a_device = mlp().to("meta")
    for compiled in (torch.compile(on_a_device, mode=mode), copy.deepcopy(on_a_device)):
        if compiled._compiled_call_impl is None and not hasattr(compiled, "_orig_mod"):
            compiled.compile(mode=mode)
        with pytest.raises(IncompatibleError, match=r"CUDA graphs.*no-cudagraphs"):
            Accumulator(2, compiled)
    target = Target(on_a_device, torch.optim.SGD(on_a_device.parameters(), lr=0.1))
    with pytest.raises(IncompatibleError, match="CUDA graphs"):
        attach_all(target, [GradAccumulation(steps=2), Compile(mode=mode)])
    assert on_a_device._compiled_call_impl is None
    Accumulator(2, torch.compile(on_a_device, mode="max-autotune-no-cudagraphs"))
    Accumulator(2, torch.compile(on_a_device))
    Accumulator(2, torch.compile(mlp(), mode=mode))  # a CPU has no CUDA graphs
