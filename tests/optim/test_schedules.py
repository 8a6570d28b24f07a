from __future__ import annotations

import doctest
import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchboost.optim import schedules
from torchboost.optim.schedules import (
    Constant,
    CosineDecay,
    ExponentialDecay,
    InverseDecay,
    NaturalExponentialDecay,
    PerEpoch,
    PiecewiseConstant,
    PolynomialDecay,
    Trapezoid,
    Warmup,
    as_list,
)

RATES = st.floats(0, 10, allow_subnormal=False)
COUNTS = st.integers(1, 40)
DECAYS = (ExponentialDecay, InverseDecay, NaturalExponentialDecay)
EVERY = [
    Constant(0.1),
    PiecewiseConstant((3, 5), (0.3, 0.2, 0.1)),
    *(cls(0.4, decay_rate=0.5, decay_steps=3) for cls in DECAYS),
    PolynomialDecay(0.4, end_lr=0.1, decay_steps=6, power=2.0),
    CosineDecay(0.4, min_lr=0.1, decay_steps=6),
    Warmup(CosineDecay(0.4, decay_steps=6), steps=3),
    PerEpoch(CosineDecay(0.4, decay_steps=3), steps_per_epoch=2),
]


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
def test_decays_stay_in_their_bounds_and_never_rise(drawn, length):
    schedule, high, low = drawn
    rates = as_list(schedule, length)
    slack = 1e-12 * (1 + high)
    assert all(low - slack <= rate <= high + slack for rate in rates)
    assert falling([round(rate, 12) for rate in rates])
    assert math.isclose(rates[0], high, abs_tol=slack)


@given(st.sampled_from(EVERY), st.integers(0, 200))
def test_a_rate_depends_on_the_step_alone(schedule, step):
    assert schedule(step) == as_list(schedule, step + 1)[-1] == schedule(np.int64(step))
    assert type(schedule(step)) is float


@given(RATES, COUNTS, COUNTS, st.floats(0, 1))
def test_warm_up_rises_without_a_jump_into_its_schedule(lr, steps, decay_steps, start):
    decay = CosineDecay(lr, decay_steps=decay_steps)
    warm = Warmup(decay, steps=steps, start_factor=start)
    rates = as_list(warm, steps + 1)
    slack = 1e-12 * (1 + lr)
    assert rates[0] == lr * start
    assert falling([-round(rate, 12) for rate in rates])
    jumps = [b - a for a, b in pairwise(rates)]
    assert all(abs(jump - lr * (1 - start) / steps) <= slack for jump in jumps)
    assert [warm(steps + k) for k in range(5)] == [decay(k) for k in range(5)]


def test_warm_up_may_overlap_its_schedule():
    steps = PiecewiseConstant((2, 6), (0.4, 0.2, 0.1))
    assert as_list(Warmup(steps, steps=4, delay=False), 8) == [0.0, 0.1, 0.1, 0.2 * 0.75, 0.2, 0.2, 0.1, 0.1]


@given(st.sampled_from(DECAYS), COUNTS, st.integers(0, 500))
def test_a_staircase_repeats_the_rate_of_the_last_whole_period(kind, decay_steps, step):
    smooth = kind(0.3, decay_rate=0.7, decay_steps=decay_steps)
    stairs = kind(0.3, decay_rate=0.7, decay_steps=decay_steps, staircase=True)
    assert math.isclose(stairs(step), smooth(step - step % decay_steps), rel_tol=1e-12)


@given(COUNTS, st.floats(0, 2), st.integers(0, 100), st.booleans())
def test_natural_exponential_divides_unless_told_otherwise(decay_steps, rate, step, stairs):
    kind = NaturalExponentialDecay
    published = kind(0.3, decay_rate=rate, decay_steps=decay_steps, staircase=stairs)
    undivided = kind(0.3, decay_rate=rate, decay_steps=decay_steps, staircase=stairs, per_step=True)
    at = step // decay_steps * decay_steps if stairs else step
    assert math.isclose(published(step), 0.3 * math.exp(-rate * at / decay_steps), rel_tol=1e-12)
    assert math.isclose(undivided(step), 0.3 * math.exp(-rate * at), rel_tol=1e-12, abs_tol=1e-300)


def test_polynomial_cycles():
    once = PolynomialDecay(0.4, end_lr=0.1, decay_steps=4)
    again = PolynomialDecay(0.4, end_lr=0.1, decay_steps=4, cycle=True)
    assert as_list(once, 5) == as_list(again, 5)
    assert once(6) == once(9) == again(8) == again(12) == 0.1
    assert again(6) == pytest.approx(0.1 + 0.3 * (1 - 6 / 8))


@given(st.sampled_from(EVERY), COUNTS)
def test_per_epoch_holds_the_rate_for_an_epoch(schedule, length):
    rates = as_list(PerEpoch(schedule, steps_per_epoch=length), 3 * length)
    assert rates == [rate for rate in as_list(schedule, 3) for _ in range(length)]


