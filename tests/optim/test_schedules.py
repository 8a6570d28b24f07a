"""Schedules as functions of the update, the forms of ``lr``, and schedules under torch's schedulers."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import pickle
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, SequentialLR

from tests.support.versions import COPIES_LAST_RATES
from torchboost import optim
from torchboost.optim import (
    SGD,
    Constant,
    CosineDecay,
    ExponentialDecay,
    InverseDecay,
    Listed,
    NaturalExponentialDecay,
    PerEpoch,
    PiecewiseConstant,
    PolynomialDecay,
    ScheduleLR,
    Warmup,
    as_list,
)
from torchboost.optim.schedules import resolve_lr

RATES = st.floats(0, 10, allow_subnormal=False)
COUNTS = st.integers(1, 40)
DECAYS = (ExponentialDecay, InverseDecay, NaturalExponentialDecay)
EVERY = [
    Constant(0.1),
    PiecewiseConstant((3, 5), (0.3, 0.2, 0.1)),
    *(kind(0.4, decay_rate=0.5, decay_steps=3) for kind in DECAYS),
    PolynomialDecay(0.4, end_lr=0.1, decay_steps=6, power=2.0),
    CosineDecay(0.4, min_lr=0.1, decay_steps=6),
    Warmup(CosineDecay(0.4, decay_steps=6), steps=3),
    PerEpoch(CosineDecay(0.4, decay_steps=3), steps_per_epoch=2),
]
WARM = Warmup(CosineDecay(0.2, decay_steps=8), steps=3)
STEEP = ExponentialDecay(0.1, decay_rate=0.5, decay_steps=2)


def falling(rates: list[float]) -> bool:
    return all(a >= b for a, b in pairwise(rates))


@st.composite
def decaying(draw: st.DrawFn) -> tuple[Any, float, float]:
    """Draw a schedule that never rises, with its highest rate and the lower bound."""
    low, high = sorted((draw(RATES), draw(RATES)))
    steps, rate = draw(COUNTS), draw(st.floats(0, 1))
    kind = draw(st.sampled_from([*DECAYS, PolynomialDecay, CosineDecay, PiecewiseConstant]))
    if kind in DECAYS:
        return kind(high, decay_rate=rate, decay_steps=steps, staircase=draw(st.booleans())), high, 0.0
    if kind is PolynomialDecay:
        return kind(high, end_lr=low, decay_steps=steps, power=draw(st.floats(0.1, 4))), high, low
    if kind is CosineDecay:
        return kind(high, min_lr=low, decay_steps=steps), high, low
    return kind((steps, steps + 3), (high, (high + low) / 2, low)), high, low


@given(decaying(), COUNTS)
def test_decays_keep_their_bounds_and_never_rise(drawn, length):
    schedule, high, low = drawn
    rates = as_list(schedule, length)
    slack = 1e-12 * (1 + high)
    assert all(low - slack <= rate <= high + slack for rate in rates)
    assert falling([round(rate, 12) for rate in rates])
    assert math.isclose(rates[0], high, abs_tol=slack)


@given(st.sampled_from(EVERY), st.integers(0, 200), COUNTS)
def test_a_rate_depends_on_the_step_alone(schedule, step, length):
    assert schedule(step) == as_list(schedule, step + 1)[-1] == schedule(np.int64(step))
    assert type(schedule(step)) is float
    by_epoch = as_list(PerEpoch(schedule, steps_per_epoch=length), 3 * length)
    assert by_epoch == [rate for rate in as_list(schedule, 3) for _ in range(length)]


@given(RATES, COUNTS, COUNTS, st.floats(0, 1))
def test_warm_up_rises_without_a_jump_into_its_schedule(lr, steps, decay_steps, start):
    decay = CosineDecay(lr, decay_steps=decay_steps)
    warm = Warmup(decay, steps=steps, start_factor=start)
    rates = as_list(warm, steps + 1)
    assert rates[0] == lr * start
    assert falling([-round(rate, 12) for rate in rates])
    assert all(abs(b - a - lr * (1 - start) / steps) <= 1e-12 * (1 + lr) for a, b in pairwise(rates))
    assert [warm(steps + k) for k in range(5)] == [decay(k) for k in range(5)]


@given(st.sampled_from(DECAYS), COUNTS, st.integers(0, 500))
def test_a_staircase_repeats_the_rate_of_the_last_whole_period(kind, decay_steps, step):
    smooth = kind(0.3, decay_rate=0.7, decay_steps=decay_steps)
    stairs = kind(0.3, decay_rate=0.7, decay_steps=decay_steps, staircase=True)
    assert math.isclose(stairs(step), smooth(step - step % decay_steps), rel_tol=1e-12)


@given(COUNTS, st.floats(0, 2), st.integers(0, 100), st.booleans())
def test_natural_exponential_divides_unless_told_otherwise(decay_steps, rate, step, stairs):
    options: dict[str, Any] = {"decay_rate": rate, "decay_steps": decay_steps, "staircase": stairs}
    at = step // decay_steps * decay_steps if stairs else step
    published = NaturalExponentialDecay(0.3, **options)(step)
    undivided = NaturalExponentialDecay(0.3, **options, per_step=True)(step)
    assert math.isclose(published, 0.3 * math.exp(-rate * at / decay_steps), rel_tol=1e-12)
    assert math.isclose(undivided, 0.3 * math.exp(-rate * at), rel_tol=1e-12, abs_tol=1e-300)


def test_forms_of_single_schedules():
    overlapping = Warmup(PiecewiseConstant((2, 6), (0.4, 0.2, 0.1)), steps=4, delay=False)
    assert as_list(overlapping, 8) == [0.0, 0.1, 0.1, 0.2 * 0.75, 0.2, 0.2, 0.1, 0.1]

    once = PolynomialDecay(0.4, end_lr=0.1, decay_steps=4)
    again = PolynomialDecay(0.4, end_lr=0.1, decay_steps=4, cycle=True)
    assert as_list(once, 5) == as_list(again, 5)
    assert once(6) == once(9) == again(8) == again(12) == 0.1
    assert again(6) == pytest.approx(0.1 + 0.3 * (1 - 6 / 8))

    assert ExponentialDecay(1e-7, decay_rate=10.0, decay_steps=100)(700) == pytest.approx(1.0)  # it may grow
    for rate in (1e308, 1e200):
        with pytest.raises(ValueError, match=r"update \d: found inf; give a finite number"):
            as_list(ExponentialDecay(9.0, decay_rate=rate, decay_steps=1), 3)

    optimizer = optimizer_of(lr=0.2)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.01)
    for step in range(11):
        assert CosineDecay(0.2, min_lr=0.01, decay_steps=10)(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()


def test_schedules_are_values():
    assert CosineDecay(1, decay_steps=5) == CosineDecay(1.0, min_lr=0, decay_steps=np.int64(5))
    assert repr(Warmup(Constant(0.1), steps=2)) == (
        "Warmup(schedule=Constant(lr=0.1), steps=2, start_factor=0.0, delay=True)"
    )
    assert len({PiecewiseConstant([2], [1, 0.5]), PiecewiseConstant((2,), (1.0, Fraction(1, 2)))}) == 1
    assert type(CosineDecay(np.float32(0.5), decay_steps=5)(1)) is float
    with pytest.raises(AttributeError):
        Constant(0.1).lr = 0.2  # pyright: ignore[reportAttributeAccessIssue]


@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=20))
def test_a_list_of_rates_gives_entry_t_at_update_t(entries):
    for given_as in (list, tuple, torch.tensor, np.array, Listed):
        rate = resolve_lr(given_as(entries))
        assert rate is not None
        assert as_list(rate, len(entries)) == entries
        with pytest.raises(IndexError, match=f"ended at step {len(entries) - 1}, but step {len(entries)} was requ"):
            rate(len(entries))


def test_a_number_needs_no_schedule_and_a_function_is_called_with_the_step():
    for value in (0.1, 0, 1, np.float32(0.1), torch.tensor(0.1), torch.tensor(1), np.array(0.1)):
        assert resolve_lr(value) is None
    for result in (0.25, np.float32(0.25), torch.tensor(0.25), np.array(0.25)):
        rate = resolve_lr(lambda step, result=result: step * result)
        assert rate is not None
        assert (rate(3), type(rate(3))) == (0.75, float)
        assert resolve_lr(rate) is rate
    for result in (math.nan, -0.1, None, True, "0.1", torch.ones(2)):
        rate = resolve_lr(lambda step, result=result: result, name="weight_decay")
        assert rate is not None
        with pytest.raises((TypeError, ValueError), match=r"weight_decay at step 4: found .*; give a finite number"):
            rate(4)
    assert pickle.loads(pickle.dumps(resolve_lr(WARM))) == resolve_lr(WARM)


def optimizer_of(groups: int = 1, kind: Any = torch.optim.SGD, lr: Any = 1.0, **settings: Any) -> torch.optim.Optimizer:
    return kind([{"params": [nn.Parameter(torch.ones(3) + i)]} for i in range(groups)], lr=lr, **settings)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def train(optimizer: torch.optim.Optimizer, scheduler: Any, updates: range) -> None:
    for update in updates:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.cos(param.detach() * (update + 1))
        optimizer.step()
        scheduler.step()


def stored(state: Any) -> Any:
    """Save and load as a checkpoint is: only tensors and plain values pass."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_one_schedule_sets_every_group_groups_may_have_their_own_and_a_tensor_is_filled_in_place():
    optimizer = optimizer_of(2)
    scheduler = ScheduleLR(optimizer, WARM)
    train(optimizer, scheduler, range(2))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    train(optimizer, scheduler, range(2, 5))
    assert rates_of(optimizer) == scheduler.get_last_lr() == [WARM(5)] * 3
    for tensor in [False, True]:
        lr = torch.tensor(1.0, dtype=torch.float64) if tensor else 1.0
        optimizer = optimizer_of(2, torch.optim.AdamW, lr)
        for group in optimizer.param_groups:
            group["lr"] = lr.clone() if isinstance(lr, torch.Tensor) else lr
        rates = [group["lr"] for group in optimizer.param_groups]
        scheduler = ScheduleLR(optimizer, [WARM, STEEP])
        for step in range(12):
            assert rates_of(optimizer) == [WARM(step), STEEP(step)]
            assert [float(rate) for rate in scheduler.get_last_lr()] == [WARM(step), STEEP(step)]
            train(optimizer, scheduler, range(step, step + 1))
        if tensor:
            pairs = list(zip(optimizer.param_groups, rates, scheduler.get_last_lr(), strict=True))
            assert all(group["lr"] is rate for group, rate, _ in pairs)
            assert not COPIES_LAST_RATES or all(last is not rate for _, rate, last in pairs)


