"""The one training step against loops written by hand, and the forward pass that an optimizer repeats."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost import NoEffectWarning, Target, TrainStep
from torchboost.core.step import ClosureOptimizer, Replay, after_closure

CPU = torch.device("cpu")


def make(seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(n: int = 20):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)) for _ in range(n)]


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def step_of(model: nn.Module, optimizer: Any, *parts: Any, loss: Callable[..., Any] = F.cross_entropy) -> TrainStep:
    return TrainStep(Target(model, optimizer, *parts), lambda x, y: loss(model(x), y))


def scaler_of(scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)


@pytest.mark.parametrize("scaled", [False, True])
def test_equals_the_raw_loop_bit_for_bit(scaled: bool):
    (raw, raw_optimizer), (ours, optimizer) = make(), make()
    raw_scaler, scaler = (scaler_of(1024.0) if scaled else None for _ in range(2))
    step = step_of(ours, optimizer, scaler)
    for x, y in batches():
        loss = F.cross_entropy(raw(x), y)
        if raw_scaler is None:
            loss.backward()
            raw_optimizer.step()
        else:
            raw_scaler.scale(loss).backward()
            raw_scaler.unscale_(raw_optimizer)
            raw_scaler.step(raw_optimizer)
            raw_scaler.update()
        raw_optimizer.zero_grad()
        out = step(x, y)
        assert torch.equal(out.loss, loss.detach())
        assert not out.overflow
        assert out.loss_scale == (1 if raw_scaler is None else raw_scaler.get_scale())
    assert same(raw, ours)
    assert raw_scaler is None or raw_scaler.get_scale() > 1024


def test_overflow_is_reported_and_the_update_skipped():
    model, optimizer = make()
    factor = float("inf")
    step = step_of(model, optimizer, scaler_of(1024.0), loss=lambda out, y: F.cross_entropy(out, y) * factor)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    out = step(*batches(1)[0])
    assert out.overflow
    assert not step.updated
    assert out.loss_scale == 512
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    factor = 1.0
    assert not step(*batches(1)[0]).overflow
    assert step.updated
    assert not same(model, make()[0])


def test_what_is_no_loss_is_refused_unchanged():
    for loss, kind, message in (
        (lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"), ValueError, r"shape \(5,\).*mean"),
        (lambda outputs, y: {"logits": outputs}, TypeError, r"a dict; .*Pass a loss_fn"),
        *(
            (lambda outputs, y, extra=extra: (F.cross_entropy(outputs, y), extra), TypeError, "a tuple; .*number of")
            for extra in (torch.ones(5), "5", True)
        ),
    ):
        model, optimizer = make()
        with pytest.raises(kind, match=message):
            step_of(model, optimizer, loss=loss)(*batches(1)[0])
        assert same(model, make()[0])


class Window:
    """The smallest accumulator: k micro-steps per update."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done, self.ready = steps, 0, False

    @contextlib.contextmanager
    def micro_step(self):
        yield
        self.done += 1
        self.ready = self.done % self.steps == 0

    def share(self, loss, count=None):
        return loss / self.steps * (1.0 if count is None else count)

    def flush(self):
        held, self.done = self.done % self.steps, 0
        return held > 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state_dict):
        self.done = state_dict["done"]


def test_updates_when_the_window_is_full_and_flush_with_what_is_there():
    (raw, raw_optimizer), (ours, optimizer) = make(), make()
    step = step_of(ours, optimizer, None, Window(2))
    assert step.flush() is None
    for i, (x, y) in enumerate(batches(7)):
        loss = F.cross_entropy(raw(x), y)
        (loss / 2).backward()
        if i % 2:
            raw_optimizer.step()
            raw_optimizer.zero_grad()
        step(x, y)
        assert step.updated == bool(i % 2)
        assert same(raw, ours)
    out = step.flush()
    assert step.updated
    raw_optimizer.step()
    assert same(raw, ours)
    assert torch.equal(out.loss, loss.detach())
    assert step.flush() is None
    assert not step.updated
    assert step_of(ours, optimizer).flush() is None


def test_a_loss_may_come_with_the_number_of_samples_behind_it():
    (raw, raw_optimizer), (ours, optimizer) = make(), make()
    step = step_of(ours, optimizer, None, Window(1), loss=lambda out, y: (F.cross_entropy(out, y), 2))
    x, y = batches(1)[0]
    for weight in (2, 1):
        raw_optimizer.zero_grad()
        (F.cross_entropy(raw(x), y) * weight).backward()
        raw_optimizer.step()
        step(x, y)
        assert same(raw, ours)
        step.target.accumulator = None


