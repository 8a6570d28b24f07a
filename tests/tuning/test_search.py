"""The search of rates and lengths, on planted trainings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.planted import POINT, Effect, Planted, race
from torchboost.tuning.report import STOCK, Candidate, Run, Start
from torchboost.tuning.search import MULTIPLES, SHARES, Search, best_rate, next_multiples, next_share

NO_NUMBER = {"metric": math.nan}


def next_multiple(*given: Any, **more: Any) -> float | None:
    return next(iter(next_multiples(*given, **more)), None)


def searched(train: Planted, names: str = "", **more: Any) -> Search:
    found = race(train, names, **more).search
    found.make()
    return found


def multiples(train: Planted, name: str) -> list[str]:
    """The labels of the runs of a recipe at half of the steps with the first seed."""
    return [
        label
        for label, seed in train.trained
        if label.startswith(name) and label.endswith("50% of the steps") and not seed
    ]


def test_the_multiples_go_beyond_an_edge_but_not_for_ever():
    scores: dict[float, float] = {}
    asked = []
    while (multiple := next_multiple(scores)) is not None:
        asked.append(multiple)
        scores[multiple] = multiple
    assert asked == [1.0, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0]
    inside = dict.fromkeys(MULTIPLES, 0.0) | {1.0: 1.0}
    assert next_multiple(inside) is None
    low = dict.fromkeys(MULTIPLES, 0.0) | {0.5: 1.0}
    assert next_multiple(low) == 0.25
    assert next_multiple({**low, 0.25: 0.9}) is None
    assert next_multiple(dict.fromkeys(MULTIPLES, -math.inf)) is None
    assert next_multiple({1.0: 0.5}, (1.0,)) is None


def test_a_dip_that_chance_may_have_made_does_not_end_the_search_of_a_rate():
    dip = {1.0: 0.50, 0.5: 0.496, 2.0: 0.48}
    assert next_multiple(dip) is None
    assert next_multiple(dip, tolerance=0.003) is None
    assert next_multiple(dip, tolerance=0.005) == 0.25
    assert next_multiple({**dip, 0.25: 0.49}, tolerance=0.005) is None
    assert next_multiple({**dip, 0.25: 0.51}, tolerance=0.005) == 0.125
    assert next_multiple({**dip, 2.0: 0.499, 0.25: 0.49}, tolerance=0.005) == 4.0
    assert next_multiple({**dip, 0.25: 0.497}, tolerance=0.005) == 0.125
    flat = {**dip, 2.0: 0.498, 0.25: 0.499, 0.125: 0.498, 4.0: 0.499}
    assert next_multiple(flat, tolerance=0.005) == 0.0625
    assert next_multiple({**flat, 0.0625: 0.5}, tolerance=0.005) is None  # four more than the grid


@pytest.mark.parametrize("best", [1 / 8, 0.25, 0.5, 1.0, 2.0, 8.0, 16.0])
@pytest.mark.parametrize("start", [None, 1 / 64, 1 / 16, 0.5, 1.0, 4.0, 16.0, 64.0])
def test_a_start_shortens_the_search_of_a_rate_and_never_narrows_it(best: float, start: float | None):
    scores: dict[float, float] = {}
    while (multiple := next_multiple(scores, start=start)) is not None:
        scores[multiple] = -(math.log2(multiple / best) ** 2)
    assert best_rate(scores) == best
    assert len(scores) <= (7 if start is None else 4 if start == best else 10)


def test_a_start_at_which_nothing_is_learned_is_left():
    dead = {16.0: -math.inf, 1.0: -math.inf}
    assert next_multiple({**dead}, start=16.0) == 0.5
    assert next_multiple(dict.fromkeys((16.0, *MULTIPLES), -math.inf), start=16.0) is None
    assert next_multiple({1.0: 0.5}, (1.0,), 16.0) is None


def test_equal_rates_leave_the_users():
    assert best_rate({1.0: 0.9, 0.5: 0.9, 4.0: 0.9}) == 1.0
    assert best_rate({0.25: 0.9, 2.0: 0.9, 1.0: 0.8}) == 2.0


@pytest.mark.parametrize("needed", [0.1, 0.2, 0.45, 0.5, 0.8, 0.95, 1.0, 2.0])
@pytest.mark.parametrize("start", [None, 0.2, 0.45, 0.81, 1.0])
def test_the_fewest_steps_are_found_in_few_trials(needed: float, start: float | None):
    passed: dict[float, bool] = {}
    while (share := next_share(SHARES, passed, start)) is not None:
        passed[share] = share >= needed
    assert min((share for share, passes in passed.items() if passes), default=None) == next(
        (share for share in SHARES if share >= needed), None
    )
    assert next(iter(passed)) == (0.5 if start is None else 0.8 if start == 0.81 else start)
    assert len(passed) <= (5 if start is None else 2 if start == needed else 6)
    assert next_share([], {}) is None


def test_every_recipe_gets_the_same_search_and_the_best_rate_of_it():
    train = Planted({STOCK: Effect(best=0.25), "a": Effect(best=2.0, points=4), "b": Effect(best=16.0, points=1)})
    found = searched(train, "ab")
    assert [len(multiples(train, name)) for name in (STOCK, "a", "b")] == [5, 4, 7]
    rates = {name: finding.candidate.rate for name, finding in found.findings.items()}
    assert rates == {STOCK: 0.25, "a": 2.0, "b": 16.0}
    assert found.rate is not None
    assert found.rate.best == 0.25
    assert found.rate.change == pytest.approx(8 * POINT, abs=POINT)
    assert {seed for _, seed in train.trained} == {0, 1}


def test_the_search_begins_where_it_is_told_and_tries_all_rates_of_stock():
    effects = {STOCK: Effect(best=0.25, needed=0.8), "a": Effect(best=2.0, needed=0.3, points=1)}
    starts = {STOCK: Start(share=0.8), "a": Start(rate=2.0, share=0.3)}
    train, usual = Planted(effects, noise=0.1), Planted(effects, noise=0.1)
    found, wanted = searched(train, "ab", starts=starts), searched(usual, "ab")
    assert found.plans() == wanted.plans()
    assert [len(multiples(train, name)) for name in (STOCK, "a", "b")] == [5, 3, 3]
    lengths = [label for label, seed in train.trained if label.startswith("a") and seed == 1]
    assert lengths[0] == "a, 2 times the rate, 30% of the steps"
    assert len(train.trained) < len(usual.trained)


def test_the_target_is_that_of_the_better_rate_at_full_length():
    """At half of the steps a higher rate looks better; at full length the user's own is."""
    early = lambda c, s, r: {"metric": r.metric + 9 * POINT * (c.share == 0.5 and c.rate == 2)}  # noqa: E731
    found = searched(Planted(change=early))
    assert found.findings[STOCK].rates[2.0] > found.findings[STOCK].rates[1.0]
    assert found.rate is not None
    assert (found.rate.best, found.levers.rate) == (1.0, 1.0)


