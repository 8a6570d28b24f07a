"""The confirmation of a tuning, on planted trainings with known effects."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.planted import POINT, Effect, Planted, at_once, race
from torchboost.errors import FactoryError
from torchboost.tuning.race import Race
from torchboost.tuning.report import FRESH_SEED, STOCK, Candidate, Run
from torchboost.tuning.runs import Watch

NO_NUMBER = {"metric": math.nan}
FAST = Effect(time=0.7)
LEVERS = Candidate(name="levers: fast", extra={"fast": True})
MORE = Candidate(name="a", extra={"fast": True, "a": True})


def decided(train: Planted, names: str = "a", **more: Any) -> tuple[Race, Candidate | None]:
    ended = race(train, names, **more)
    return ended, ended.decide()


def outcomes(ended: Race) -> dict[str, str | None]:
    return {name: finding.outcome for name, finding in ended.search.findings.items()}


def name_of(chosen: Candidate | None) -> str | None:
    return None if chosen is None else chosen.label


def wild(name: str) -> Callable[[Candidate, int, Run], dict[str, float]]:
    """Return a change that makes the metric of a recipe with fresh seeds too random for a decision."""
    noise = np.random.default_rng(0)
    return lambda c, s, r: {"metric": r.metric + POINT * noise.normal(0, 3) * (s >= FRESH_SEED and c.name == name)}


def test_the_fastest_plan_is_confirmed_with_fresh_seeds():
    train = Planted({STOCK: Effect(needed=0.7), "a": Effect(needed=0.5, points=1.0)}, noise=0.1)
    ended, chosen = decided(train)
    assert chosen is not None
    assert chosen.name == "a"
    assert chosen.share in (0.45, 0.5)
    assert outcomes(ended) == {STOCK: "not chosen", "a": "kept"}
    (whole,) = ended.whole
    assert whole.speed is not None
    assert whole.speed.mid == pytest.approx(1 / chosen.share, rel=0.05)
    assert whole.memory == 0.8
    fresh = {label for label, seed in train.trained if seed >= FRESH_SEED}
    assert fresh == {STOCK, chosen.label}
    assert len(train.trained) == len(set(train.trained))
    assert ended.search.findings["a"].rates[1.0] > 0
    assert ended.search.findings[STOCK].reason == f"{chosen.words} takes less time"


def test_what_only_wins_against_an_untuned_rate_is_not_turned_on():
    """At the user's rate stock loses 8 points; the recipe is 2 points behind stock at its best, and faster."""
    for seed in range(5):
        train = Planted({STOCK: Effect(best=0.25), "a": Effect(points=-2.0, time=0.7)}, seed=seed)
        ended, chosen = decided(train)
        assert chosen is None
        assert ended.search.rate is not None
        assert (ended.search.rate.best, ended.search.rate.seeds, ended.search.rate.fresh) == (0.25, 3, True)
        assert ended.search.rate.change == pytest.approx(8 * POINT, abs=POINT)
        assert ended.search.rate.kept


def test_a_plan_must_also_keep_the_metric_at_the_users_rate():
    """The search is wrong about the rate: with fresh seeds the user's own is three points better."""

    def change(candidate: Candidate, seed: int, run: Any) -> dict[str, float]:
        wrong = candidate.name == STOCK and candidate.rate == 1 and seed >= FRESH_SEED
        return {"metric": run.metric + 11 * POINT} if wrong else {}

    ended, chosen = decided(Planted({STOCK: Effect(best=0.25), "a": FAST}, change=change))
    assert chosen is None
    assert ended.whole[0].reason.startswith("against stock at your rate: 0.03")
    assert "worse on average" in ended.whole[0].reason
    assert ended.search.rate is not None
    assert ended.search.rate.change is not None
    assert ended.search.rate.change < 0
    assert not ended.search.rate.kept
    # One that diverges is not a rival.
    diverges = lambda c, s, r: NO_NUMBER if (c.label, s >= FRESH_SEED) == (STOCK, True) else {}  # noqa: E731
    ended, chosen = decided(Planted({STOCK: Effect(best=0.25), "a": FAST}, change=diverges))
    assert name_of(chosen) == "a"
    assert ended.search.rate is not None
    assert ended.search.rate.change is None


