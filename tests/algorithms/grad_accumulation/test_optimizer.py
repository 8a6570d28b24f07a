import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchboost import IncompatibleError
from torchboost.algorithms.grad_accumulation.algorithm import Accumulator
from torchboost.algorithms.grad_accumulation.optimizer import AccumulatingOptimizer


def start(steps: int = 3, seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, inner, AccumulatingOptimizer(inner, Accumulator(steps, model))


def batch(step: int):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 4, generator=generator), torch.randint(0, 2, (4,), generator=generator)


def by_hand_start():
    """The same network, with an optimizer that nothing stands in front of."""
    model, inner, optimizer = start()
    optimizer.direct.remove()
    return model, inner


def windows(model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[list[int]], clip: float | None = None):
    """The same, by hand: clip each batch, average, update."""
    for part in parts:
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for step in part:
            F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            for total, p in zip(sums, model.parameters(), strict=True):
                assert p.grad is not None
                total += p.grad / len(part)
                p.grad = None
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = total
        optimizer.step()
        optimizer.zero_grad()


def assert_close(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(list(a.parameters()), list(b.parameters()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", [True, False], ids=["zero_grad first", "zero_grad last"])
def test_an_unmodified_loop_with_scaler_clipping_and_scheduler(first):
    model, inner, optimizer = start()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    updated = []
    for step in range(8):
        if first:
            optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(batch(step)[0]), batch(step)[1])).backward()
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
    by_hand, plain = by_hand_start()
    windows(by_hand, plain, [[0, 1, 2], [3, 4, 5], [6, 7]], clip=0.1)
    assert_close(model, by_hand)
    assert optimizer.state is inner.state


def test_an_overflow_leaves_its_batch_out_and_nothing_else():
    model, _, optimizer = start(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        loss = F.cross_entropy(model(batch(step)[0]), batch(step)[1])
        scaler.scale(loss * float("inf") if step == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    by_hand, plain = by_hand_start()
    windows(by_hand, plain, [[0, 2]])
    assert_close(model, by_hand)


def test_a_closure_is_called_once_per_step():
    model, _, optimizer = start(2)
    calls = []

    def closure():
        calls.append(len(calls))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch(calls[-1])[0]), batch(calls[-1])[1])
        loss.backward()
        return loss

    assert all(torch.is_tensor(optimizer.step(closure)) for _ in range(4))
    by_hand, plain = by_hand_start()
    windows(by_hand, plain, [[0, 1], [2, 3]])
    assert_close(model, by_hand)


@pytest.mark.parametrize("stop", range(6))
def test_resume_in_mid_window_is_bit_identical(stop):
    def train(model, optimizer, steps) -> None:
        for step in steps:
            F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, _, optimizer = start()
    train(model, optimizer, range(stop))
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(stop, 6))
    again, _, resumed = start(seed=1)
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(again, resumed, range(stop, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_files_load_both_ways():
    _, inner, optimizer = start()
    inner.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(inner.state_dict())


def test_a_step_of_the_optimizer_behind_is_refused():
    model, inner, optimizer = start()
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(IncompatibleError, match="the original optimizer was stepped directly"):
        inner.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.direct.remove()
    inner.step()


def grads(optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def taken(optimizer: torch.optim.Optimizer, steps) -> list[torch.Tensor]:
    for step in steps:
        grads(optimizer, step)
        optimizer.step()
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_go_on_with_the_window_alone(copied):
    _, _, optimizer = start()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    taken(optimizer, range(4))
    twin = copied(optimizer)
    before = [parameter.detach().clone() for parameter in taken(optimizer, ())]
    theirs = taken(twin, range(4, 7))
    assert all(torch.equal(a, b) for a, b in zip(taken(optimizer, ()), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(taken(optimizer, range(4, 7)), theirs, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(theirs, before, strict=True))
    grads(twin, 0)
    with pytest.raises(IncompatibleError, match="was stepped directly"):
        twin.opt.step()


@pytest.mark.parametrize("stop", [2, 3])
def test_a_group_that_is_added_trains_from_there_on(stop):
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


@pytest.mark.parametrize("stop", [1, 2])
def test_a_checkpoint_without_a_window_drops_the_window_that_has_begun(stop):
    _, inner, optimizer = start()
    state = copy.deepcopy(inner.state_dict())
    weights = [parameter.detach().clone() for parameter in taken(optimizer, range(stop))]
    optimizer.load_state_dict(state)
    _, _, fresh = start()
    assert all(torch.equal(a, b) for a, b in zip(weights, taken(fresh, ()), strict=True))
    theirs = taken(fresh, range(5, 8))
    assert all(torch.equal(a, b) for a, b in zip(taken(optimizer, range(5, 8)), theirs, strict=True))


@pytest.mark.parametrize("to_none", [True, False])
def test_a_gradient_that_the_loop_sets_to_zero_is_zero_in_the_next_windows(to_none):
    """A parameter that got one gradient decays afterwards only if the loop keeps gradients of 0, as in torch."""

    def train(optimizer: torch.optim.Optimizer, used: nn.Parameter, rare: nn.Parameter, batches: int) -> None:
        """Step after so many batches."""
        for step in range(8):
            loss = used.sum() + rare.sum() if step == 0 else used.sum()
            (loss / batches).backward()
            if step % batches == batches - 1:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)

    def pair() -> tuple[nn.ParameterList, torch.optim.Optimizer]:
        parameters = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])
        return parameters, torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)

    parameters, inner = pair()
    train(AccumulatingOptimizer(inner, Accumulator(2, parameters)), *parameters, 1)
    by_hand, plain = pair()
    train(plain, *by_hand, 2)
    torch.testing.assert_close(list(parameters), list(by_hand))