@settings(max_examples=40)
@given(
    st.sampled_from([*itertools.product((torch.optim.SGD, torch.optim.Adam), (False, True), (False, True))]),
    st.integers(0, 9),
)
def test_a_resumed_run_is_bit_identical(form, at):
    kind, tensor, scheduler_last = form

    def build() -> tuple[torch.optim.Optimizer, ScheduleLR]:
        optimizer = optimizer_of(2, kind, torch.tensor(1.0) if tensor else 1.0, fused=True)
        return optimizer, ScheduleLR(optimizer, [WARM, WARM])

    whole, scheduler = build()
    train(whole, scheduler, range(10))
    first, scheduler = build()
    train(first, scheduler, range(at))
    saved = stored({"optimizer": first.state_dict(), "scheduler": scheduler.state_dict()})
    second, scheduler = build()
    for old, new in zip(first.param_groups, second.param_groups, strict=True):
        new["params"][0].data.copy_(old["params"][0].data)
    for part in ("optimizer", "scheduler") if scheduler_last else ("scheduler", "optimizer"):
        (second if part == "optimizer" else scheduler).load_state_dict(saved[part])
    train(second, scheduler, range(at, 10))
    assert rates_of(second) == rates_of(whole)
    built = optimizer_of(lr=torch.tensor(1.0) if tensor else 1.0)  # the step alone is enough
    scheduler = ScheduleLR(built, WARM)
    scheduler.load_state_dict({"last_epoch": at, "lr_lambdas": [None]})
    assert "lr_lambdas" not in scheduler.state_dict()
    assert rates_of(built) == scheduler.get_last_lr() == pytest.approx([WARM(at)])
    if at:
        built = optimizer_of()
        assert ScheduleLR(built, WARM, last_epoch=at - 1).last_epoch == at
        assert rates_of(built) == [WARM(at)]
    for ours, theirs in zip(second.param_groups, whole.param_groups, strict=True):
        assert torch.equal(ours["params"][0], theirs["params"][0])


