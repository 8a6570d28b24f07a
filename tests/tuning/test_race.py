from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from torchboost.measure.evidence import Interval
from torchboost.measure.statistics import SequentialTest
from torchboost.tuning.race import FRESH_SEED, Race, _attempts, _share_for, combined
from torchboost.tuning.report import STOCK, Candidate, Finding, Run

POINT = 0.01


class Planted:
    """Trainings with known effects: the noise of a run follows from its name and seed, so that runs can be repeated."""

    def __init__(
        self,
        effects: Mapping[str, float],
        times: Mapping[str, float],
        seed: int = 0,
        late: float = 4.0,
        jitter: float = 0.0,
    ) -> None:
        self.effects, self.times, self.seed, self.late, self.jitter = effects, times, seed, late, jitter
        self.made: list[tuple[str, int]] = []

    def __call__(self, candidate: Candidate, number: int, limit: float = math.inf) -> Run:
        self.made.append((candidate.name, number))
        own = np.random.default_rng([self.seed, number, *map(ord, candidate.name)])
        common = np.random.default_rng([self.seed, number])
        parts = candidate.name.split(" + ")
        effect = sum(self.effects.get(part, 0.0) for part in parts) - self.late * (1 - candidate.share)
        time = 10 * candidate.share * math.prod(self.times.get(part, 1.0) for part in parts)
        metric = 0.9 + POINT * effect + common.normal(0, POINT) + own.normal(0, 0.3 * POINT)
        time *= own.lognormal(0, self.jitter)
        seconds = {"setup_seconds": 0.0, "seconds": time, "wall_seconds": time + 1}
        memory = 1000 if candidate.name == STOCK else 800
        steps = 1 + round(100 * candidate.share)
        return Run(name=candidate.name, seed=number, steps=steps, metric=metric, peak_bytes=memory, **seconds)


def race(train: Callable[..., Run], names: list[str], *, skips: bool = True, budget: float = 1e6, **more: Any) -> Race:
    candidates = [Candidate(name=name, extra={name: True}, skips_work=skips) for name in names]
    return Race(train=train, candidates=candidates, drop=POINT, budget=budget, total_steps=101, **more)


def outcomes(made: Race) -> dict[str, str | None]:
    return {name: found.outcome for name, found in made.findings.items()}


def test_a_harmless_candidate_is_accepted_and_confirmed_with_fresh_seeds():
    train = Planted({}, {"a": 0.7})
    made = race(train, ["a"])
    assert made.decide() == {"a": True}
    assert outcomes(made) == {"a": "kept"}
    found = made.findings["a"]
    assert found.speed is not None
    assert found.speed.mid == pytest.approx(1 / 0.7, rel=0.01)
    assert found.rival_share == 0.75
    assert found.memory == 0.8
    (whole,) = made.whole
    assert whole.outcome == "kept"
    assert {seed for name, seed in train.made if seed >= FRESH_SEED}
    assert len(train.made) == len(set(train.made))


@pytest.mark.parametrize(
    ("effect", "time", "skips", "wanted"),
    [
        (-2.0, 0.7, True, "lost"),
        (-1.2, 0.7, True, "lost"),
        (0.0, 0.99, True, "no gain"),
        (-0.3, 0.85, True, "not better than fewer steps"),
        (-0.3, 0.85, False, "kept"),
    ],
)
def test_what_becomes_of_a_candidate(effect, time, skips, wanted):
    made = race(Planted({"a": effect}, {"a": time}, late=2.0), ["a"], skips=skips)
    extra = made.decide()
    assert outcomes(made) == {"a": wanted}
    assert bool(extra) == (wanted == "kept")
    assert made.findings["a"].reason


def test_a_gain_is_not_denied_because_of_noise():
    """Runs of less than a second: their times vary by 20 %, and the gain is 25 %."""
    denied = 0
    for seed in range(40):
        made = race(Planted({}, {"a": 0.8}, seed=seed, jitter=0.2), ["a"], skips=False)
        made.decide()
        denied += made.findings["a"].outcome == "no gain"
    assert denied <= 2


