"""The one training step against loops written by hand."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchboost.core.algorithm import Target
from torchboost.core.step import TrainStep
from torchboost.errors import NoEffectWarning


def make(seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(n: int = 20):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)) for _ in range(n)]


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_equals_the_raw_loop_bit_for_bit():
    raw, raw_optimizer = make()
    ours, optimizer = make()
    step = TrainStep(Target(ours, optimizer), lambda x, y: F.cross_entropy(ours(x), y))
    for x, y in batches():
        loss = F.cross_entropy(raw(x), y)
        loss.backward()
        raw_optimizer.step()
        raw_optimizer.zero_grad()
        out = step(x, y)
        assert torch.equal(out.loss, loss.detach())
        assert not out.overflow
        assert out.loss_scale == 1
    assert same(raw, ours)


def test_equals_the_raw_loop_with_a_grad_scaler():
    raw, raw_optimizer = make()
    ours, optimizer = make()
    raw_scaler, scaler = (torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4) for _ in range(2))
    step = TrainStep(Target(ours, optimizer, scaler), lambda x, y: F.cross_entropy(ours(x), y))
    for x, y in batches():
        raw_scaler.scale(F.cross_entropy(raw(x), y)).backward()
        raw_scaler.unscale_(raw_optimizer)
        raw_scaler.step(raw_optimizer)
        raw_scaler.update()
        raw_optimizer.zero_grad()
        assert step(x, y).loss_scale == raw_scaler.get_scale()
    assert same(raw, ours)
    assert raw_scaler.get_scale() > 1024


def test_overflow_is_reported_and_the_update_skipped():
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = TrainStep(Target(model, optimizer, scaler), lambda x, y: F.cross_entropy(model(x), y) * x.new_tensor(factor))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    (x, y), factor = batches(1)[0], float("inf")
    out = step(x, y)
    assert out.overflow
    assert not step.updated
    assert out.loss_scale == 512
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    factor = 1.0
    assert not step(x, y).overflow
    assert step.updated
    assert not same(model, make()[0])


def test_what_is_no_loss_is_refused_unchanged():
    for loss_of, kind, message in (
        (lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"), ValueError, r"shape \(5,\).*mean"),
        (lambda outputs, y: {"logits": outputs}, TypeError, r"a dict; .*Pass a loss_fn"),
        *(
            (lambda outputs, y, extra=extra: (F.cross_entropy(outputs, y), extra), TypeError, "a tuple; .*number of")
            for extra in (torch.ones(5), "5", True)
        ),
    ):
        model, optimizer = make()
        step = TrainStep(Target(model, optimizer), lambda x, y, f=loss_of, m=model: f(m(x), y))
        with pytest.raises(kind, match=message):
            step(*batches(1)[0])
        assert same(model, make()[0])


class Window:
    """The smallest accumulator: k micro-steps per update."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.done = 0
        self.ready = False

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


def test_updates_when_the_window_is_full():
    raw, raw_optimizer = make()
    ours, optimizer = make()
    step = TrainStep(Target(ours, optimizer, accumulator=Window(2)), lambda x, y: F.cross_entropy(ours(x), y))
    for i, (x, y) in enumerate(batches(6)):
        (F.cross_entropy(raw(x), y) / 2).backward()
        if i % 2:
            raw_optimizer.step()
            raw_optimizer.zero_grad()
        step(x, y)
        assert step.updated == bool(i % 2)
        assert same(raw, ours)


def test_flush_updates_with_what_is_there():
    raw, raw_optimizer = make()
    ours, optimizer = make()
    step = TrainStep(Target(ours, optimizer, accumulator=Window(3)), lambda x, y: F.cross_entropy(ours(x), y))
    assert step.flush() is None
    x, y = batches(1)[0]
    step(x, y)
    assert not step.updated
    out = step.flush()
    assert step.updated
    loss = F.cross_entropy(raw(x), y)
    (loss / 3).backward()
    raw_optimizer.step()
    assert same(raw, ours)
    assert torch.equal(out.loss, loss.detach())
    assert step.flush() is None
    assert not step.updated
    assert TrainStep(Target(ours, optimizer), ours).flush() is None


def test_a_loss_may_come_with_the_number_of_samples_behind_it():
    raw, raw_optimizer = make()
    ours, optimizer = make()
    target = Target(ours, optimizer, accumulator=Window(1))
    step = TrainStep(target, lambda x, y: (F.cross_entropy(ours(x), y), 2))
    x, y = batches(1)[0]
    (F.cross_entropy(raw(x), y) * 2).backward()
    raw_optimizer.step()
    step(x, y)
    assert same(raw, ours)
    target.accumulator = None
    raw_optimizer.zero_grad()
    F.cross_entropy(raw(x), y).backward()
    raw_optimizer.step()
    step(x, y)
    assert same(raw, ours)


def test_state_round_trip_and_mismatch():
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    step = TrainStep(Target(model, optimizer, scaler, Window(3)), lambda x, y: F.cross_entropy(model(x), y))
    step(*batches(1)[0])
    saved = step.state_dict()
    other_scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    other = TrainStep(Target(model, optimizer, other_scaler, Window(3)), lambda x, y: F.cross_entropy(model(x), y))
    other.load_state_dict(saved)
    assert other.state_dict() == saved
    bare = TrainStep(Target(model, optimizer), lambda x, y: F.cross_entropy(model(x), y))
    with pytest.raises(ValueError, match="same scaler and accumulation"):
        bare.load_state_dict(saved)


def test_trainable_parameters_that_are_in_no_optimizer_are_announced():
    model, optimizer = make()
    model.append(nn.Linear(3, 3))
    model.extend(nn.Linear(3, 3, bias=False) for _ in range(4))
    with pytest.warns(
        NoEffectWarning, match=r"6 trainable .*: 3\.weight, 3\.bias, 4\.weight, 5\.weight, 6\.weight and 1"
    ):
        TrainStep(Target(model, optimizer), lambda x: model(x).sum())
    model[3:].requires_grad_(False)
    TrainStep(Target(model, optimizer), lambda x: model(x).sum())
    model[3:].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[3:].parameters())})
    TrainStep(Target(model, optimizer), lambda x: model(x).sum())
