"""The trial decides by pairs of windows on planted machines, without a clock."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from torchboost.data.pipes import OWN, Variant
from torchboost.data.trial import FEWEST, MOST_PAIRS, Reading, Trial, Window

Machine = Callable[[Window], float]
"""Seconds of waiting per batch in a window."""


def simulated(
    wait: Callable[[Variant], float],
    *,
    rest: Callable[[Variant], float] = lambda variant: 0.01,
    cores: float = 2.0,
    busy: float = 0.0,
    noise: float = 0.02,
    unfit: str = "",
    pins: bool = False,
    can_pin: bool = True,
    answers: int = 400,
    seed: int = 0,
) -> Trial:
    """Answer the windows of a trial as a machine with these times would."""
    draws = random.Random(seed)
    trial = Trial(cores=cores, pins=pins)
    for _ in range(answers):
        if trial.phase == "decided":
            break
        window = trial.window
        if window.watched and unfit:
            trial.answer(unfit)
            continue
        count = window.count or 50

        def drawn(seconds: float) -> float:
            return seconds * draws.lognormvariate(0.0, noise)

        waits = [drawn(wait(window.variant)) for _ in range(count)]
        rests = [drawn(rest(window.variant)) for _ in range(count)]
        trial.answer(Reading(waits=waits, rests=rests, processor=busy * sum(waits), can_pin=can_pin))
    return trial


def asleep(seconds: float) -> Callable[[Variant], float]:
    """Wait as for a data set that sleeps: any number of workers share it, and hide it behind 10 ms of a step."""
    return lambda variant: max(seconds / variant.workers - 0.01, 0.0) if variant.workers else seconds


def test_no_need_no_trial():
    trial = simulated(lambda variant: 0.0004)
    assert (trial.phase, trial.chosen, trial.races) == ("measuring", OWN, [])


def test_a_need_that_comes_later_is_seen():
    trial = Trial(cores=2, pins=False)
    for wait in [0.0] * 50 + [0.02] * 3:
        trial.answer(Reading(waits=[wait] * 10, rests=[0.01] * 10))
    assert trial.phase != "measuring"


def test_one_long_wait_is_no_need():
    trial = Trial(cores=2, pins=False)
    for count in range(40):
        trial.answer(Reading(waits=[0.02 if count % 2 else 0.0] * 10, rests=[0.01] * 10))
    assert trial.phase == "measuring"


def test_a_data_set_that_sleeps_gets_as_many_workers_as_hide_it():
    trial = simulated(asleep(0.02))
    assert trial.chosen.workers == 4
    assert trial.races[0].gain.mid == pytest.approx(3.0, rel=0.05)
    assert len(trial.races) == 1


def test_a_data_set_that_computes_gets_no_more_workers_than_cores():
    seen = set()

    def wait(variant: Variant) -> float:
        seen.add(variant.workers)
        return asleep(0.06)(variant)

    trial = simulated(wait, busy=1.0)
    assert max(seen) == 2
    assert trial.chosen.workers == 2


def test_workers_that_steal_the_step_are_left_out():
    trial = simulated(asleep(0.01), rest=lambda variant: 0.021 if variant.workers else 0.01, busy=1.0)
    assert trial.chosen == OWN
    assert all(race.pairs == 3 for race in trial.races), "a loss is seen early"
    assert [race.variant.workers for race in trial.races] == [2, 1]


def test_one_worker_if_two_steal_too_much():
    stolen = {0: 0.01, 1: 0.011, 2: 0.03}
    trial = simulated(asleep(0.01), rest=lambda variant: stolen[variant.workers], busy=1.0)
    assert trial.chosen.workers == 1


def test_noise_is_seldom_a_gain():
    """A single batch varies by 30 %. Two ways are tried in each trial, and looked at three times at most."""
    trials = [simulated(lambda variant: 0.01, noise=0.3, busy=1.0, seed=seed, answers=2000) for seed in range(60)]
    assert all(trial.phase == "decided" for trial in trials)
    assert all(3 <= race.pairs <= MOST_PAIRS for trial in trials for race in trial.races)
    assert sum(trial.chosen != OWN for trial in trials) <= 4


def test_a_gain_is_never_kept_on_less_than_six_pairs():
    trial = simulated(asleep(0.02))
    assert all(race.pairs >= FEWEST for race in trial.races if race.is_kept)


def test_more_workers_if_waiting_remains():
    waits = {0: 0.05, 1: 0.04, 2: 0.02, 8: 0.0}
    trial = simulated(lambda variant: waits.get(variant.workers, 0.03), cores=1)
    assert trial.chosen.workers == 8


def test_deeper_prefetch_if_waiting_remains():
    trial = simulated(lambda variant: {0: 0.05, 2: 0.02}.get(variant.prefetch * bool(variant.workers), 0.0), busy=1.0)
    assert trial.chosen.prefetch == 4


@pytest.mark.parametrize("keeps_types", [True, False])
def test_pinned_memory_of_workers_unless_it_changes_types(keeps_types):
    faster = simulated(
        asleep(0.02),
        rest=lambda variant: 0.005 if variant.pin else 0.01,
        pins=True,
        can_pin=keeps_types,
    )
    assert faster.chosen == Variant(4, pin=keeps_types)
    left_out = simulated(asleep(0.02), pins=True, unfit="it draws")
    assert (left_out.chosen, left_out.reason) == (OWN, "it draws")


def test_a_fault_ends_the_trial():
    trial = simulated(asleep(0.02), answers=4)
    assert trial.window.variant.workers
    trial.answer("it draws")
    assert (trial.phase, trial.chosen, trial.reason) == ("decided", OWN, "it draws")


def test_a_fault_after_the_trial_ends_the_workers():
    trial = simulated(asleep(0.02))
    assert trial.window == Window(trial.chosen, compared=1)
    trial.answer("differs")
    assert (trial.chosen, trial.reason, trial.window) == (OWN, "differs", Window(OWN))


def test_workers_that_are_slower_over_two_epochs_are_given_up():
    trial = simulated(asleep(0.02))
    for _ in range(2):
        assert trial.chosen.workers
        trial.answer(Reading(waits=[0.03], rests=[0.01]))
    assert trial.chosen == OWN
    assert "longer than loading without them" in trial.reason


def test_a_long_pause_is_no_step():
    reading = Reading(waits=[0.01] * 10, rests=[0.01] * 9 + [60.0])
    assert reading.share > 0.4
    assert Reading().share == 0.0


@pytest.mark.parametrize(("skip", "tail", "left"), [(1, 1, 8), (6, 6, 0), (0, 0, 10)])
def test_the_steady_part_of_a_window(skip, tail, left):
    reading = Reading(waits=list(range(10)), rests=[0.0] * 10)
    assert len(reading.part(skip, tail).waits) == left