@pytest.mark.parametrize(("jitter", "pairs"), [(0.0, range(3, 4)), (0.02, range(3, 13)), (0.5, range(5, 13))])
def test_no_gain_is_decided_when_three_percent_are_excluded(jitter, pairs):
    train = Planted({}, {"a": 1.3}, jitter=jitter)
    made = race(train, ["a"], skips=False)
    assert made.decide() == {}
    assert outcomes(made) == {"a": "no gain"}
    assert sum(name == "a" for name, _ in train.made) in pairs


def test_after_all_seeds_the_median_decides_about_the_gain():
    """Times that vary by half exclude no gain; without one in the median of all seeds nothing is kept."""
    train = Planted({}, {"a": 1.0}, jitter=0.5, seed=3)
    made = race(train, ["a"], skips=False, most=4)
    assert made.decide() == {}
    found = made.findings["a"]
    assert found.outcome == "no gain"
    assert sum(name == "a" for name, _ in train.made) == 4


def test_the_final_test_does_not_deny_a_gain_because_of_noise():
    """The first fresh runs of the candidate happen to be slow."""
    planted = Planted({}, {"a": 0.8})

    def train(candidate: Candidate, seed: int, *_: float) -> Run:
        made = planted(candidate, seed)
        busy = candidate.name == "a" and FRESH_SEED <= seed < FRESH_SEED + 5
        return made.model_copy(update={"seconds": made.seconds * (2, 1.5, 4)[seed % 3]}) if busy else made

    assert race(train, ["a"], skips=False).decide() == {"a": True}


def test_a_candidate_that_only_varies_too_much_is_not_called_lost():
    """It costs nothing on average, but its runs are many times as far apart as the drop that is accepted."""

    def wide(candidate: Candidate, seed: int, *_: float) -> Run:
        run = Planted({}, {"a": 0.7})(candidate, seed)
        shift = 0.0 if candidate.name == STOCK else 20 * POINT * (-1) ** seed
        return run.model_copy(update={"metric": run.metric + shift})

    made = race(wide, ["a"])
    assert made.decide() == {}
    assert (made.findings["a"].outcome, made.findings["a"].seeds < 12) == ("not shown", True)
    assert "more seeds would hardly show" in made.findings["a"].reason


def test_a_training_that_diverges_is_lost_and_a_stock_loop_that_does_is_an_error():
    def diverging(candidate: Candidate, seed: int, *_: float) -> Run:
        run = Planted({}, {"a": 0.7})(candidate, seed)
        return run.model_copy(update={"metric": math.nan}) if candidate.name == "a" else run

    made = race(diverging, ["a"])
    assert made.decide() == {}
    assert (made.findings["a"].outcome, made.findings["a"].reason) == ("lost", "its training diverged")

    def broken(candidate: Candidate, seed: int, *_: float) -> Run:
        return Planted({}, {})(candidate, seed).model_copy(update={"metric": math.nan})

    with pytest.raises(ValueError, match="stock loop ended with the metric nan"):
        race(broken, ["a"]).decide()


def test_a_candidate_that_fails_together_with_others_is_left_out():
    """Each alone costs half a point, which is accepted; together they cost more."""
    train = Planted({"a": -0.3, "b": -0.55, "a + b": 0.0}, {"a": 0.5, "b": 0.6}, late=8.0)
    train.effects = {"a": -0.35, "b": -0.5}
    together = {"a": -0.35, "b": -0.9}

    def run(candidate: Candidate, seed: int, *_: float) -> Run:
        train.effects = together if " + " in candidate.name else {"a": -0.35, "b": -0.5}
        return train(candidate, seed)

    made = race(run, ["a", "b"], skips=False)
    extra = made.decide()
    assert outcomes(made) == {"a": "kept", "b": "kept"}
    assert [found.outcome for found in made.whole] == ["lost", "kept"]
    assert extra == {"a": True}


def found(name: str, speed: float, effect: float, *, skips: bool, reach: float = 0.01) -> Finding:
    return Finding(
        candidate=Candidate(name=name, extra={name: True}, skips_work=skips),
        outcome="kept",
        speed=Interval(low=speed, mid=speed, high=speed),
        difference=Interval(low=effect - reach, mid=effect, high=effect + reach),
    )


