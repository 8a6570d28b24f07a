"""Gradients that are handed over, and the optimizer that collects them behind an unchanged loop."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchboost import Accumulator, GradientAccumulation, IncompatibleError
from torchboost.algorithms.grad_accumulation.optimizer import AccumulatingOptimizer


def linear() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_and_grads(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    loss = model(x).square().mean()
    return loss, torch.autograd.grad(loss, list(model.parameters()))


def assert_close(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(list(a.parameters()), list(b.parameters()), rtol=1e-5, atol=1e-6)


def test_full_ragged_and_short_windows_update_like_one_large_batch() -> None:
    model, optimizer = linear()
    raw, plain = linear()
    accumulate = GradientAccumulation(3, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(len(steps)))
    for sizes, counted in (([5, 2, 1], True), ([3, 0, 7], True), ([3, 7], True), ([3, 3], False)):
        x = torch.randn(sum(sizes), 4)
        for part in x.split(sizes):
            loss, grads = loss_and_grads(model, part) if len(part) else (None, [None, None])
            assert accumulate(loss, grads, count=len(part) if counted else None) is loss
            if accumulate.updated:
                scheduler.step()
        assert accumulate.updated == (len(sizes) == 3)
        assert accumulate.flush() == (len(sizes) == 2)
        raw(x).square().mean().backward()
        plain.step()
        plain.zero_grad()
        assert_close(model, raw)
    assert not accumulate.flush()
    assert (len(steps), scheduler.last_epoch) == (4, 2)


def test_gradients_may_be_missing() -> None:
    model, optimizer = linear()
    before = model.weight.detach().clone()
    accumulate = GradientAccumulation(2, optimizer)
    accumulate("a loss of any kind", [None, torch.ones(2)])
    accumulate("a loss of any kind", [None, None])
    assert accumulate.updated
    assert torch.equal(model.weight, before)
    assert model.weight not in optimizer.state
    assert torch.equal(optimizer.state[model.bias]["momentum_buffer"], torch.full((2,), 0.5))


def test_resume_at_every_call_is_bit_identical() -> None:
    def run(model: nn.Module, accumulate: Any, batches: Iterable[torch.Tensor]) -> list[Any]:
        for x in batches:
            accumulate(*loss_and_grads(model, x), count=len(x))
        return [p.tolist() for p in model.parameters()]

    batches = [torch.randn(2 + i % 3, 4, generator=torch.Generator().manual_seed(i)) for i in range(12)]
    for stop in range(1, 12):
        model, optimizer = linear()
        accumulate = GradientAccumulation(3, optimizer)
        run(model, accumulate, batches[:stop])
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), accumulate.state_dict()))
        again, other = linear()
        resumed = GradientAccumulation(3, other)
        for part, state in zip((again, other, resumed), saved, strict=True):
            part.load_state_dict(state)
        assert run(model, accumulate, batches[stop:]) == run(again, resumed, batches[stop:]), stop


def test_a_window_that_is_resumed_with_other_steps_takes_the_mean_of_all() -> None:
    for before, after in ((4, 8), (8, 3)):
        model, optimizer = linear()
        accumulate, resumed = GradientAccumulation(before, optimizer), GradientAccumulation(after, optimizer)
        for number in range(2):
            accumulate(None, [torch.full((2, 4), float(number)), None])
        resumed.load_state_dict(accumulate.state_dict())
        for number in range(2, after):
            resumed(None, [torch.full((2, 4), float(number)), None])
        assert resumed.updated
        moved = optimizer.state[model.weight]["momentum_buffer"]
        torch.testing.assert_close(moved, torch.full((2, 4), sum(range(after)) / after))


def test_bad_input_is_refused_and_changes_nothing() -> None:
    model, optimizer = linear()
    for steps in (0, True, 1.5, "2"):
        with pytest.raises(ValueError, match=f"steps: found {steps!r}"):
            GradientAccumulation(steps, optimizer)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="Linear"):
        GradientAccumulation(2, model)  # pyright: ignore[reportArgumentType]
    accumulate: Any = GradientAccumulation(2, optimizer)
    good = [torch.ones(2, 4), torch.ones(2)]
    with pytest.raises(ValueError, match="found 1, the optimizer has 2"):
        accumulate(0.0, good[:1])
    with pytest.raises(ValueError, match=r"grads\[0\] has shape \(2,\), but its parameter has \(2, 4\)"):
        accumulate(0.0, good[::-1])
    for count in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"count: found {float(count)}"):
            accumulate(0.0, good, count=count)
    assert accumulate.state_dict()["calls"] == 0
    accumulate(0.0, good, count=0)
    with pytest.raises(ValueError, match="found none, but the window began with counts"):
        accumulate(0.0, good)
    with pytest.raises(ValueError, match="holds 1 calls, but a window takes 1"):
        GradientAccumulation(1, optimizer).load_state_dict(accumulate.state_dict())
    with pytest.raises(ValueError, match="found 0 for every micro-batch"):
        accumulate.flush()


# Behind an unchanged loop


def start(steps: int = 3, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, AccumulatingOptimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, inner, AccumulatingOptimizer(inner, Accumulator(steps, model))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 4, generator=generator), torch.randint(0, 2, (4,), generator=generator)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return F.cross_entropy(model(batch(step)[0]), batch(step)[1])


def by_hand(parts: list[list[int]], clip: float | None = None) -> nn.Module:
    """The same network trained by hand: clip each batch, average, update."""
    model, inner, front = start()
    front.direct.remove()
    for part in parts:
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for step in part:
            loss_of(model, step).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            for total, p in zip(sums, model.parameters(), strict=True):
                assert p.grad is not None
                total += p.grad / len(part)
                p.grad = None
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = total
        inner.step()
        inner.zero_grad()
    return model


@pytest.mark.parametrize("first", [True, False], ids=["zero_grad first", "zero_grad last"])
def test_an_unmodified_loop_with_scaler_clipping_and_scheduler(first: bool) -> None:
    model, inner, optimizer = start()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    updated = []
    for step in range(8):
        if first:
            optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if not first:
            optimizer.zero_grad()
        updated.append(optimizer.updated)
    assert updated == [False, False, True, False, False, True, False, False]
    assert optimizer.flush()
    assert not optimizer.flush()
    assert_close(model, by_hand([[0, 1, 2], [3, 4, 5], [6, 7]], clip=0.1))
    assert optimizer.state is inner.state


def test_an_overflow_leaves_its_batch_out_and_nothing_else() -> None:
    model, _, optimizer = start(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        scaler.scale(loss_of(model, step) * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_close(model, by_hand([[0, 2]]))


def test_a_closure_is_called_once_per_step() -> None:
    model, _, optimizer = start(2)
    calls: list[int] = []

    def closure() -> torch.Tensor:
        calls.append(len(calls))
        optimizer.zero_grad()
        loss = loss_of(model, calls[-1])
        loss.backward()
        return loss

    assert all(torch.is_tensor(optimizer.step(closure)) for _ in range(4))
    assert_close(model, by_hand([[0, 1], [2, 3]]))


def grads(optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def taken(optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> list[torch.Tensor]:
    """Take steps with random gradients; return the weights, which are the optimizer's own."""
    for step in steps:
        grads(optimizer, step)
        optimizer.step()
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def same(a: Iterable[torch.Tensor], b: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_resume_in_mid_window_is_bit_identical_and_files_load_both_ways() -> None:
    for stop in range(6):
        model, inner, optimizer = start()
        taken(optimizer, range(stop))
        weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        taken(optimizer, range(stop, 6))
        again, _, resumed = start(seed=1)
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
        taken(resumed, range(stop, 6))
        assert same(model.parameters(), again.parameters()), stop
        inner.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("stop", [1, 2])
def test_a_checkpoint_without_a_window_drops_the_window_that_has_begun(stop: int) -> None:
    _, inner, optimizer = start()
    state = copy.deepcopy(inner.state_dict())
    taken(optimizer, range(stop))
    optimizer.load_state_dict(state)
    _, _, fresh = start()
    assert same(taken(optimizer, range(5, 8)), taken(fresh, range(5, 8)))


@pytest.mark.parametrize("with_window", [True, False])
def test_a_checkpoint_that_is_refused_changes_nothing(with_window: bool) -> None:
    _, _, other = start()
    taken(other, range(1))
    state = {**copy.deepcopy(other.state_dict()), "param_groups": []}
    if not with_window:
        del state["front"]
    _, _, optimizer = start()
    taken(optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="groups"):
        optimizer.load_state_dict(state)
    assert repr(optimizer.state_dict()) == repr(before)
    state = copy.deepcopy(other.state_dict())
    state["front"]["held"] = []
    with pytest.raises(ValueError, match="found 0"):
        optimizer.load_state_dict(state)
    assert repr(optimizer.state_dict()) == repr(before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_go_on_with_the_window_alone(copied: Any) -> None:
    _, _, optimizer = start()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    taken(optimizer, range(4))
    twin = copied(optimizer)
    before = [parameter.detach().clone() for parameter in taken(optimizer, ())]
    theirs = taken(twin, range(4, 7))
    assert same(taken(optimizer, ()), before)
    assert same(taken(optimizer, range(4, 7)), theirs)
    assert not any(torch.equal(a, b) for a, b in zip(theirs, before, strict=True))
    grads(twin, 0)
    with pytest.raises(IncompatibleError, match="was stepped directly"):
        twin.opt.step()


@pytest.mark.parametrize("stop", [2, 3])
def test_a_group_that_is_added_trains_from_there_on(stop: int) -> None:
    """At the end of a window of three, and within one."""
    _, inner, optimizer = start()
    taken(optimizer, range(stop))
    head = nn.Linear(3, 2)
    before = head.weight.detach().clone()
    optimizer.add_param_group({"params": head.parameters()})
    assert len(inner.param_groups) == 2
    taken(optimizer, range(stop, 6))
    assert optimizer.updated
    assert not torch.equal(head.weight, before)
    taken(optimizer, [6])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert optimizer.flush()


def test_another_length_in_mid_window_ends_it_with_its_mean() -> None:
    """As after the algorithm was removed."""
    model, inner, optimizer = start(5)
    for step in range(3):
        optimizer.accumulator.steps = 5 if step < 2 else 1
        loss_of(model, step).backward()
        optimizer.step()
    assert optimizer.updated
    assert_close(model, by_hand([[0, 1, 2]]))
    assert inner.state


@pytest.mark.parametrize("to_none", [True, False])
def test_a_gradient_that_the_loop_sets_to_zero_is_zero_in_the_next_windows(to_none: bool) -> None:
    """A parameter that got one gradient decays afterwards only if the loop keeps gradients of 0, as in torch."""

    def trained(batches: int, behind: bool) -> list[torch.Tensor]:
        parameters = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])
        optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)
        if behind:
            optimizer = AccumulatingOptimizer(optimizer, Accumulator(2, parameters))
        for step in range(8):
            loss = parameters[0].sum() + (parameters[1].sum() if step == 0 else 0)
            (loss / batches).backward()
            if step % batches == batches - 1:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
        return list(parameters)

    torch.testing.assert_close(trained(1, behind=True), trained(2, behind=False))