def test_fewer_steps_have_the_rate_that_is_best_for_them():
    """At half of the steps twice the rate keeps the metric; at full length the user's own is the best."""
    early = lambda c, s, r: {"metric": r.metric + 4 * POINT * (c.share <= 0.5 and c.rate == 2)}  # noqa: E731
    found = searched(Planted({STOCK: Effect(needed=0.55, late=2.0)}, change=early, noise=0.05))
    assert found.rate is not None
    assert found.rate.best == 1.0
    assert [(plan.rate, plan.share) for plan in found.plans()] == [(2.0, 0.5)]


def test_a_fixed_rate_is_kept_but_not_for_an_optimizer_that_has_none_of_the_users():
    muon = Candidate(name="Muon", recipe={"optimizer": "muon", "lr": 0.02})
    other = Candidate(name="a", extra={"a": True})
    for rates, stock, best in ((True, 5, 0.25), (False, 1, 1.0)):
        train = Planted({STOCK: Effect(best=0.25), "Muon": Effect(best=0.5, points=3)})
        found = searched(train, recipes=[Candidate(name=STOCK), muon, other], rates=rates)
        assert [len(multiples(train, name)) for name in (STOCK, "Muon at")] == [stock, 4]
        assert found.levers.rate == best
        assert found.rate is None if not rates else found.rate is not None
        section = found.findings["Muon"].candidate.section
        assert (section["optimizer"], section["lr"], section.get("rate", 1.0)) == ("muon", 0.01, best)


def test_the_fewest_steps_of_stock_are_found_within_a_rung():
    for needed in (0.3, 0.45, 0.7, 1.0):
        found = searched(Planted({STOCK: Effect(needed=needed)}, noise=0.1))
        assert found.findings[STOCK].candidate.share == pytest.approx(needed, abs=0.051)
        assert found.plans() == [found.findings[STOCK].candidate]


def test_a_recipe_is_only_shortened_as_far_as_it_can_be_the_fastest():
    train = Planted(
        {STOCK: Effect(needed=0.5), "a": Effect(needed=0.3, points=1), "b": Effect(needed=0.3, time=3.0, points=1)}
    )
    found = searched(train, "ab")
    assert [plan.name for plan in found.plans()] == ["a", STOCK]
    assert found.findings["b"].outcome == "no gain"
    assert found.findings["b"].reason == f"more steps take longer than {found.findings['a'].candidate.words}"
    assert not [label for label, seed in train.trained if label.startswith("b") and seed == 1]