@pytest.mark.parametrize(
    ("accepted", "wanted"),
    [
        ("", []),
        ("f", ["f"]),
        ("fl", ["lf", "l"]),
        ("lfn", ["lnf", "ln", "l"]),
        ("lmfn", ["lmnf", "lmn", "lm"]),
        ("lmf", ["lmf", "lm", "l"]),
        ("fnc", ["nfc", "nf", "n"]),
        ("lfnc", ["lnfc", "lnf", "l"]),
    ],
)
def test_what_leaves_out_work_is_dropped_first(accepted, wanted):
    """l and m leave out nothing; n saves more than f; c saves most, but was shown to cost something."""
    known = {
        "l": found("l", 1.45, -0.003, skips=False),
        "m": found("m", 1.10, +0.006, skips=False),
        "f": found("f", 1.06, +0.006, skips=True),
        "n": found("n", 1.30, -0.002, skips=True),
        "c": found("c", 1.80, -0.006, skips=True, reach=0.002),
    }
    attempts = _attempts([known[name] for name in accepted])
    assert ["".join(one.candidate.name for one in members) for members in attempts] == wanted


def together_costs(effect: float, **more: Any) -> Callable[..., Run]:
    """Levers and freezing are harmless alone, and freezing looks better; together they cost so many points."""
    alone = {"levers": 0.0, "freeze": 0.6, "norms": 0.6}
    planted = Planted(alone, {"levers": 0.69, "freeze": 0.9, "norms": 0.8}, **more)

    def train(candidate: Candidate, seed: int, *_: float) -> Run:
        names = candidate.name.split(" + ")
        planted.effects = alone if len(names) == 1 else {names[0]: effect}
        return planted(candidate, seed)

    return train


def mixed(train: Callable[..., Run], names: tuple[str, ...] = ("levers", "freeze"), *, budget: float = 1e6) -> Race:
    candidates = [Candidate(name=name, extra={name: True}, skips_work=name != "levers") for name in names]
    return Race(train=train, candidates=candidates, drop=POINT, budget=budget, total_steps=101)


def test_the_levers_are_not_thrown_away_for_what_leaves_out_work():
    made = mixed(together_costs(-2.0))
    assert made.decide() == {"levers": True}
    assert outcomes(made) == {"levers": "kept", "freeze": "kept"}
    assert [(one.candidate.name, one.outcome) for one in made.whole] == [
        ("levers + freeze", "lost"),
        ("levers", "kept"),
    ]


def test_the_attempts_of_the_final_test_share_the_error():
    for names in (("levers",), ("levers", "freeze"), ("levers", "norms", "freeze")):
        made = mixed(together_costs(-2.0), names)
        assert made.decide() == {"levers": True}
        assert [one.candidate.name for one in made.whole] == [
            " + ".join(names[:size]) for size in range(len(names), 0, -1)
        ]
        found = [one.difference for one in made.whole]
        assert all(one is not None and one.confidence == pytest.approx(1 - 0.05 / len(names)) for one in found)


def test_the_budget_leaves_the_last_attempt_to_the_levers():
    """Together they vary so much that the first attempt takes all that it may."""
    steady, draw = together_costs(0.0), np.random.default_rng(0)

    def train(candidate: Candidate, seed: int, *_: float) -> Run:
        run = steady(candidate, seed)
        shift = POINT * draw.normal(0, 1.5) if " + " in candidate.name else 0.0
        return run.model_copy(update={"metric": run.metric + shift})

    screened = mixed(train)
    screened._screen()
    made = mixed(train, budget=screened.spent + 190)
    assert made.decide() == {"levers": True}
    assert made.whole[0].outcome == "not shown"
    assert made.whole[0].reason.endswith("s are set aside for its last attempt")
    assert made.spent <= made.budget


def test_what_harms_seldom_passes_any_attempt():
    """Every composition costs the accepted drop; the attempts together pass at most at the error rate."""
    wrong, accepted = 0, [found(name, 1.5, 0.0, skips=name != "l") for name in "lnf"]
    for seed in range(150):
        made = mixed(Planted({"l": -1.0}, {"l": 0.5}, seed=seed))
        made._run(Candidate(name=STOCK), 0)
        wrong += bool(made._composed(accepted))
    assert wrong / 150 < 0.075


