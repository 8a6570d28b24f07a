"""Fixed and dynamic loss scales in loops, step for step, with overflows put in by hand."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import batch_for, mlp
from torchboost import optim
from torchboost.algorithms.grad_accumulation.algorithm import Accumulator
from torchboost.algorithms.loss_scale_group.scalers import DynamicLossScale, FixedLossScale
from torchboost.core.algorithm import Target
from torchboost.core.step import TrainStep
from torchboost.errors import IncompatibleError, ScaleCollapseWarning
from torchboost.optim.pipeline import GradientPipeline
from torchboost.optim.transforms import Centralize, ClipNorm

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "ours": lambda p: optim.Adam(p, lr=1e-2),
    "ours with a pipeline": lambda p: optim.Adam(p, lr=1e-2, transforms=(Centralize(), ClipNorm(0.1))),
}


def frozen(*objects) -> bytes:
    buffer = io.BytesIO()
    torch.save([o.state_dict() for o in objects], buffer)
    return buffer.getvalue()


def batch(seed: int, size: int = 6):
    return batch_for(mlp(), torch.Generator().manual_seed(seed), size)


def setup(name: str = "sgd", scaler=None, window: int = 0):
    torch.manual_seed(0)
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    target = Target(model, optimizer, scaler, Accumulator(window, model) if window else None)
    poison = {"value": 1.0}
    step = TrainStep(target, lambda x, y: F.cross_entropy(model(x), y) * poison["value"])
    return model, optimizer, step, poison


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_changes_nothing_but_the_scale(name, value):
    scaler = DynamicLossScale(1024.0, window=2)
    model, optimizer, step, poison = setup(name, scaler)
    for number in range(7):
        poison["value"] = value if number in (0, 3, 4) else 1.0
        before, scale = frozen(model, optimizer), scaler.get_scale()
        out = step(*batch(number))
        assert bool(out.overflow) == (number in (0, 3, 4)) == (not step.updated)
        assert (frozen(model, optimizer) == before) == bool(out.overflow)
        assert float(out.loss_scale) == (scale / 2 if out.overflow else scale * (2 if number in (2, 6) else 1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_overflow_the_weights_are_those_without_a_scale(name):
    plain, _, plain_step, _ = setup(name)
    scaled, _, step, _ = setup(name, DynamicLossScale(2.0**16, window=2))
    for number in range(5):
        plain_step(*batch(number))
        step(*batch(number))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True))


def test_one_micro_batch_with_overflow_skips_the_window_and_the_next_is_normal():
    scaler = DynamicLossScale(1024.0)
    model, optimizer, step, poison = setup("sgd", scaler, window=3)
    clean, _, clean_step, _ = setup("sgd", None, window=3)
    for number in range(6):
        poison["value"] = math.inf if number == 1 else 1.0
        before = frozen(model, optimizer)
        out = step(*batch(number))
        if number == 2:
            assert out.overflow
            assert frozen(model, optimizer) == before
    for number in range(3, 6):
        clean_step(*batch(number))
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), clean.parameters(), strict=True))


def test_resume_in_a_growth_window_and_in_a_window_of_accumulation_is_bit_identical():
    def start():
        return setup("sgd", DynamicLossScale(1024.0, window=3, hysteresis=2), window=2)

    model, optimizer, step, poison = start()
    for number in range(7):
        poison["value"] = math.nan if number == 2 else 1.0
        step(*batch(number))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.state_dict()))
    again, again_optimizer, again_step, again_poison = start()
    again.load_state_dict(saved[0])
    again_optimizer.load_state_dict(saved[1])
    again_step.load_state_dict(saved[2])
    for number in range(7, 16):
        poison["value"] = again_poison["value"] = math.inf if number in (9, 12) else 1.0
        assert step(*batch(number))[1:] == again_step(*batch(number))[1:]
    assert frozen(model, optimizer) == frozen(again, again_optimizer)
    assert step.state_dict()["scaler"] == again_step.state_dict()["scaler"]


def test_clipping_sees_true_gradients_with_a_fused_optimizer():
    def run(scaler):
        model, optimizer, step, _ = setup("adamw fused", scaler)
        GradientPipeline(Centralize(), ClipNorm(0.05)).attach(optimizer)
        for number in range(3):
            step(*batch(number))
        return list(model.parameters())

    assert all(torch.equal(a, b) for a, b in zip(run(None), run(DynamicLossScale()), strict=True))


def test_two_optimizers_share_one_scale_and_only_the_bad_one_is_skipped():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    before = frozen(first), frozen(second)
    scaler = DynamicLossScale(4.0)
    x = torch.ones(1, 2)
    scaled = scaler.scale([first(x).sum() * math.inf, second(x).sum()])
    (scaled[0] + scaled[1]).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert (frozen(first) == before[0], frozen(second) == before[1]) == (True, False)
    assert scaler.get_scale() == 2.0
    assert scaler.overflowed


def test_a_fixed_scale_stays_and_reports_the_overflow():
    scaler = FixedLossScale(32.0)
    model, optimizer, step, poison = setup("sgd", scaler)
    poison["value"] = math.inf
    before = frozen(model, optimizer)
    out = step(*batch(0))
    assert (bool(out.overflow), float(out.loss_scale), step.updated) == (True, 32.0, False)
    assert frozen(model, optimizer) == before


def test_a_fixed_scale_set_inside_a_window_waits_for_the_next():
    scaler = FixedLossScale(32.0)
    plain, _, plain_step, _ = setup("sgd", None, window=2)
    model, _, step, _ = setup("sgd", scaler, window=2)
    for number in range(4):
        plain_step(*batch(number))
        step(*batch(number))
        scaler.set(1024.0)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_the_order_of_calls_is_checked():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = DynamicLossScale()
    with pytest.raises(RuntimeError, match="before scale"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"update\(\) before"):
        scaler.update()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="call it once"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="call it once"):
        scaler.step(optimizer)
    scaler.update()
    with pytest.raises(TypeError, match="optimizer must be"):
        scaler.unscale_(model)  # pyright: ignore[reportArgumentType]


def test_a_closure_is_refused():
    model = nn.Linear(2, 2)
    scaler = DynamicLossScale()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(IncompatibleError, match=r"DynamicLossScale\.step was given a closure"):
        scaler.step(torch.optim.LBFGS(model.parameters()), lambda: 0.0)


def test_gradients_in_float16_are_refused():
    model = nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = DynamicLossScale(4.0)
    scaler.scale(model(torch.ones(1, 2, dtype=torch.float16)).sum()).backward()
    with pytest.raises(IncompatibleError, match="keep the parameters in float32"):
        scaler.step(optimizer)


def test_a_collapsing_scale_warns_and_names_the_gradient():
    model, _, step, poison = setup("sgd", DynamicLossScale(2.0**16))
    poison["value"] = math.inf
    with pytest.warns(ScaleCollapseWarning, match=r"fell from 65536 to 256 .*parameter 5, of shape \(4,\)"):
        assert all(step(*batch(number)).overflow for number in range(8))
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DynamicLossScale(factor=1.0), "factor: found 1.0"),
        (lambda: DynamicLossScale(0.5), "init_scale: found 0.5"),
        (lambda: DynamicLossScale(window=0), "window: found 0"),
        (lambda: FixedLossScale(0.0), "scale: found 0.0"),
        (lambda: FixedLossScale(math.inf), "scale: found inf"),
        (lambda: FixedLossScale(2.0**101), r"allowed are 2\*\*-100 to 2\*\*100"),
    ],
)
def test_bad_settings(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_a_checkpoint_of_another_scaler_is_refused_unchanged():
    scaler = DynamicLossScale(64.0)
    with pytest.raises(ValueError, match="load it into the kind of scaler that saved it"):
        scaler.load_state_dict(FixedLossScale(2.0).state_dict())
    assert scaler.get_scale() == 64.0