def test_a_recipe_that_is_behind_stock_at_half_of_the_steps_leaves_unless_it_is_faster():
    for time, outcome in ((1.0, "no gain"), (0.99, "no gain"), (0.7, None)):
        found = searched(
            Planted({"a": Effect(points=-0.4, needed=0.9, time=time), STOCK: Effect(needed=0.5)}, noise=0.0), "a"
        )
        finding = found.findings["a"]
        assert finding.outcome == (outcome or "no gain")
        assert finding.reason.startswith("at half of the steps it ends ") == (outcome is not None)


def test_the_recipes_that_promise_most_are_shortened_first():
    """Stock and the next one first; of the others that which is better at half of the steps."""
    effects = {"a": Effect(points=-9.0), "b": Effect(points=1.0, needed=0.8), "c": Effect(points=3.0, needed=0.7)}
    train = Planted(effects, noise=0.1)
    found = searched(train, "abc")
    second = dict.fromkeys(label.split(",")[0] for label, seed in train.trained if seed == 1)
    assert list(second) == [STOCK, "c"]
    assert [plan.name for plan in found.plans()] == ["c", STOCK]
    assert found.findings["b"].outcome == "no gain"


def test_a_length_without_a_chance_gets_no_second_seed():
    train = Planted({"a": Effect(points=9.0, needed=0.85, late=4.0)}, noise=0.1)
    searched(train, "a")
    seeds: dict[str, list[int]] = {}
    for label, seed in train.trained:
        seeds.setdefault(label, []).append(seed)
    assert seeds["a, 50% of the steps"] == [0]  # it loses 19 points
    assert seeds["a, 75% of the steps"] == [0, 1]  # it loses nothing


def test_what_ends_a_recipe():
    def ends(**change: Any):
        return lambda c, s, r: {**NO_NUMBER, **change} if c.name == "a" else {}

    for change, outcome, reason in (
        (ends(failure="RuntimeError: boom"), "not usable", "its training raised RuntimeError: boom"),
        (ends(too_slow=True), "no gain", "more than 3 times as long as stock's"),
        (ends(), "lost", "diverged at every rate"),
        (ends(hopeless=True), "lost", "diverged at every rate"),
    ):
        found = searched(Planted(change=change), "a")
        assert found.findings["a"].outcome == outcome
        assert reason in found.findings["a"].reason
        assert found.findings[STOCK].outcome is None

    late = lambda c, s, r: {**NO_NUMBER, "failure": "boom"} if (c.name, s) == ("a", 1) else {}  # noqa: E731
    found = searched(Planted({"a": Effect(points=30.0)}, change=late), "a")
    assert (found.findings["a"].outcome, found.findings["a"].change) == ("not usable", None)


def test_levers_that_fail_end_the_search():
    levers = Candidate(name="levers: fast", extra={"fast": True})
    others = Candidate(name="a", extra={"fast": True, "a": True})
    fails = lambda c, s, r: {**NO_NUMBER, "failure": "boom"} if c.name != STOCK else {}  # noqa: E731
    found = searched(Planted(change=fails), recipes=[levers, others])
    outcomes = {name: (finding.outcome, finding.reason) for name, finding in found.findings.items()}
    assert outcomes["levers: fast"] == ("not usable", "its training raised boom")
    assert outcomes["a"] == ("not tried", "levers: fast: its training raised boom")
    assert found.plans() == []


def test_the_search_takes_half_of_the_budget_and_keeps_what_it_found():
    whole = Planted({STOCK: Effect(needed=0.5), "a": Effect(points=2, needed=0.4), "b": Effect(points=2, needed=0.3)})
    all_of_it = searched(whole, "ab")
    for share in (0.2, 0.4, 0.6, 0.8):
        budget = 2 * share * all_of_it.runs.spent
        train = Planted(whole.effects)
        found = searched(train, "ab", budget=max(budget, 150.0))
        assert found.runs.spent <= 0.5 * max(budget, 150.0)
        assert train.trained == whole.trained[: len(train.trained)]
        left = [finding for finding in found.findings.values() if finding.outcome == "not tried"]
        assert left or budget > 1.5 * all_of_it.runs.spent
        assert all("does not allow another run" in finding.reason for finding in left)


def test_a_recipe_that_reaches_the_target_at_half_of_the_steps_is_a_plan_although_the_search_is_cut_short():
    effects = {"a": Effect(points=5.0, needed=0.4)}
    runs = [*searched(Planted(effects), "a").runs.made.values()]
    first = next(place for place, run in enumerate(runs) if run.name == "a, 50% of the steps")
    for count in range(first + 1, len(runs)):
        spent = sum(run.wall_seconds for run in runs[:count])
        found = searched(Planted(effects), "a", budget=2 * spent + 0.1)
        assert found.plans()[0].name == "a"