def test_two_settings_of_one_algorithm_are_not_combined():
    slow = Candidate(name="slow", extra={"less_bn": {"keep": "narrowest"}, "gradient_centralization": {}})
    fast = Candidate(name="fast", extra={"less_bn": {"keep": "none"}, "gradient_centralization": {}})
    train = Planted({}, {"slow": 0.8, "fast": 0.6})
    made = Race(train=train, candidates=[slow, fast], drop=POINT, budget=1e6, total_steps=101)
    assert made.decide() == fast.extra


def test_combined_settings():
    assert combined([{"a": True, "b": False}, {"b": {"x": 1}}, {"c": False}]) == {"a": True, "b": {"x": 1}, "c": False}
    assert combined([]) == {}


@pytest.mark.parametrize("budget", [40.0, 90.0, 200.0, 333.0, 700.0])
def test_the_budget_is_kept(budget):
    train = Planted({"b": -0.4}, {"a": 0.7, "b": 0.8})
    made = race(train, ["a", "b"], budget=budget)
    made.decide()
    assert made.spent <= budget
    assert made.spent == pytest.approx(sum(run.wall_seconds for run in made.runs.values()))
    assert all(found.outcome for found in made.findings.values())
    if budget < 77:
        assert "needs at least six more" in made.findings["a"].reason


def test_what_the_budget_cut_short_is_not_accepted():
    made = race(Planted({}, {"a": 0.7}), ["a"], budget=100.0)
    assert made.decide() == {}
    assert outcomes(made) == {"a": "not shown"}
    assert "s are set aside for the final test" in made.findings["a"].reason


@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_every_prefix_of_runs_leads_to_the_same_decisions(jitter):
    """A tuning that was interrupted after any run ends as one that was not, and repeats nothing."""
    effects, times = {"b": -0.6, "c": -2.0}, {"a": 0.7, "b": 0.85, "c": 0.6}
    train = Planted(effects, times, jitter=jitter)
    spent = race(train, ["a", "b", "c"])
    spent.decide()
    budget = spent.spent + 30  # at the end less is left than a new tuning would need
    train.made.clear()
    whole = race(train, ["a", "b", "c"], budget=budget)
    wanted = whole.decide()
    kept = list(whole.runs.items())
    for stop in range(0, len(kept) + 1, 3):
        again = Planted(effects, times, jitter=jitter)
        runs = dict(kept[:stop])
        resumed = race(
            again, ["a", "b", "c"], budget=budget, runs=runs, spent=sum(r.wall_seconds for _, r in kept[:stop])
        )
        assert resumed.decide() == wanted
        assert resumed.findings == whole.findings
        assert resumed.whole == whole.whole
        assert again.made == train.made[stop:]


def test_an_interruption_at_any_run_leaves_what_was_known():
    for stop in range(26):
        train = Planted({}, {"a": 0.7})

        def until(candidate: Candidate, seed: int, *_: float, train: Planted = train, stop: int = stop) -> Run:
            if len(train.made) == stop:
                raise KeyboardInterrupt
            return train(candidate, seed)

        made = race(until, ["a"])
        with pytest.raises(KeyboardInterrupt):
            made.decide()
        assert len(made.runs) == stop
        assert all(found.outcome is None for found in made.whole)
    assert made.whole


def test_a_recipe_that_is_longer_than_needed_is_noted():
    made = race(Planted({}, {"a": 0.7}, late=0.5, seed=4), ["a"])
    made.decide()
    assert outcomes(made) == {"a": "not better than fewer steps"}
    assert made.notes == ["75% of the steps, with the schedule fitted to them, keep the metric of stock too"]


def test_the_cost_of_starting_is_spread_over_the_users_run():
    def compiled(candidate: Candidate, seed: int, *_: float) -> Run:
        run = Planted({}, {"a": 0.5})(candidate, seed)
        return run.model_copy(update={"setup_seconds": 0.0 if candidate.name != "a" else 20.0})

    short = race(compiled, ["a"], skips=False)
    assert short.decide() == {}
    assert outcomes(short) == {"a": "no gain"}
    candidates = [Candidate(name="a", extra={"a": True})]
    long = Race(train=compiled, candidates=candidates, drop=POINT, budget=1e6, total_steps=100_001)
    assert long.decide() == {"a": True}


