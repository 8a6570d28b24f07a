"""What a tuning takes from earlier ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tuning.test_report import report
from torchboost.tuning.prior import fresh_after, ordered, reports_of
from torchboost.tuning.report import STOCK, Candidate, Finding, Run, Start, TuneReport

MUON = Candidate(name="Muon", recipe={"optimizer": "muon", "lr": 0.02})
RECIPES = [Candidate(name="levers: compile", extra={"compile": True}), MUON, Candidate(name="a"), Candidate(name="b")]
SCORES = {0.5: 0.8, 1.0: 0.9, 2.0: 0.7}


def found(candidate: Candidate, rate: float, share: float = 1.0, **more: Any) -> Finding:
    return Finding(candidate=candidate.at(rate, share), **{"rates": {**SCORES, rate: 0.95}, **more})


def earlier(*findings: Finding, lr: float | None = 0.1) -> TuneReport:
    return report(findings=list(findings), lr=lr)


def names(recipes: list[Candidate]) -> list[str]:
    return [one.name for one in recipes]


def test_what_was_confirmed_comes_first_and_stock_keeps_all_of_its_rates() -> None:
    prior = earlier(
        found(Candidate(name=STOCK), 0.25, 0.8, change=0.0),
        found(RECIPES[2], 2.0, 0.7, change=0.001, outcome="not chosen"),
        found(RECIPES[3], 1.0, 0.45, change=0.002, outcome="kept"),
        found(MUON, 4.0, outcome="no gain"),
        Finding(candidate=Candidate(name="unknown"), outcome="not tried"),
    )
    recipes, starts = ordered(RECIPES, [prior], 0.1)
    assert names(recipes) == ["levers: compile", "b", "a", "Muon"]
    assert starts == {
        "levers: compile": Start(share=0.8),
        "Muon": Start(rate=4.0),
        "a": Start(rate=2.0, share=0.7),
        "b": Start(rate=1.0, share=0.45),
    }
    assert ordered(RECIPES, [], 0.1) == (RECIPES, {})


@pytest.mark.parametrize(
    ("lr", "now", "start"), [(0.1, 0.1, 2.0), (0.1, 0.8, 0.25), (0.1, 0.08, 2.0), (None, 0.1, None)]
)
def test_rates_are_compared_by_their_size(lr: float | None, now: float, start: float | None) -> None:
    """The user has taken the advice of the earlier report, or has another rate; Muon's rates are its own."""
    prior = earlier(found(RECIPES[0], 1.0), found(RECIPES[2], 2.0), found(MUON, 0.5), lr=lr)
    starts = ordered(RECIPES, [prior], now)[1]
    assert (starts["a"].rate, starts["Muon"].rate, starts["levers: compile"].rate) == (start, 0.5, None)


def test_the_last_report_that_knows_a_recipe_counts() -> None:
    first = earlier(found(RECIPES[0], 1.0), found(RECIPES[2], 2.0), found(RECIPES[3], 2.0))
    diverged = found(RECIPES[3], 1.0, rates=dict.fromkeys(SCORES, float("-inf")), outcome="lost")
    untried = Finding(candidate=RECIPES[2], outcome="not tried")
    starts = ordered(RECIPES, [first, earlier(found(RECIPES[0], 1.0), untried, diverged)], 0.1)[1]
    assert (starts["a"].rate, starts["b"].rate) == (2.0, None)


def test_fresh_seeds_begin_after_those_of_all_reports() -> None:
    runs = [Run(name="a", seed=s, steps=9, metric=1, setup_seconds=0, seconds=1, wall_seconds=1) for s in (1, 1007)]
    assert fresh_after([]) == fresh_after([report(runs=runs[:1])]) == 1000
    assert fresh_after([report(runs=runs), report()]) == 1008
    assert fresh_after([report(fresh_seed=1024)]) == 1024  # it began from another one, and confirmed nothing
    assert reports_of(report()) == [report()]
