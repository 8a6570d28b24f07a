"""The decisions of a tuning, on planted trainings with known effects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from torchboost.errors import FactoryError
from torchboost.measure.evidence import Interval
from torchboost.tuning.race import FRESH_SEED, Race, _attempts, _share_for, combined
from torchboost.tuning.report import STOCK, Candidate, Finding, Run

POINT = 0.01
NOTHING: Mapping[str, Any] = {}
NO_NUMBER = {"metric": math.nan}


class Planted:
    """Trainings with known effects: the noise of a run follows from its name and seed, so that runs can be repeated.

    ``together`` are the effects of compositions, and ``change(candidate, seed, run)`` returns what is else in a run.
    """

    def __init__(
        self,
        effects: Mapping[str, float] = NOTHING,
        times: Mapping[str, float] = NOTHING,
        seed: int = 0,
        late: float = 4.0,
        jitter: float = 0.0,
        together: Mapping[str, float] | None = None,
        change: Callable[[Candidate, int, Run], Mapping[str, Any]] = lambda candidate, seed, run: NOTHING,
    ) -> None:
        self.effects, self.times, self.seed, self.late, self.jitter = effects, times, seed, late, jitter
        self.together, self.change = effects if together is None else together, change
        self.limits: dict[str, float] = {}
        self.trained: list[tuple[str, int]] = []

    def __call__(self, candidate: Candidate, number: int, limit: float = math.inf) -> Run:
        self.trained.append((candidate.name, number))
        self.limits[candidate.name] = limit
        own = np.random.default_rng([self.seed, number, *map(ord, candidate.name)])
        common = np.random.default_rng([self.seed, number])
        parts = candidate.name.split(" + ")
        effects = self.effects if len(parts) == 1 else self.together
        effect = sum(effects.get(part, 0.0) for part in parts) - self.late * (1 - candidate.share)
        time = 10 * candidate.share * math.prod(self.times.get(part, 1.0) for part in parts)
        metric = 0.9 + POINT * effect + common.normal(0, POINT) + own.normal(0, 0.3 * POINT)
        time *= own.lognormal(0, self.jitter)
        seconds = {"setup_seconds": 0.0, "seconds": time, "wall_seconds": time + 1}
        memory = 1000 if candidate.name == STOCK else 800
        steps = 1 + round(100 * candidate.share)
        run = Run(name=candidate.name, seed=number, steps=steps, metric=metric, peak_bytes=memory, **seconds)
        return run.model_copy(update=dict(self.change(candidate, number, run)))


def race(train: Callable[..., Run], names: str = "a", *, skips: bool = True, budget: float = 1e6, **more: Any) -> Race:
    candidates = [Candidate(name=name, extra={name: True}, skips_work=skips) for name in names]
    known = {"candidates": candidates, "drop": POINT, "budget": budget, "total_steps": 101}
    return Race(train=train, **(known | more))


def decided(train: Callable[..., Run], names: str = "a", **more: Any) -> tuple[Race, dict[str, Any]]:
    ended = race(train, names, **more)
    return ended, ended.decide()


def outcomes(ended: Race) -> dict[str, str | None]:
    return {name: finding.outcome for name, finding in ended.findings.items()}


def test_a_harmless_candidate_is_accepted_and_confirmed_with_fresh_seeds():
    train, told = Planted({}, {"a": 0.7}), []
    ended, extra = decided(train, told=lambda running: told.append(len(running.runs)))
    assert (extra, outcomes(ended)) == ({"a": True}, {"a": "kept"})
    finding = ended.findings["a"]
    assert finding.speed is not None
    assert finding.speed.mid == pytest.approx(1 / 0.7, rel=0.01)
    assert (finding.rival_share, finding.memory, ended.notes) == (0.75, 0.8, [])
    assert [whole.outcome for whole in ended.whole] == ["kept"]
    assert {seed for name, seed in train.trained if seed >= FRESH_SEED}
    assert len(train.trained) == len(set(train.trained))
    assert told == list(range(1, len(ended.runs) + 1))  # after every run


def test_what_becomes_of_a_candidate():
    wide = Planted({}, {"a": 0.7}, change=lambda c, seed, run: NOTHING if c.name == STOCK else spread(seed, run))
    for train, skips, outcome, reason in (
        (Planted({"a": -2.0}, {"a": 0.7}, late=2.0), True, "lost", "on average"),
        (Planted({"a": -1.2}, {"a": 0.7}, late=2.0), True, "lost", ""),
        (Planted({}, {"a": 0.99}, late=2.0), True, "no gain", "times as long as stock"),
        (Planted({"a": -0.3}, {"a": 0.85}, late=2.0), True, "not better than fewer steps", "not shown to do worse"),
        (Planted({"a": -0.3}, {"a": 0.85}, late=2.0), False, "kept", "it keeps the metric and saves time"),
        # It costs nothing on average, but its runs are many times as far apart as the drop that is accepted.
        (wide, True, "not shown", "more seeds would hardly show"),
        (Planted({}, {"a": 0.7}, change=lambda c, s, r: NO_NUMBER if c.name == "a" else {}), True, "lost", "diverged"),
        (Planted({}, {"a": 0.5}, change=lambda c, s, r: NO_NUMBER if c.share < 1 else {}), True, "kept", "diverged"),
        # A run of few steps has no rival of as many.
        (Planted({}, {"a": 0.94}, change=lambda c, s, r: {"steps": 9}), True, "kept", "fewer than 9 steps"),
    ):
        ended, extra = decided(train, skips=skips)
        assert outcomes(ended) == {"a": outcome}
        assert reason in ended.findings["a"].reason
        assert bool(extra) == (outcome == "kept")
    assert not [name for name, _ in ended.runs if name.startswith("stock,")]


def spread(seed: int, run: Run) -> Mapping[str, Any]:
    return {"metric": run.metric + 20 * POINT * (-1) ** seed}


def test_a_gain_is_not_denied_because_of_noise():
    """Runs of less than a second: their times vary by 20 %, and the gain is 25 %."""
    races = (decided(Planted({}, {"a": 0.8}, seed=seed, jitter=0.2), skips=False)[0] for seed in range(40))
    assert sum(ended.findings["a"].outcome == "no gain" for ended in races) <= 2

    def busy(candidate: Candidate, seed: int, run: Run) -> Mapping[str, Any]:
        slow = candidate.name == "a" and FRESH_SEED <= seed < FRESH_SEED + 5
        return {"seconds": run.seconds * (2, 1.5, 4)[seed % 3]} if slow else {}

    assert decided(Planted({}, {"a": 0.8}, change=busy), skips=False)[1] == {"a": True}


def test_no_gain_is_decided_when_three_percent_are_excluded():
    """After all seeds the median decides: times that vary by half exclude no gain."""
    for time, jitter, pairs, more in (
        *((1.3, 0.0, range(3, 4), {}), (1.3, 0.02, range(3, 13), {}), (1.3, 0.5, range(5, 13), {})),
        (1.0, 0.5, range(4, 5), {"most": 4}),
    ):
        train = Planted({}, {"a": time}, jitter=jitter, seed=3 if more else 0)
        ended, extra = decided(train, skips=False, **more)
        assert (extra, outcomes(ended)) == ({}, {"a": "no gain"})
        assert sum(name == "a" for name, _ in train.trained) in pairs


def test_a_stock_loop_that_cannot_be_compared_is_an_error():
    equal = {"metric": 0.9, "first_loss": 0.7, "last_loss": 0.25}
    for change, message in (
        (NO_NUMBER, "stock loop ended with the metric nan"),
        (equal, "the same losses and metric for the seeds 0 and 1"),
    ):
        with pytest.raises(FactoryError, match=message):
            decided(Planted({}, {"a": 0.7}, change=lambda c, s, r, change=change: change))
    # Two trainings may end equally.
    ends = lambda c, seed, r: {"first_loss": 0.7 + 0.01 * seed, "last_loss": 0.0, "metric": 1.0}  # noqa: E731
    assert decided(Planted({}, {"a": 0.7}, change=ends), skips=False)[1] == {"a": True}


def test_a_candidate_that_fails_together_with_others_is_left_out():
    """Each alone costs half a point, which is accepted; together they cost more."""
    times = {"a": 0.5, "b": 0.6}
    train = Planted({"a": -0.35, "b": -0.5}, times, late=8.0, together={"a": -0.35, "b": -0.9})
    ended, extra = decided(train, "ab", skips=False)
    assert outcomes(ended) == {"a": "kept", "b": "kept"}
    assert [whole.outcome for whole in ended.whole] == ["lost", "kept"]
    assert extra == {"a": True}


def found(name: str, speed: float, effect: float, *, skips: bool, reach: float = 0.01) -> Finding:
    return Finding(
        candidate=Candidate(name=name, extra={name: True}, skips_work=skips),
        outcome="kept",
        speed=Interval(low=speed, mid=speed, high=speed),
        difference=Interval(low=effect - reach, mid=effect, high=effect + reach),
    )


def test_what_leaves_out_work_is_dropped_first():
    """l and m leave out nothing; n saves more than f; c saves most, but was shown to cost something."""
    known = {
        "l": found("l", 1.45, -0.003, skips=False),
        "m": found("m", 1.10, +0.006, skips=False),
        "f": found("f", 1.06, +0.006, skips=True),
        "n": found("n", 1.30, -0.002, skips=True),
        "c": found("c", 1.80, -0.006, skips=True, reach=0.002),
    }
    for accepted, wanted in {
        "": [],
        "f": ["f"],
        "fl": ["lf", "l"],
        "lfn": ["lnf", "ln", "l"],
        "lmfn": ["lmnf", "lmn", "lm"],
        "lmf": ["lmf", "lm", "l"],
        "fnc": ["nfc", "nf", "n"],
        "lfnc": ["lnfc", "lnf", "l"],
    }.items():
        attempts = _attempts([known[name] for name in accepted])
        assert ["".join(one.candidate.name for one in members) for members in attempts] == wanted


def mixed(train: Callable[..., Run], names: tuple[str, ...] = ("levers", "freeze"), *, budget: float = 1e6) -> Race:
    candidates = [Candidate(name=name, extra={name: True}, skips_work=name != "levers") for name in names]
    return race(train, candidates=candidates, budget=budget)


def together_cost(points: float, **more: Any) -> Planted:
    """Levers and freezing are harmless alone, and freezing looks better; together they cost so many points."""
    alone, times = {"freeze": 0.6, "norms": 0.6}, {"levers": 0.69, "freeze": 0.9, "norms": 0.8}
    return Planted(alone, times, together={"levers": points}, **more)


def test_the_attempts_of_the_final_test_share_the_error_and_end_with_the_levers():
    for names in (("levers",), ("levers", "freeze"), ("levers", "norms", "freeze")):
        ended = mixed(together_cost(-2.0), names)
        assert ended.decide() == {"levers": True}
        assert set(outcomes(ended).values()) == {"kept"}
        attempts = [" + ".join(names[:size]) for size in range(len(names), 0, -1)]
        assert [one.candidate.name for one in ended.whole] == attempts
        assert [one.outcome for one in ended.whole] == ["lost"] * (len(names) - 1) + ["kept"]
        differences = [one.difference for one in ended.whole]
        assert all(one is not None and one.confidence == pytest.approx(1 - 0.05 / len(names)) for one in differences)


def test_the_budget_leaves_the_last_attempt_to_the_levers():
    """Together they vary so much that the first attempt takes all that it may."""
    draw = np.random.default_rng(0)

    def vary(candidate: Candidate, seed: int, run: Run) -> Mapping[str, Any]:
        return {"metric": run.metric + POINT * draw.normal(0, 1.5)} if " + " in candidate.name else {}

    train = together_cost(0.0, change=vary)
    screened = mixed(train)
    screened._screen()
    ended = mixed(train, budget=screened.spent + 190)
    assert ended.decide() == {"levers": True}
    assert ended.whole[0].outcome == "not shown"
    assert ended.whole[0].reason.endswith("s are set aside for its last attempt")
    assert ended.spent <= ended.budget


def test_what_harms_seldom_passes_any_attempt():
    """Every composition costs the accepted drop; the attempts together pass at most at the error rate."""
    wrong, accepted = 0, [found(name, 1.5, 0.0, skips=name != "l") for name in "lnf"]
    for seed in range(100):
        ended = mixed(Planted({"l": -1.0}, {"l": 0.5}, seed=seed))
        ended._run(Candidate(name=STOCK), 0)
        wrong += bool(ended._composed(accepted))
    assert wrong / 100 < 0.08


def test_settings_of_several_candidates_are_combined_but_not_two_of_one_algorithm():
    slow = Candidate(name="slow", extra={"less_bn": {"keep": "narrowest"}, "gradient_centralization": {}})
    fast = Candidate(name="fast", extra={"less_bn": {"keep": "none"}, "gradient_centralization": {}})
    assert race(Planted({}, {"slow": 0.8, "fast": 0.6}), candidates=[slow, fast]).decide() == fast.extra
    assert combined([{"a": True, "b": False}, {"b": {"x": 1}}, {"c": False}]) == {"a": True, "b": {"x": 1}, "c": False}
    assert combined([]) == {}


def test_the_budget_is_kept_and_what_it_cut_short_is_not_accepted():
    for budget in (40.0, 90.0, 200.0, 333.0, 700.0):
        ended, _ = decided(Planted({"b": -0.4}, {"a": 0.7, "b": 0.8}), "ab", budget=budget)
        assert ended.spent <= budget
        assert ended.spent == pytest.approx(sum(run.wall_seconds for run in ended.runs.values()))
        assert all(finding.outcome for finding in ended.findings.values())
        if budget < 77:
            assert "needs at least six more" in ended.findings["a"].reason
    ended, extra = decided(Planted({}, {"a": 0.7}), budget=100.0)
    assert (extra, outcomes(ended)) == ({}, {"a": "not shown"})
    assert "s are set aside for the final test" in ended.findings["a"].reason


@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_every_prefix_of_runs_leads_to_the_same_decisions(jitter: float):
    """A tuning that was interrupted after any run ends as one that was not, and repeats nothing."""
    effects, times = {"b": -0.6, "c": -2.0}, {"a": 0.7, "b": 0.85, "c": 0.6}
    train = Planted(effects, times, jitter=jitter)
    spent, _ = decided(train, "abc")
    budget = spent.spent + 30  # at the end less is left than a new tuning would need
    train.trained.clear()
    whole, extra = decided(train, "abc", budget=budget)
    kept = list(whole.runs.items())
    for stop in range(0, len(kept) + 1, 5):
        again = Planted(effects, times, jitter=jitter)
        before = sum(run.wall_seconds for _, run in kept[:stop])
        resumed, same = decided(again, "abc", budget=budget, runs=dict(kept[:stop]), spent=before)
        assert (same, resumed.findings, resumed.whole) == (extra, whole.findings, whole.whole)
        assert again.trained == train.trained[stop:]


def test_the_cost_of_starting_is_spread_over_the_users_run():
    compiled = Planted({}, {"a": 0.5}, change=lambda c, s, r: {"setup_seconds": 20.0 * (c.name == "a")})
    for steps, outcome, extra in ((101, "no gain", {}), (100_001, "kept", {"a": True})):
        ended = race(compiled, skips=False, total_steps=steps)
        assert (ended.decide(), outcomes(ended)) == (extra, {"a": outcome})


TOO_SLOW = "its steps took more than 2 times as long as stock's, so its training was stopped"


def stopped_at(limit: float) -> dict[str, Any]:
    return {**NO_NUMBER, "seconds": limit, "wall_seconds": limit, "too_slow": True}


def test_a_candidate_that_fails_or_takes_twice_as_long_is_stopped_and_the_others_go_on():
    slow = lambda c, s, run: stopped_at(20.0) if run.seconds > 20.0 else {}  # noqa: E731
    boom = lambda c, s, r: {**NO_NUMBER, "failure": "RuntimeError: boom"} if c.name == "b" else {}  # noqa: E731
    for times, change, outcome, reason in (
        ({"a": 0.7, "b": 5.0}, slow, "no gain", TOO_SLOW),
        ({"a": 0.7, "b": 0.7}, boom, "not usable", "its training raised RuntimeError: boom"),
    ):
        train = Planted({}, times, change=change)
        ended, extra = decided(train, "ab", skips=False)
        assert (extra, outcomes(ended)) == ({"a": True}, {"a": "kept", "b": outcome})
        assert train.limits == {STOCK: math.inf, "a": 20.0, "b": 20.0}
        assert ended.findings["b"].reason == reason
        assert [key for key in ended.runs if key[0] == "b"] == [("b", 0)]
    # In the final test the machine may be busy with other work, or something breaks.
    for change, outcome, reason in (
        ({"too_slow": True}, "no gain", "more than 2 times as long"),
        ({"failure": "RuntimeError: boom"}, "not usable", "its training raised RuntimeError: boom"),
    ):
        late = lambda c, s, r, change=change: {**NO_NUMBER, **change} if (c.name, s) == ("a", FRESH_SEED + 1) else {}  # noqa: E731
        ended, extra = decided(Planted({}, {"a": 0.7}, change=late), skips=False)
        assert (extra, ended.whole[-1].outcome, ended.whole[-1].seeds) == ({}, outcome, 1)
        assert reason in ended.whole[-1].reason


def test_a_first_run_that_leaves_no_time_for_a_decision_is_stopped():
    train = Planted(change=lambda c, s, r: stopped_at(8.0))
    ended, extra = decided(train, budget=63.0, spent=7.0)
    assert (extra, train.limits, outcomes(ended)) == ({}, {STOCK: 8.0}, {"a": "not tried"})
    assert ended.findings["a"].reason.startswith("a run takes more than 8 s, and a decision needs at least 7")
    assert (ended.spent, ended.runs) == (15.0, {})


def test_what_a_reader_must_know_is_noted():
    ended, _ = decided(Planted({}, {"a": 0.7}, change=lambda c, s, r: {"metric": 0.5}), skips=False)
    assert any(note.startswith("the metric of stock was 0.5 for all") for note in ended.notes)
    ended, _ = decided(Planted({}, {"a": 0.7}, late=0.5, seed=4))
    assert outcomes(ended) == {"a": "not better than fewer steps"}
    assert ended.notes == ["75% of the steps, with the schedule fitted to them, keep the metric of stock too"]


def test_an_error_rate_that_the_final_test_cannot_keep_is_refused_before_any_run():
    train = Planted()
    with pytest.raises(ValueError, match=r"error: found 0\.002"):
        race(train, "", error=0.006)
    assert train.trained == []


def test_the_rival_takes_as_long_and_is_never_stock_itself():
    shares = {speed: _share_for(speed) for speed in (2.0, 1.43, 1.04, 1.1)}
    assert shares == pytest.approx({2.0: 0.5, 1.43: 0.7, 1.04: 0.98, 1.1: 0.95})