def test_told_after_every_run():
    seen: list[int] = []
    made = race(Planted({}, {"a": 0.7}), ["a"], told=lambda one: seen.append(len(one.runs)))
    made.decide()
    assert seen == list(range(1, len(made.runs) + 1))
    assert made.runs[STOCK, 0].name == STOCK


@pytest.mark.parametrize(("effect", "outcome"), [(0.0, "kept"), (-3.0, "lost"), (-2.0, "not better than fewer steps")])
def test_another_recipe_is_judged_but_never_turned_on(effect, outcome):
    """It takes half of the time; stock with half of the steps loses 2 points."""
    train = Planted({"a": effect + 2.0}, {}, late=4.0)
    recipe = Candidate(name="a", recipe=True, share=0.5, skips_work=True)
    drop = 3 * POINT if outcome.startswith("not") else POINT
    made = Race(train=train, candidates=[recipe], drop=drop, budget=1e9, total_steps=101, most=12)
    assert made.decide() == {}
    assert made.findings["a"].outcome == outcome
    assert made.whole == []


def test_a_candidate_whose_training_fails_is_not_usable_and_the_others_go_on():
    planted = Planted({}, {"a": 0.7, "b": 0.7})

    def train(candidate: Candidate, seed: int, *_: float) -> Run:
        made = planted(candidate, seed)
        if candidate.name != "b":
            return made
        return made.model_copy(update={"metric": math.nan, "failure": "RuntimeError: boom"})

    made = race(train, ["a", "b"])
    assert made.decide() == {"a": True}
    assert outcomes(made) == {"a": "kept", "b": "not usable"}
    assert made.findings["b"].reason == "its training raised RuntimeError: boom"
    assert [key for key in made.runs if key[0] == "b"] == [("b", 0)]


def test_a_candidate_that_takes_more_than_twice_as_long_is_stopped():
    planted, limits = Planted({}, {"a": 0.7, "b": 5.0}), {}

    def train(candidate: Candidate, seed: int, limit: float = math.inf) -> Run:
        made = planted(candidate, seed)
        limits[candidate.name] = limit
        if made.seconds <= limit:
            return made
        return made.model_copy(update={"metric": math.nan, "seconds": limit, "wall_seconds": limit, "too_slow": True})

    made = race(train, ["a", "b"], skips=False)
    assert made.decide() == {"a": True}
    assert limits == {STOCK: math.inf, "a": 20.0, "b": 20.0}
    assert outcomes(made) == {"a": "kept", "b": "no gain"}
    assert made.findings["b"].reason == (
        "its steps took more than 2 times as long as stock's, so its training was stopped"
    )
    assert [key for key in made.runs if key[0] == "b"] == [("b", 0)]


def test_a_first_run_that_leaves_no_time_for_a_decision_is_stopped():
    planted, limits = Planted({}, {}), []

    def train(candidate: Candidate, seed: int, limit: float = math.inf) -> Run:
        limits.append(limit)
        made = planted(candidate, seed)
        return made.model_copy(update={"metric": math.nan, "seconds": limit, "wall_seconds": limit, "too_slow": True})

    made = race(train, ["a"], budget=63.0, spent=7.0)
    assert made.decide() == {}
    assert limits == [8.0]
    assert outcomes(made) == {"a": "not tried"}
    assert made.findings["a"].reason.startswith("a run takes more than 8 s, and a decision needs at least 7")
    assert made.spent == 15.0
    assert not made.runs


def test_a_metric_that_never_changes_is_noted():
    planted = Planted({}, {"a": 0.7})

    def constant(candidate: Candidate, seed: int, *_: float) -> Run:
        return planted(candidate, seed).model_copy(update={"metric": 0.5})

    made = race(constant, ["a"], skips=False)
    made.decide()
    assert any(note.startswith("the metric of stock was 0.5 for all") for note in made.notes)
    made = race(planted, ["a"], skips=False)
    made.decide()
    assert not made.notes