def test_the_best_rate_of_stock_is_kept_if_the_users_diverges_and_not_if_it_diverges_itself():
    own = lambda c, s, r: NO_NUMBER if (c.label, s) == (STOCK, FRESH_SEED + 1) else {}  # noqa: E731
    both = lambda c, s, r: NO_NUMBER if (c.name, s) == (STOCK, FRESH_SEED + 1) else {}  # noqa: E731
    for change, kept in (own, True), (both, False):
        ended, chosen = decided(Planted({STOCK: Effect(best=0.25)}, change=change), "")
        assert chosen is None
        assert ended.search.rate is not None
        assert (ended.search.rate.best, ended.search.rate.change) == (0.25, None)
        assert ended.search.rate.kept is kept


def test_a_plan_is_not_blamed_if_stock_diverges_with_a_fresh_seed():
    for seed in (FRESH_SEED, FRESH_SEED + 1):
        change = lambda c, s, r, seed=seed: NO_NUMBER if (c.name, s) == (STOCK, seed) else {}  # noqa: E731
        ended, chosen = decided(Planted({"a": FAST}, change=change))
        assert chosen is None
        assert {(one.outcome, one.reason) for one in ended.whole} == {
            ("not shown", f"stock itself diverges with seed {seed}, so nothing can be compared with it")
        }


def test_what_the_search_got_wrong_is_lost_and_more_steps_are_tried():
    """With fresh seeds the recipe needs 0.1 more of the steps than in the search."""

    def change(candidate: Candidate, seed: int, run: Any) -> dict[str, float]:
        short = candidate.name == "a" and seed >= FRESH_SEED and candidate.share < 0.55
        return {"metric": run.metric - 3 * POINT} if short else {}

    ended, chosen = decided(Planted({"a": Effect(needed=0.5, points=0.5)}, noise=0.1, change=change))
    first, second = ended.whole
    assert (first.outcome, second.outcome) == ("lost", "kept")
    assert chosen is not None
    assert chosen.share == pytest.approx(first.candidate.share + 0.15)
    assert outcomes(ended)["a"] == "kept"


def test_the_attempts_share_the_error_and_end_with_the_levers():
    effects = {"a": Effect(needed=0.5, points=1.0, time=0.6, fresh=-5.0), "levers: fast": Effect(time=0.6)}
    ended, chosen = decided(Planted(effects, noise=0.1), recipes=[LEVERS, MORE])
    assert name_of(chosen) == "levers: fast"
    assert [one.candidate.name for one in ended.whole] == ["a", "a", "levers: fast"]
    assert [one.outcome for one in ended.whole] == ["lost", "lost", "kept"]
    differences = [one.difference for one in ended.whole]
    assert all(one is not None and one.confidence == pytest.approx(1 - 0.05 / 3) for one in differences)
    assert outcomes(ended) == {"levers: fast": "kept", "a": "lost"}


def test_the_attempts_without_levers_and_with_nothing_else():
    for effects, wanted in (
        ({}, []),
        ({STOCK: Effect(needed=0.5)}, [STOCK, STOCK]),
        (
            {STOCK: Effect(needed=0.7), "a": Effect(needed=0.5, points=1.0)},
            ["a", "a"],
        ),  # stock with all steps is not a plan
        ({"a": Effect(time=0.7)}, ["a"]),  # all of its steps
    ):
        ended = race(Planted(effects, noise=0.05), "a")
        ended.search.make()
        assert [one.name for one in ended.attempts()] == wanted
    ended = race(Planted({"levers: fast": Effect(time=0.6)}, noise=0.05), recipes=[LEVERS])
    ended.search.make()
    assert [one.label for one in ended.attempts()] == ["levers: fast"]


def test_the_seeds_of_a_prior_are_not_used_again():
    train = Planted({STOCK: Effect(best=0.5), "a": FAST}, noise=0.1)
    _, chosen = decided(train, fresh=1040)
    assert name_of(chosen) == "a"
    assert min(seed for _, seed in train.trained if seed > 1) == 1040


def test_what_harms_at_the_accepted_drop_seldom_passes_any_attempt():
    """The search sees nothing of it; all three attempts cost the accepted drop with fresh seeds."""
    effects = {"a": Effect(needed=0.3, points=1.0, fresh=-1.0), "levers: fast": Effect(time=0.6, fresh=-1.0)}
    wrong = sum(decided(Planted(effects, seed=seed), recipes=[LEVERS, MORE])[1] is not None for seed in range(100))
    assert wrong <= 8