def test_a_list_lasts_for_its_updates():
    optimizer = optimizer_of()
    scheduler = ScheduleLR(optimizer, Listed([0.3, 0.2]))
    train(optimizer, scheduler, range(2))
    assert rates_of(optimizer) == [0.2]
    with pytest.raises(IndexError, match="ended at step 1, but step 3 was requested"):
        scheduler.step()

    def ended(step: int) -> float:
        raise IndexError("none at all")

    with pytest.raises(IndexError, match="none at all"):
        ScheduleLR(optimizer_of(), ended)


def test_it_works_with_torchs_own_schedulers():
    optimizer = optimizer_of()
    scheduler: Any = SequentialLR(optimizer, [ScheduleLR(optimizer, STEEP), ScheduleLR(optimizer, WARM)], [3])
    seen = []
    for update in range(6):
        seen += rates_of(optimizer)
        train(optimizer, scheduler, range(update, update + 1))
    assert seen == [*as_list(STEEP, 3), *as_list(WARM, 3)]
    train(optimizer, ChainedScheduler([ScheduleLR(optimizer, STEEP)]), range(1))
    assert rates_of(optimizer) == [STEEP(1)]

    for schedule in (WARM, STEEP):  # a schedule as the factor of torch's LambdaLR
        optimizer = optimizer_of()
        scheduler = LambdaLR(optimizer, schedule)
        train(optimizer, scheduler, range(4))
        assert rates_of(optimizer) == [schedule(4)]
        LambdaLR(optimizer_of(), schedule).load_state_dict(scheduler.state_dict())
    optimizer = optimizer_of(2)
    optimizer.param_groups[1]["lr"] = 0.5
    scheduler = LambdaLR(optimizer, lambda step: Warmup(Constant(0.2), steps=4)(step) / 0.2)
    train(optimizer, scheduler, range(2))
    assert rates_of(optimizer) == [0.5, 0.25]
    assert stored(scheduler.state_dict())["lr_lambdas"] == [None, None]