@pytest.mark.parametrize(
    ("change", "outcome", "reason"),
    [
        ({"too_slow": True}, "no gain", "more than 2 times as long"),
        ({"failure": "RuntimeError: boom"}, "not usable", "its training raised RuntimeError: boom"),
    ],
)
def test_a_final_test_whose_training_is_stopped_says_why(change, outcome, reason):
    """The machine was busy with other work by then, or something broke."""
    planted = Planted({}, {"a": 0.7})

    def train(candidate: Candidate, seed: int, *_: float) -> Run:
        made = planted(candidate, seed)
        ended = candidate.name == "a" and seed == FRESH_SEED + 1
        return made.model_copy(update={"metric": math.nan, **change}) if ended else made

    made = race(train, ["a"], skips=False)
    assert made.decide() == {}
    assert made.whole[-1].outcome == outcome
    assert reason in made.whole[-1].reason
    assert made.whole[-1].seeds == 1


def test_a_factory_that_ignores_its_seed_is_an_error():
    planted = Planted({}, {"a": 0.7})

    def train(candidate: Candidate, seed: int, *_: float) -> Run:
        return planted(candidate, 0).model_copy(update={"seed": seed, "first_loss": 0.7, "last_loss": 0.25})

    with pytest.raises(ValueError, match="the same losses and metric for the seeds 0 and 1"):
        race(train, ["a"]).decide()


def test_two_trainings_may_end_equally():
    planted = Planted({}, {"a": 0.7})

    def train(candidate: Candidate, seed: int, *_: float) -> Run:
        ends = {"first_loss": 0.7 + 0.01 * seed, "last_loss": 0.0, "metric": 1.0}
        return planted(candidate, seed).model_copy(update=ends)

    assert race(train, ["a"], skips=False).decide() == {"a": True}


def test_an_error_rate_that_the_final_test_cannot_keep_is_refused_before_any_run():
    planted = Planted({}, {})
    with pytest.raises(ValueError, match=r"error: found 0\.002"):
        Race(train=planted, candidates=[], drop=0.1, budget=1.0, total_steps=10, error=0.006)
    assert planted.made == []


@pytest.mark.parametrize(("speed", "share"), [(2.0, 0.5), (1.43, 0.7), (1.04, 0.98), (1.1, 0.95)])
def test_the_rival_takes_as_long_and_is_never_stock_itself(speed, share):
    assert _share_for(speed) == pytest.approx(share)


def test_rare_failures_are_found_more_often_than_by_three_equal_runs():
    """A loss of two points in a quarter of the seeds, else none: half a point on average, the drop itself."""
    wrong = 0
    test = SequentialTest(margin=0.5)
    draw = np.random.default_rng(0)
    for _ in range(400):
        differences = list(-2.0 * (draw.random(12) < 0.25))
        wrong += any(test.look(differences[:count]).state == "passed" for count in range(3, 13))
    assert wrong / 400 < 0.40  # 0.44 if equal differences counted as certain; the test assumes normal differences


def test_a_rival_that_diverges_does_worse():
    def train(candidate: Candidate, seed: int, limit: float = math.inf, /) -> Run:
        made = Planted({}, {"a": 0.5})(candidate, seed)
        return made.model_copy(update={"metric": math.nan}) if candidate.name.startswith("stock,") else made

    made = race(train, ["a"])
    assert made.decide() == {"a": True}
    assert "diverged" in made.findings["a"].reason


def test_a_run_of_few_steps_has_no_rival_of_as_many():
    def train(candidate: Candidate, seed: int, limit: float = math.inf, /) -> Run:
        return Planted({}, {"a": 0.94})(candidate, seed).model_copy(update={"steps": 9})

    made = race(train, ["a"])
    made.decide()
    assert made.findings["a"].outcome == "kept"
    assert not [name for name, _ in made.runs if name.startswith("stock,")]


def test_a_recipe_is_timed_over_the_steps_that_it_had():
    """A share of 0.1 of four steps is less than the least number of steps, two."""

    def train(candidate: Candidate, seed: int, limit: float = math.inf, /) -> Run:
        steps = 2 if candidate.recipe else 4
        return Planted({}, {})(candidate, seed).model_copy(update={"steps": steps, "seconds": steps - 1.0})

    recipe = Candidate(name="r", recipe=True, share=0.1, skips_work=True)
    made = Race(train=train, candidates=[recipe], drop=5 * POINT, budget=1e6, total_steps=4, most=4)
    made.decide()
    speed = made.findings["r"].speed
    assert speed is not None
    assert speed.mid == pytest.approx(3.0)
