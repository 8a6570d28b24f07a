"""A trial stays within 110 % of its seconds, whatever the levers do. The time is scripted."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from torchboost.calibration.calibration import Calibration
from torchboost.calibration.search import Price, search

KERNEL = 0.02
"""Share of a step that is completed after an interrupt."""
COPY = 0.5
"""Steps that it takes to copy the pair."""


class Scripted:
    """A bench whose clock moves by what it builds and runs. The trial begins with two plain steps.

    Args:
        step: Seconds of a plain step.
        factors: Lever -> how many times as long a step takes with it.
        prices: Lever -> seconds that it takes to build, such as compilation.
        interrupts: Whether a build or a step that takes too long can be interrupted.
    """

    def __init__(
        self, step: float, factors: dict[str, float], prices: dict[str, float], *, interrupts: bool, noise: float = 0.05
    ) -> None:
        self.step, self.factors, self.prices, self.interrupts, self.noise = step, factors, prices, interrupts, noise
        self.random = random.Random(1)
        self.incumbent: tuple[str, ...] = ()
        self.challenger: tuple[str, ...] = ()
        self.now = (COPY + 2) * step
        self.longest = 0.0

    def _seconds(self, levers: tuple[str, ...]) -> float:
        factor = math.prod(self.factors[lever] for lever in levers)
        return self.step * factor * self.random.lognormvariate(0.0, self.noise)

    def _spend(self, seconds: float, within: float, kernel: float) -> bool:
        """Let time pass; return whether the work was interrupted."""
        late = self.interrupts and seconds > within
        spent = within + kernel if late else seconds
        self.now += spent
        self.longest = max(self.longest, spent)
        return late

    def build(self, levers: Sequence[str], *, within: float) -> float:
        chosen, price = tuple(levers), sum(self.prices.get(lever, 0.0) for lever in levers)
        one = self._seconds(chosen)
        if self._spend(price + COPY * self.step + 2 * one, within, KERNEL * one):
            raise TimeoutError("its first steps take longer than the trial had left")
        self.challenger = chosen
        return price

    def sample(self, *, within: float) -> tuple[float, float]:
        base, own = self._seconds(self.incumbent), self._seconds(self.challenger)
        # The challenger is first in every second pair of a trial, beginning with the first one.
        if self._spend(base + own, within, KERNEL * max(base, own)):
            return math.inf, own if own <= within else math.inf
        return base, own

    def promote(self) -> None:
        self.incumbent = self.challenger

    def elapsed(self) -> float:
        return self.now


STEPS = (0.001, 0.01, 0.1, 0.5, 2.0)
SEQUENCES = (
    {"slow": 60.0, "nothing": 1.0, "gains": 0.8},
    {"gains": 0.8, "slow": 60.0, "compile": 0.7},
    {"nothing": 1.0, "gains": 0.9, "little": 0.97, "compile": 0.9},
    {"slow": 60.0, "slower": 80.0, "slowest": 400.0},
    {"gains": 0.5, "more": 0.5, "costs": 1.05},
    {"costs": 1.1, "gains": 0.9, "compile": 60.0},
)
BUDGETS = (12, 20, 30, 100, 1000)
"""In plain steps."""


def test_no_sequence_of_levers_takes_more_than_its_share() -> None:
    """If nothing can be interrupted, one build or pair of steps that was begun in time is completed."""
    for interrupts in [True, False]:
        tried = 0
        for step, factors, budget, price in itertools.product(STEPS, SEQUENCES, BUDGETS, (0.1, 5.0, 200.0)):
            seconds = min(60.0, budget * step)
            if (COPY + 2) * step > seconds:
                continue
            bench = Scripted(step, factors, {"compile": price}, interrupts=interrupts)
            found = search(
                list(factors),
                bench,
                seconds=seconds,
                steps=100 * budget,
                prices={"compile": Price(expected=5.0)},
                undecided=dict.fromkeys(factors, True),
            )
            tried += bench.incumbent != ()
            over = KERNEL * 2 * max(factors.values()) * step if interrupts else bench.longest
            assert bench.now <= 1.1 * seconds + over
            slow = [v for v in found[0] if v.kept and factors[v.lever] >= 60]
            # Nothing speaks against a lever for which no time was left; it is as without a trial.
            assert all("on as usual" in v.reason for v in slow), (step, factors, budget)
        assert tried > 50


def test_a_lever_that_is_interrupted_before_its_first_pair_is_not_kept() -> None:
    """It is on without a trial. Its warm-up just fits, and the step of the first pair does not."""
    for budget in [20, 60, 100, 126, 140, 200]:
        bench = Scripted(0.5, {"slow": 60.0}, {}, interrupts=True, noise=0.0)
        (verdict,) = search(["slow"], bench, seconds=0.5 * budget, undecided={"slow": True})[0]
        assert not verdict.kept


def test_a_price_that_is_worth_it_makes_the_trial_longer():
    for calibrate, steps, expected, wanted in [
        ("auto", 10_000, 27.0, 37.0),  # 1 % of the run and the price
        ("auto", 10_000, 36.0, 48.0),  # three quarters are set aside for the price
        ("auto", 10_000, 38.0, 10.0),  # it would take more than 5 % of the run
        ("auto", 10_000, 7.0, 10.0),  # it fits as it is
        ("auto", 5_000, 27.0, 5.0),
        ("auto", 100_000, 70.0, 130.0),
        ("auto", None, 27.0, 3.0),
        (12.5, 10_000, 27.0, 12.5),
    ]:
        made = Calibration(levers=(), prior=frozenset(), calibrate=calibrate, total_steps=steps)
        assert made.seconds(0.1, Price(expected=expected, best_ratio=1.5)) == pytest.approx(wanted)


def test_a_price_is_worth_it_if_the_run_saves_three_times_what_it_pays():
    for times, ratio, wanted in [(4, 1.5, 37.0), (5, 1.5, 10.0), (1, 1.05, 10.0)]:
        made = Calibration(levers=(), prior=frozenset(), calibrate="auto", total_steps=10_000)
        price = Price(expected=27.0, best_ratio=ratio, times=times)
        assert made.seconds(0.1, price) == pytest.approx(wanted)


def test_a_dearer_form_makes_the_trial_longer_if_it_is_worth_it():
    """It may take 5 % of the run with what was spent before; a user's number of seconds stays."""
    for calibrate, steps, wanted in [
        ("auto", 200_000, 250.0),
        ("auto", 40_000, 0.0),
        ("auto", None, 0.0),
        (12.5, 200_000, 0.0),
    ]:
        made = Calibration(levers=(), prior=frozenset(), calibrate=calibrate, total_steps=steps)
        assert made.longer(50.0, 0.1, Price(expected=150.0, best_ratio=1.15)) == pytest.approx(wanted)