def test_a_recipe_whose_second_seed_misses_the_target_is_no_plan():
    late = lambda c, s, r: {"metric": 0.0} if (c.name, s) == ("a", 1) else {}  # noqa: E731
    found = searched(Planted({"a": Effect(points=5.0, needed=0.4)}, change=late), "a")
    assert [plan.name for plan in found.plans()] == [STOCK]
    assert found.findings["a"].outcome == "no gain"


def test_a_failure_in_fewer_steps_leaves_the_plans_that_were_found():
    """Even those of stock, without which no other recipe could be compared."""
    fails = lambda c, s, r: {**NO_NUMBER, "failure": "boom"} if (c.name, c.share, s) == ("levers: fast", 0.5, 1) else {}  # noqa: E731
    levers = Candidate(name="levers: fast", extra={"fast": True})
    found = searched(
        Planted({levers.name: Effect(needed=0.4)}, change=fails),
        recipes=[levers, Candidate(name="a", extra={"a": True})],
    )
    assert levers.name in [plan.name for plan in found.plans()]


def test_a_stopped_or_diverged_rate_is_not_the_best():
    def stops(candidate: Candidate, seed: int, run: Run) -> Mapping[str, Any]:
        return NO_NUMBER if candidate.rate > 1 else {}

    found = searched(Planted({STOCK: Effect(best=2.0)}, change=stops))
    assert found.findings[STOCK].rates[2.0] == -math.inf
    assert found.rate is not None
    assert found.rate.best == 1.0


def added(effects: Mapping[str, Effect], **more: Any) -> tuple[Planted, Search]:
    """Search among stock, an optimizer, and the algorithms a, b and c, of which b and c set the same."""
    recipes = [
        Candidate(name=STOCK),
        Candidate(name="Muon", recipe={"optimizer": "muon", "lr": 0.02}),
        Candidate(name="a", extra={"a": True}),
        Candidate(name="b", extra={"b": {"hard": True}}),
        Candidate(name="c", extra={"b": {}}),
        Candidate(name="other", recipe={"optimizer": "schedule_free_adamw", "lr": 0.001}),
    ]
    train = Planted(effects, noise=0.05, **more)
    return train, searched(train, recipes=recipes)


def test_algorithms_are_added_to_an_optimizer_that_promises_more_than_stock():
    effects = {
        "Muon": Effect(needed=0.6, late=1.0),
        "Muon with a": Effect(points=-3.0, needed=0.6, late=1.0),
        "Muon with b": Effect(points=1.0, needed=0.45, late=1.0, best=2.0),
        "other": Effect(points=-30.0),
    }
    train, found = added(effects)
    assert len(multiples(train, "Muon with a,")) + len(multiples(train, "Muon with a at")) == 1
    assert found.findings["Muon with a"].outcome == "no gain"
    (plan, *_) = found.plans()
    assert (plan.name, plan.base, plan.extra) == ("Muon with b", "Muon", {"b": {"hard": True}})
    assert (plan.section["lr"], plan.section["optimizer"]) == (0.04, "muon")
    assert plan.share <= 0.5
    ends = {name: (found.findings[name].outcome, found.findings[name].reason) for name in "abc"}
    assert ends == {
        "a": ("not chosen", "it was tried together with Muon, which promises more"),
        "b": ("not chosen", "it was tried together with Muon, which promises more"),
        "c": ("not chosen", "Muon with b promises more"),
    }
    assert not [label for label, _ in train.trained if label[0] in "abc"]


def test_one_addition_follows_another():
    effects = {
        "Muon": Effect(needed=0.8, late=1.0),
        "Muon with a": Effect(needed=0.6, late=1.0),
        "Muon with a and b": Effect(needed=0.4, late=1.0),
    }
    _, found = added(effects)
    assert found.plans()[0].name == "Muon with a and b"
    assert found.plans()[0].extra == {"a": True, "b": {"hard": True}}
    assert found.plans()[0].share == pytest.approx(0.4, abs=0.06)


def test_nothing_is_added_to_stock_or_to_an_optimizer_that_promises_less():
    _, found = added({"Muon": Effect(points=-30.0), "a": Effect(points=2.0, needed=0.5)})
    assert not [name for name in found.findings if "with" in name]
    assert found.plans()[0].name == "a"


def test_an_algorithm_that_fails_with_the_optimizer_is_tried_without_it():
    fails = lambda c, s, r: {**NO_NUMBER, "failure": "boom"} if c.name == "Muon with a" else {}  # noqa: E731
    _, found = added({"Muon": Effect(needed=0.6), "a": Effect(points=9.0, needed=0.3)}, change=fails)
    assert "Muon with a" not in found.findings
    assert found.plans()[0].name == "a"