def test_state_round_trip_and_mismatch():
    model, optimizer = make()
    step = step_of(model, optimizer, scaler_of(64.0), Window(3))
    step(*batches(1)[0])
    saved = step.state_dict()
    other = step_of(model, optimizer, scaler_of(2.0), Window(3))
    other.load_state_dict(saved)
    assert other.state_dict() == saved
    with pytest.raises(ValueError, match="same scaler and accumulation"):
        step_of(model, optimizer).load_state_dict(saved)


def test_trainable_parameters_that_are_in_no_optimizer_are_announced():
    model, optimizer = make()
    model.append(nn.Linear(3, 3))
    model.extend(nn.Linear(3, 3, bias=False) for _ in range(4))
    named = r"6 trainable .*: 3\.weight, 3\.bias, 4\.weight, 5\.weight, 6\.weight and 1"
    with pytest.warns(NoEffectWarning, match=named):
        step_of(model, optimizer)
    model[3:].requires_grad_(False)
    step_of(model, optimizer)
    model[3:].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[3:].parameters())})
    step_of(model, optimizer)


# The closure


def test_a_replay_draws_the_same_numbers_and_leaves_the_generator_alone() -> None:
    x = torch.randn(1000, requires_grad=True)
    replay = Replay(lambda: F.dropout(x, 0.5).sum(), CPU)
    assert replay.loss is None
    first = replay.first()
    after = torch.get_rng_state()
    assert torch.equal(replay(), first)
    assert torch.equal(replay(), first)
    assert replay.loss is not None
    assert torch.equal(replay.loss, first)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(F.dropout(x, 0.5).sum(), first)


def test_closures_that_do_not_just_return_the_loss_are_refused() -> None:
    wrong: list[tuple[Callable[[Tensor], Any], type[Exception], str]] = [
        (lambda w: w.sum().item(), TypeError, "returned a float"),
        (lambda w: None, TypeError, "returned a NoneType"),
        (lambda w: w * 2, ValueError, r"shape \(3,\); reduce it"),
        (lambda w: w.detach().sum(), ValueError, "without a gradient"),
        (lambda w: (w.sum().backward(), w.sum())[1], ValueError, r"called backward\(\)"),
    ]
    for closure, error, said in wrong:
        w = nn.Parameter(torch.ones(3))
        with pytest.raises(error, match=said):
            Replay(lambda closure=closure, w=w: closure(w), CPU).backward([w])
    with pytest.raises(NotImplementedError):
        ClosureOptimizer([nn.Parameter(torch.ones(1))], {}).step(lambda: torch.zeros(()))


class Watching(ClosureOptimizer):
    """Notes what it is handed, and descends."""

    seen: list[tuple[float, float]]

    def step(self, closure=None):
        assert isinstance(closure, Replay)
        assert closure.loss is not None
        with torch.no_grad():
            self.seen.append((closure.loss.item(), closure().item()))
            for p in self.param_groups[1]["params"]:
                p.sub_(0.1 * p.grad)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_training_step_hands_over_its_forward_pass(scaled: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    optimizer = Watching([{"params": []}, {"params": model.parameters()}], {})
    optimizer.seen = []
    step = step_of(
        model, optimizer, scaler_of(8.0) if scaled else None, loss=lambda out, y: (F.mse_loss(out, y), len(y))
    )
    x, y = torch.randn(8, 3), torch.randn(8, 3)
    losses = [float(step(x, y).loss) for _ in range(3)]
    assert [first for first, _ in optimizer.seen] == losses
    assert all(first == again for first, again in optimizer.seen)
    assert len(set(losses)) == 3


def test_what_follows_a_closure_follows_each_of_its_calls_or_happens_at_once() -> None:
    done: list[str] = []

    def closure() -> str:
        done.append("closure")
        return "loss"

    for args, kwargs in (((), {"closure": closure}), ((closure,), {})):
        done.clear()
        covered = after_closure(("the optimizer", *args), kwargs, lambda: done.append("act"))
        assert done == []
        assert covered is not None
        (first, *rest), named = covered
        assert first == "the optimizer"
        evaluate = named["closure"] if named else rest[0]
        assert evaluate() == evaluate() == "loss"
        assert done == ["closure", "act"] * 2
    for kwargs in ({}, {"closure": None}):
        done.clear()
        assert after_closure(("the optimizer", None), kwargs, lambda: done.append("act")) is None
        assert done == ["act"]