def test_levers_are_kept_although_the_search_was_cut_short():
    ended, chosen = decided(Planted({"levers: fast": Effect(time=0.6)}, noise=0.1), recipes=[LEVERS, MORE], budget=140)
    assert name_of(chosen) == "levers: fast"
    assert outcomes(ended) == {"levers: fast": "kept", "a": "not tried"}
    assert ended.search.runs.spent <= 140


def test_what_saves_less_than_three_percent_is_no_gain():
    for time, jitter in ((0.99, 0.0), (1.0, 0.01)):
        ended, chosen = decided(Planted({"levers: fast": Effect(time=time)}, jitter=jitter), recipes=[LEVERS])
        assert chosen is None
        assert ended.whole[-1].outcome == "no gain"
    compiled = Planted(
        {"levers: fast": Effect(time=0.5)}, change=lambda c, s, r: {"setup_seconds": 20.0 * (c.name != STOCK)}
    )
    for steps, name in ((101, None), (100_001, "levers: fast")):
        assert name_of(decided(compiled, recipes=[LEVERS], total_steps=steps)[1]) == name


def test_a_gain_is_not_denied_because_of_noise():
    """Runs of less than a second: their times vary by 20 %, and the gain is 25 %."""
    races = [
        decided(Planted({"levers: fast": Effect(time=0.8)}, seed=seed, jitter=0.2), recipes=[LEVERS])
        for seed in range(40)
    ]
    assert sum(chosen is None for _, chosen in races) <= 2


def test_a_plan_that_breaks_with_fresh_seeds_is_not_turned_on():
    for change, outcome, reason in (
        ({"too_slow": True}, "no gain", "more than 3 times as long"),
        ({"failure": "RuntimeError: boom"}, "not usable", "its training raised RuntimeError: boom"),
        ({}, "lost", "its training diverged"),
    ):
        late = lambda c, s, r, change=change: {**NO_NUMBER, **change} if (c.name, s) == ("a", FRESH_SEED + 1) else {}  # noqa: E731
        ended, chosen = decided(Planted({"a": FAST}, change=late))
        assert (chosen, ended.whole[-1].outcome) == (None, outcome)
        assert reason in ended.whole[-1].reason


def test_the_budget_is_kept_and_what_it_cut_short_is_not_accepted():
    for budget in (60.0, 120.0, 200.0, 333.0, 700.0):
        train = Planted(
            {STOCK: Effect(needed=0.6, best=0.5), "a": Effect(needed=0.5, points=1.0), "b": Effect(points=-3)}
        )
        ended, chosen = decided(train, "ab", budget=budget)
        runs = ended.search.runs
        assert runs.spent <= budget
        assert all(finding.outcome for finding in ended.search.findings.values())
        if budget == 60:
            assert "a decision needs at least 7 runs" in ended.search.findings["a"].reason
            assert (chosen, runs.made, ended.whole) == (None, {}, [])
        if budget >= 333:
            assert chosen is not None
    effects = {"a": Effect(needed=0.3, points=1.0), "levers: fast": Effect(time=0.6)}
    ended, chosen = decided(Planted(effects, noise=0.1, change=wild("a")), recipes=[LEVERS, MORE], budget=260.0)
    assert chosen is None
    assert [one.outcome for one in ended.whole] == ["not shown", "not shown", "not tried"]
    assert ended.search.runs.spent <= 260


@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_every_prefix_of_runs_leads_to_the_same_decisions(jitter: float):
    """A tuning that was interrupted after any run ends as one that was not, and repeats nothing."""
    effects = {
        STOCK: Effect(needed=0.7, best=0.5),
        "a": Effect(needed=0.5, points=1, fresh=-3),
        "b": FAST,
        "c": Effect(points=-2),
    }
    for budget in (400.0, 1e5):
        train = Planted(effects, jitter=jitter)
        whole, chosen = decided(train, "abc", budget=budget)
        kept = list(whole.search.runs.made.items())
        for stop in range(0, len(kept) + 1, 7):
            again = Planted(effects, jitter=jitter)
            resumed, same = decided(again, "abc", budget=budget, made=dict(kept[:stop]))
            assert (same, resumed.search.findings, resumed.whole) == (chosen, whole.search.findings, whole.whole)
            assert again.trained == train.trained[stop:]