def test_cosine_equals_torch():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.2)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.01)
    ours = CosineDecay(0.2, min_lr=0.01, decay_steps=10)
    for step in range(11):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
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


def test_a_trapezoid_rises_stays_and_falls():
    rates = as_list(Trapezoid(1.0, total_steps=10, warmup=4, decay=3, end=0.1), 12)
    assert rates == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 0.7, 0.4, 0.1, 0.1])
    longer = as_list(Trapezoid(1.0, total_steps=20, warmup=4, decay=3, end=0.1), 12)
    assert longer[:8] == rates[:8]
    assert Trapezoid(0.3, total_steps=1, decay=1)(0) == 0.3


@pytest.mark.parametrize("rate", [1e308, 1e200])
def test_a_factor_above_one_grows_and_too_much_is_refused(rate):
    growing = ExponentialDecay(1e-7, decay_rate=10.0, decay_steps=100)
    assert growing(700) == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"update \d: found inf; give a finite number"):
        as_list(ExponentialDecay(9.0, decay_rate=rate, decay_steps=1), 3)


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: Constant(math.nan), ValueError, "lr: found nan; give a finite number, at least 0"),
        (lambda: Constant(math.inf), ValueError, "lr: found inf"),
        (lambda: Constant(-0.1), ValueError, "lr: found -0.1"),
        (lambda: Constant(True), TypeError, "lr: found True"),
        (lambda: Constant("0.1"), TypeError, "lr: found '0.1'"),  # pyright: ignore[reportArgumentType]
        (lambda: PiecewiseConstant((2, 2), (1, 1, 1)), ValueError, r"milestones: found \(2, 2\); give increasing"),
        (lambda: PiecewiseConstant((0,), (1, 1)), ValueError, r"milestones\[0\]: found 0; give a whole number, at l"),
        (lambda: PiecewiseConstant((2,), (1,)), ValueError, "1 milestones and 1 rates; give one more rate"),
        (lambda: PiecewiseConstant((2,), (1, -1)), ValueError, r"rates\[1\]: found -1"),
        (lambda: PiecewiseConstant("2", (1, 1)), TypeError, "milestones: found '2'; give a list"),
        (lambda: ExponentialDecay(1, decay_rate=-0.5, decay_steps=1), ValueError, "decay_rate: found -0.5"),
        (lambda: InverseDecay(1, decay_rate=1, decay_steps=0), ValueError, "decay_steps: found 0"),
        (lambda: InverseDecay(1, decay_rate=1, decay_steps=1.5), TypeError, "decay_steps: found 1.5; give a whole"),
        (lambda: InverseDecay(1, decay_rate=1, decay_steps=1, staircase=1), TypeError, "staircase: found 1; give True"),
        (lambda: PolynomialDecay(1, decay_steps=4, power=0), ValueError, "power: found 0; give a finite number above"),
        (lambda: CosineDecay(0.1, min_lr=0.2, decay_steps=4), ValueError, "max_lr 0.1 below min_lr 0.2"),
        (lambda: Trapezoid(0.1, total_steps=5, warmup=3, decay=3), ValueError, "together more than total_steps=5"),
        (lambda: Trapezoid(0.1, total_steps=5, decay=0), ValueError, "decay: found 0"),
        (lambda: Trapezoid(0.1, total_steps=5, decay=2, warmup=-1), ValueError, "warmup: found -1"),
        (lambda: Warmup(0.1, steps=3, start_factor=1.5), ValueError, "start_factor: found 1.5; give a number from 0"),
        (lambda: Warmup(CosineDecay, steps=3), TypeError, "schedule: found <class"),
        (lambda: Warmup(None, steps=3), TypeError, "schedule: found None"),
        (lambda: PerEpoch(0.1, steps_per_epoch=3), TypeError, "schedule: found 0.1; give a function"),
        (lambda: PerEpoch(Constant(0.1), steps_per_epoch=0), ValueError, "steps_per_epoch: found 0"),
        (lambda: Constant(0.1)(-1), ValueError, "step: found -1; give a whole number, at least 0"),
        (lambda: Constant(0.1)(1.0), TypeError, "step: found 1.0; give a whole number"),
        (lambda: as_list(Constant(0.1), 0), ValueError, "steps: found 0"),
        (lambda: as_list(0.1, 2), TypeError, "schedule: found 0.1"),  # pyright: ignore[reportArgumentType]
        (lambda: as_list(lambda step: -step, 2), ValueError, "the learning rate of update 1: found -1"),
    ],
)
def test_bad_settings_are_refused(build, error, text):
    with pytest.raises(error, match=text):
        build()


def test_examples():
    assert doctest.testmod(schedules).attempted
    assert doctest.testmod(schedules).failed == 0