def test_the_name_of_torch_leads_to_torchs_schedulers_and_ours():
    assert optim.lr_scheduler.OneCycleLR is torch.optim.lr_scheduler.OneCycleLR
    assert optim.lr_scheduler.ScheduleLR is ScheduleLR
    assert set(torch.optim.lr_scheduler.__all__) < set(optim.lr_scheduler.__all__)
    assert all(hasattr(optim.lr_scheduler, name) for name in optim.lr_scheduler.__all__)
    assert "lr_scheduler" in dir(optim)


def rule(value: Any) -> Any:
    return lambda: SGD([nn.Parameter(torch.ones(1))], lr=value)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: PiecewiseConstant((2, 2), (1, 1, 1)), ValueError, r"milestones: found \(2, 2\); give increasing"),
    (lambda: PiecewiseConstant((0,), (1, 1)), ValueError, r"milestones\[0\]: found 0; give a whole number, at l"),
    (lambda: PiecewiseConstant((2,), (1,)), ValueError, "1 milestones and 1 rates; give one more rate"),
    (lambda: PiecewiseConstant((2,), (1, -1)), ValueError, r"rates\[1\]: found -1"),
    (lambda: PiecewiseConstant("2", (1, 1)), TypeError, "milestones: found '2'; give a list"),
    (lambda: PolynomialDecay(1, decay_steps=4, power=0), ValueError, "power: found 0; give a finite number above"),
    (lambda: CosineDecay(0.1, min_lr=0.2, decay_steps=4), ValueError, "max_lr 0.1 below min_lr 0.2"),
    (lambda: Warmup(0.1, steps=3, start_factor=1.5), ValueError, "start_factor: found 1.5; give a number from 0"),
    (lambda: Warmup(CosineDecay, steps=3), TypeError, "schedule: found <class"),
    (lambda: Warmup(None, steps=3), TypeError, "schedule: found None"),
    (lambda: Constant(0.1)(-1), ValueError, "step: found -1; give a whole number, at least 0"),
    (lambda: Constant(0.1)(1.0), TypeError, "step: found 1.0; give a whole number"),
    (lambda: as_list(Constant(0.1), 0), ValueError, "steps: found 0"),
    (lambda: as_list(0.1, 2), TypeError, "schedule: found 0.1"),  # pyright: ignore[reportArgumentType]
    (lambda: as_list(lambda step: -step, 2), ValueError, "the learning rate of update 1: found -1"),
    *((lambda rates=rates: Listed(rates), (TypeError, ValueError), "rates") for rates in ([], [math.nan], ["0"], 0.1)),
    (rule(math.nan), ValueError, "lr: found nan; give a finite number, at least 0"),
    (rule(torch.tensor(-1.0)), ValueError, "lr: found -1.0"),
    *((rule(v), TypeError, "give a number, a list or 1-d tensor with") for v in (True, "0.1", None, {0: 0.1})),
    *((rule(empty), ValueError, "lr: found an empty list; give one entry per") for empty in ([], torch.ones(0))),
    (rule(torch.ones(2, 2)), ValueError, r"lr: found a tensor of shape \(2, 2\); give a 0-d tensor"),
    (rule([0.1, math.nan]), ValueError, r"lr\[1\]: found nan"),
    (rule([0.1, "0.1"]), TypeError, r"lr\[1\]: found '0.1'"),
    (rule([False]), TypeError, r"lr\[0\]: found False"),
    (rule(CosineDecay), TypeError, "lr: found <class.*such as Constant"),
    (lambda: ScheduleLR(optimizer_of(), 0.1), TypeError, "schedule: found 0.1; give a function of the step"),
    (lambda: ScheduleLR(optimizer_of(), [0.1]), TypeError, r"schedule\[0\]: found 0.1; give .* or Listed"),
    (lambda: ScheduleLR(optimizer_of(2), [WARM]), ValueError, "1 schedules and 2 param groups; give one"),
    (lambda: ScheduleLR(optimizer_of(), WARM, -2), ValueError, "last_epoch: found -2"),
    (lambda: ScheduleLR(optimizer_of(), lambda step: -1.0), ValueError, "schedule at step 0: found -1.0"),
    (lambda: ScheduleLR(nn.Linear(1, 1), WARM), TypeError, "not an Optimizer"),
    (lambda: ScheduleLR(optimizer_of(), WARM).load_state_dict({"step": 1}), ValueError, r"keys \['step'\]; it must"),
    (lambda: ScheduleLR(optimizer_of(), WARM).load_state_dict({"last_epoch": -1}), ValueError, "found -1; give"),
]


WRONG: dict[str, tuple[Any, ...]] = {
    "float": (math.nan, math.inf, -0.1, True, "0.1"),
    "int": (0, -1, 1.5, True, None),
    "bool": (1, None),
    "Schedule": (0.1, CosineDecay),
}


def test_bad_settings_are_refused():
    for schedule, field in ((one, field) for one in EVERY for field in dataclasses.fields(one)):
        for wrong in WRONG.get(str(field.type), ()):
            with pytest.raises((TypeError, ValueError), match=rf"{field.name}: found .*; give "):
                dataclasses.replace(schedule, **{field.name: wrong})
    for call, error, text in REFUSED:
        with pytest.raises(error, match=text):
            call()