def test_what_a_reader_must_know_is_noted():
    ended, _ = decided(Planted({"a": FAST}, change=lambda c, s, r: {"metric": 0.5}))
    assert any(note.startswith("the metric of stock was 0.5 for all") for note in ended.notes)
    loss, _ = decided(Planted({"a": FAST}, change=lambda c, s, r: {"metric": 1 - r.metric}))
    assert any("let evaluate return its negative" in note for note in loss.notes)
    assert not any("let evaluate return its negative" in note for note in decided(Planted({"a": FAST}))[0].notes)


def test_plans_of_an_earlier_budget_are_counted_in_the_probability_of_an_error():
    """The shorter budget ends before the better recipe is searched."""
    effects = {"a": Effect(needed=0.6, points=0.5, fresh=-5.0), "b": Effect(needed=0.3, points=0.5)}
    first, chosen = decided(Planted(effects, noise=0.1), "ab", budget=200)
    assert chosen is None
    assert list(first.tested.values()) == pytest.approx([0.025, 0.025])
    again = {"made": first.search.runs.made, "tested": first.tested}
    same, _ = decided(Planted(effects, noise=0.1), "ab", budget=200, **again)
    more, chosen = decided(Planted(effects, noise=0.1), "ab", budget=5000, **again)
    assert name_of(chosen) == "b, 30% of the steps"
    said = "so the probability of a wrong decision in all of them is at most 0.067, not 0.05"
    assert [any(note.endswith(said) for note in race.notes) for race in (first, same, more)] == [False, False, True]


def test_a_stock_loop_that_diverges_is_an_error():
    with pytest.raises(FactoryError, match="stock loop ended with the metric nan"):
        decided(Planted(change=lambda c, s, r: NO_NUMBER))


def test_an_error_rate_that_the_attempts_cannot_share_is_refused_before_any_run():
    train = Planted()
    with pytest.raises(ValueError, match=r"error: found 0\.0025"):
        race(train, error=0.01)  # three attempts, and the test of stock's best rate
    assert train.trained == []


def test_a_short_budget_is_not_spread_over_attempts_that_cannot_end():
    """Three times too few seeds for each of three plans decide nothing; enough for the first one do."""
    recipes = [LEVERS, MORE]
    for seed in range(10):
        train = Planted({"a": Effect(needed=0.5, points=3.0)}, seed=seed, noise=0.25)
        ended, chosen = decided(train, recipes=recipes, budget=150.0)
        assert name_of(chosen) is not None
        assert chosen is not None
        assert chosen.name == "a"
        assert ended.search.runs.spent <= 150
    ended, chosen = decided(Planted({"a": Effect(needed=0.5, points=3.0)}), recipes=recipes, budget=90.0)
    assert chosen is None
    assert {one.outcome for one in ended.whole} == {"not tried"}
    assert all("3 more pairs of runs" in one.reason for one in ended.whole)
    assert not [label for label, seed in ended.search.runs.made if seed >= FRESH_SEED]


def test_an_attempt_without_time_hides_neither_the_one_before_it_nor_the_search():
    """The fastest plan is tested with 5 seeds; for the same with more steps, and for the levers, no time is left."""
    effects = {"a": Effect(needed=0.3, points=1.0), "levers: fast": Effect(time=0.6)}
    ended, chosen = decided(Planted(effects, noise=0.1, change=wild("a")), recipes=[LEVERS, MORE], budget=150.0)
    assert chosen is None
    assert [one.outcome for one in ended.whole] == ["not shown", "not tried", "not tried"]
    tested, levers = ended.search.findings["a"], ended.search.findings["levers: fast"]
    assert tested.rates
    assert tested.model_copy(update={"rates": {}}) == ended.whole[0]
    assert (levers.outcome, levers.reason) == ("not tried", ended.whole[2].reason)
    assert levers.change == 0  # as the search found it
    assert levers.speed is not None


def test_stock_is_said_to_need_all_steps_only_if_fewer_were_tried():
    ended, chosen = decided(Planted(), budget=120.0)
    stock = ended.search.findings[STOCK]
    assert (chosen, stock.outcome) == (None, "not tried")
    assert stock.reason.startswith("its search for fewer steps did not end: the budget of 120 s does not allow")
    ended, chosen = decided(Planted())
    stock = ended.search.findings[STOCK]
    assert (chosen, stock.outcome, stock.reason) == (None, "no gain", "no smaller number of steps was found")
    # The recipe is so fast that no number of steps of stock takes less time, and it is lost with fresh seeds.
    ended, chosen = decided(Planted({"a": Effect(time=0.1, points=1.0, fresh=-5.0)}))
    stock = ended.search.findings[STOCK]
    assert (chosen, stock.outcome) == (None, "no gain")
    assert stock.reason.startswith("even 20 % of the steps save no time against a")


