"""The runs of a tuning: the budget, what ends a training early, and which stock loops are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.planted import Effect, Planted, at_once
from torchboost.errors import FactoryError
from torchboost.tuning.report import FRESH_SEED, STOCK, Candidate
from torchboost.tuning.runs import EndedError, RecipeEndedError, Runs

HALF = Candidate(name=STOCK, share=0.5)
OTHER = Candidate(name="a", extra={"a": True}, share=0.5)


def runs(train: Planted | None = None, **more: Any) -> Runs:
    return Runs(**({"train": train or Planted(), "budget": 1e6, "total_steps": 101} | more))


def test_a_run_is_made_once_and_counted():
    train, told = Planted(), []
    made = runs(train, aside=7.0, told=lambda: told.append(1))
    assert made.score(HALF, 0) == made.score(HALF, 0)
    made.score(OTHER, 0)
    assert (len(train.trained), len(told)) == (2, 2)
    assert made.spent == pytest.approx(7.0 + 5.5 + 5.5)
    again = Planted()
    resumed = runs(again, made=dict(made.made))
    assert resumed.spent == 0  # what was asked for decides, not what is there
    resumed.score(HALF, 0)
    assert (resumed.spent, again.trained) == (5.5, [])


def test_a_run_that_does_not_fit_is_not_begun():
    made = runs(budget=100.0)
    made.score(HALF, 0)
    made.limit = 50.0
    made.score(OTHER.at(1.0), 0)  # ten seconds, by the runs of stock
    made.limit = made.spent + 10.4
    with pytest.raises(EndedError, match=r"budget of 100 s does not allow another run; \d+ s are set aside for what"):
        made.score(OTHER.at(1.0), 1)
    made.score(OTHER, 1)


def test_a_recipe_that_is_slow_is_expected_to_stay_slow():
    made = runs(Planted({"a": Effect(time=4.0)}))
    made.score(HALF, 0)
    made.score(OTHER, 0)
    assert made.wall_seconds(OTHER) == pytest.approx(20.5)
    assert made.wall_seconds(OTHER.at(1.0)) == pytest.approx(40.5)
    assert made.wall_seconds(Candidate(name="new")) == pytest.approx(10.5)
    assert made.seconds(OTHER, 1.0) == pytest.approx(40.0, rel=0.01)
    assert made.seconds(Candidate(name="new"), 1.0) == math.inf


def test_set_up_is_spread_over_the_users_run():
    made = runs(Planted(change=lambda c, s, r: {"setup_seconds": 20.0}), total_steps=100_001)
    made.score(HALF, 0)
    assert made.seconds(HALF, 1.0) == pytest.approx(20.0 + 0.1 * 100_000, rel=1e-3)
    assert made.seconds(HALF, 0.5) == pytest.approx(20.0 + 0.1 * 50_000, rel=1e-3)


def test_what_a_training_is_watched_for():
    curve = {"losses": [2.0, 1.0]}
    train = Planted({"a": Effect(points=5.0)}, change=lambda c, s, r: curve if c.name == "a" else {"losses": [3.0]})
    made = runs(train, budget=280.0, aside=0.0)
    for one, seed in (
        (HALF, 0),
        (HALF.at(2.0, 0.5), 0),
        (OTHER, 0),
        (OTHER.at(0.5, 0.5), 0),
        (OTHER.at(1.0), 0),
        (OTHER, 1),
    ):
        made.score(one, seed)
    made.score(HALF.at(1.0), FRESH_SEED)
    made.score(OTHER, FRESH_SEED)
    watched = list(train.watched.values())
    assert [watch.seconds for watch in watched] == pytest.approx(
        [20.0, math.inf, 15.0, 15.0, 30.0, 15.0, math.inf, 15.0]
    )
    assert [list(watch.losses) for watch in watched] == [[], [3.0], [3.0], [2.0, 1.0], [], [], [], []]
    assert [watch.chooses for watch in watched] == [True] * 6 + [False] * 2


def test_a_first_run_that_leaves_no_time_for_a_decision_is_refused():
    for change in ({"too_slow": True, "metric": math.nan, "wall_seconds": 5.0}, {"wall_seconds": 5.0}):
        train = Planted(change=lambda c, s, r, change=change: change)
        made = runs(train, budget=63.0, aside=7.0)
        with pytest.raises(EndedError, match=r"half of a run takes .*5\.0 s, a decision needs at least 7 runs"):
            made.score(HALF, 0)
        assert (made.made, made.spent) == ({}, 12.0)
        assert train.watched[HALF.label, 0].seconds == 4.0
    # A tuning that is continued has shown that it has enough.
    before = runs(budget=90.0)
    before.score(HALF, 0)
    after = runs(budget=90.0, aside=80.0, made=before.made)
    assert after.score(HALF, 0) == before.score(HALF, 0)


def test_a_stock_loop_that_cannot_be_compared_is_an_error():
    with pytest.raises(FactoryError, match=r"stock loop ended with the metric nan \(seed 0\)"):
        runs(Planted(change=lambda c, s, r: {"metric": math.nan})).score(HALF, 0)
    equal = {"metric": 0.9, "first_loss": 0.7, "last_loss": 0.25}
    made = runs(Planted(change=lambda c, s, r: equal))
    made.score(HALF, 0)
    with pytest.raises(FactoryError, match="the same losses and metric for the seeds 0 and 1"):
        made.score(HALF, 1)
    ends = lambda c, seed, r: {"first_loss": 0.7 + 0.01 * seed, "last_loss": 0.0, "metric": 1.0}  # noqa: E731
    made = runs(Planted(change=ends))
    assert [made.score(HALF, seed) for seed in range(3)] == [1.0, 1.0, 1.0]  # trainings may end equally


def test_what_becomes_of_a_training_that_did_not_end():
    for change, outcome in (({"failure": "boom"}, "not usable"), ({"too_slow": True}, "no gain"), ({}, None)):
        made = runs(Planted(change=lambda c, s, r, x=change: {"metric": math.nan, **x} if c.name == "a" else {}))
        made.score(HALF, 0)
        if outcome is None:
            assert made.score(OTHER, 0) == -math.inf
            continue
        with pytest.raises(RecipeEndedError) as ended:
            made.score(OTHER, 0)
        assert ended.value.outcome == outcome


def test_what_does_not_depend_on_each_other_is_made_at_the_same_time():
    train, told = Planted({"b": Effect(time=2.0)}), []
    made = runs(train, at_once=at_once(train), processes=2, told=lambda: told.append(1))
    made.score(HALF, 0)
    slow = Candidate(name="b", extra={"b": True}, share=0.5)
    made.score(OTHER, 0, [(OTHER, 0), (slow, 0), (OTHER, 1)])
    assert train.trained == [(HALF.label, 0), (OTHER.label, 0), (slow.label, 0)]
    assert (len(told), made.spent) == (3, pytest.approx(5.5 + 10.5))
    assert made.wall_seconds(OTHER) == 5.5  # without the seconds in which it was not trained
    # A run that was not asked for decides nothing. It is no rival, and has no times.
    assert [made.of("b"), list(made.asked)] == [[], [(HALF.label, 0), (OTHER.label, 0)]]
    made.score(slow, 0, [(OTHER, 1)])
    assert (len(train.trained), made.spent) == (3, pytest.approx(16.0))
    # A report of two processes is continued by one, with the same time.
    again = Planted()
    resumed = runs(again, made=dict(made.made))
    resumed.score(HALF, 0)
    resumed.score(OTHER, 0, [(slow, 0), (OTHER, 1)])
    assert (again.trained, resumed.spent) == ([], pytest.approx(16.0))


def test_what_is_made_ahead_fits_into_the_budget_too():
    train = Planted()
    made = runs(train, at_once=at_once(train), processes=3)
    made.score(HALF, 0)
    made.limit = made.spent + 6.0
    made.score(OTHER, 0, [(OTHER.at(1.0), 0), (OTHER, 1)])
    assert train.trained[1:] == [(OTHER.label, 0), (OTHER.label, 1)]
    with pytest.raises(EndedError, match="does not allow another run"):
        made.score(OTHER, 2, [(OTHER, 1)])


def test_an_error_of_one_leaves_the_runs_that_were_finished():
    def failing(jobs: Any) -> Any:
        yield from at_once(train)(jobs)
        raise FactoryError("boom")

    train, told = Planted(), []
    made = runs(train, at_once=at_once(train), processes=3, told=lambda: told.append(1))
    made.score(HALF, 0)
    made.at_once = failing
    with pytest.raises(FactoryError, match="boom"):
        made.score(OTHER, 0, [(OTHER, 1)])
    assert (len(made.made), len(told)) == (3, 3)