def test_a_plan_that_was_not_tested_is_not_said_to_be_slower_if_it_is_faster():
    """Three attempts: the fastest plan, the same with more steps, and the levers; the second fastest has none."""
    effects = {"a": Effect(needed=0.3, fresh=-5.0), "b": Effect(needed=0.4)}
    recipes = [LEVERS, MORE.model_copy(update={"name": "b"}), MORE]  # b is found first
    for levers, name in ((-5.0, None), (0.0, "levers: fast")):
        effects["levers: fast"] = Effect(time=0.6, fresh=levers)
        ended, chosen = decided(Planted(effects, noise=0.1), recipes=recipes)
        assert name_of(chosen) == name
        assert [one.candidate.name for one in ended.whole] == ["a", "a", "levers: fast"]
        untested = ended.search.findings["b"]
        assert (untested.outcome, untested.reason) == ("not chosen", "other plans were tested")


SEVERAL = [
    {"a": Effect(needed=0.5, points=1.0, time=0.6), "b": Effect(best=4.0, time=0.8)},
    {STOCK: Effect(best=0.25), "a": FAST},
    {STOCK: Effect(best=0.25), "a": Effect(points=-2.0, time=0.7)},
    {"a": Effect(needed=0.5, points=1.0, time=0.6, fresh=-5.0)},
]


def known(ended: Race) -> Any:
    """All that a race has found out."""
    search = ended.search
    return search.findings, search.rate, ended.whole, list(search.runs.asked)


@pytest.mark.parametrize("effects", SEVERAL)
def test_several_processes_decide_the_same_in_less_time(effects):
    alone, chosen = decided(Planted(effects, noise=0.1), "ab")
    spent = [alone.search.runs.spent]
    for processes in (2, 4):
        train = Planted(effects, noise=0.1)
        ended, same = decided(train, "ab", at_once=at_once(train), processes=processes)
        assert (same, known(ended)) == (chosen, known(alone))
        assert len(train.trained) == len(set(train.trained))
        runs = ended.search.runs
        assert set(runs.made) == {*runs.asked, *runs.ahead}
        assert runs.spent == pytest.approx(sum(run.charge for run in runs.made.values()))
        spent.append(runs.spent)
    assert spent[1] < 0.75 * spent[0]
    assert spent[2] < 0.85 * spent[1]


def test_several_processes_reach_further_within_a_budget():
    effects = {"a": Effect(needed=0.5, points=1.0, time=0.6)}
    for processes, wanted in ((1, None), (2, "a")):
        train = Planted(effects, noise=0.1)
        several = {"at_once": at_once(train), "processes": processes} if processes > 1 else {}
        ended, chosen = decided(train, budget=80.0, **several)
        assert (None if chosen is None else chosen.name) == wanted
        assert ended.search.runs.spent <= 80.0


def test_a_tuning_is_continued_with_any_number_of_processes():
    effects = SEVERAL[1]
    alone, chosen = decided(Planted(effects, noise=0.1), budget=600.0)

    def part(made: dict[Any, Run], processes: int, most: float) -> tuple[Race, Candidate | None]:
        def train(candidate: Candidate, seed: int, watch: Watch) -> Run:
            if len(trained) >= most:
                raise KeyboardInterrupt
            trained.append((candidate.label, seed))
            return planted(candidate, seed, watch)

        trained, planted = list[tuple[str, int]](), Planted(effects, noise=0.1)
        several = {"at_once": at_once(train), "processes": processes} if processes > 1 else {}
        ended = race(train, "a", budget=600.0, made=made, **several)
        try:
            return ended, ended.decide()
        finally:
            assert not set(trained) & before

    for numbers in ((1, 3, 1), (4, 1, 2), (2, 2, 2)):
        made, before = dict[Any, Run](), set[tuple[str, int]]()
        for processes in numbers[:-1]:
            with pytest.raises(KeyboardInterrupt):
                part(made, processes, 9)
            before = set(made)
        ended, same = part(made, numbers[-1], math.inf)
        assert (same, known(ended)) == (chosen, known(alone))
