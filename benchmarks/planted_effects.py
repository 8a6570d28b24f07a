"""Claim: of 100 simulated tunings each, at most 5 turn on what harms, and most find what was planted.

No network is trained: a run draws its metric from a normal distribution around a planted mean, which depends on the
recipe, its rate and its share of the steps. A part of the noise is shared by all runs of a seed. The accepted drop is 1
point; the noise of a difference is half a point, the longest test 12 seeds.

The same with a prior: the report of a tuning of the same network, and of one whose best rates are 16 times as high, and
which needs a fifth of the steps. It may change what a tuning costs, and not how often it is wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from options import Options, parser, run_own, save_result

from torchboost.bench.report.table import Table
from torchboost.measure.stopwatch import environment
from torchboost.tuning.prior import fresh_after, ordered
from torchboost.tuning.race import Race
from torchboost.tuning.report import FRESH_SEED, STOCK, Candidate, Run, TuneReport
from torchboost.tuning.runs import Runs
from torchboost.tuning.search import Search

POINT = 0.01
SPREAD = 0.5 * POINT
RUNG = 0.05
LR, OTHERS = 0.1, 10_000
"""The rate of the user, and the first of the seeds from which the earlier tunings follow."""
HERE = environment()


@dataclass(frozen=True)
class Planted:
    """What a recipe does.

    Args:
        effect: Its metric in points, against stock at its best rate.
        best: The multiple of the rate at which it is best; each factor of two from there costs 1.5, 6, 13.5 points.
        needed: The share of the steps that it needs; each rung below costs ``late`` points.
        time: Of a step, times that of stock.
        fresh: Its effect with the seeds of the confirmation, if the search sees another one.
        fresh_best: The best multiple of the rate with these seeds, if the search sees another one.
    """

    effect: float = 0.0
    best: float = 1.0
    needed: float = 1.0
    time: float = 1.0
    fresh: float | None = None
    fresh_best: float | None = None
    late: float = 1.5

    def points(self, plan: Candidate, seed: int) -> float:
        is_fresh = seed >= FRESH_SEED
        effect = self.fresh if self.fresh is not None and is_fresh else self.effect
        best = self.fresh_best if self.fresh_best is not None and is_fresh else self.best
        lost = self.late * max(0.0, self.needed - plan.share) / RUNG
        return effect - 1.5 * math.log2(plan.rate / best) ** 2 - lost


@dataclass(frozen=True)
class Case:
    """Args: the recipes, stock with the name ``"stock"``, what the right answer is, and the budget in runs of stock."""

    recipes: dict[str, Planted]
    answer: str
    right: Callable[[Candidate | None], bool]
    budget: float = 1e9


def _nothing(chosen: Candidate | None) -> bool:
    return chosen is None


def _only(name: str, low: float = 0.2, high: float = 1.0) -> Callable[[Candidate | None], bool]:
    return lambda chosen: chosen is not None and chosen.name == name and low - 1e-9 <= chosen.share <= high + 1e-9


def _rate_alone(chosen: Candidate | None) -> bool:
    return chosen is not None and chosen.name == STOCK and chosen.share == 1 and chosen.rate < 1


FAST, MUON = Planted(time=0.7), "Muon"
NO, YES = "nothing is turned on", "it is turned on"
CASES: dict[str, Case] = {
    "a loss of 2 points": Case({"a": Planted(-2.0, time=0.7)}, NO, _nothing),
    "a loss of 1 point, the accepted drop itself": Case({"a": Planted(-1.0, time=0.7)}, NO, _nothing),
    "the same, but not in the search": Case({"a": Planted(time=0.5, fresh=-1.0)}, NO, _nothing),
    "wins only against an untuned rate": Case(
        {STOCK: Planted(best=0.25), "a": Planted(-2.0, time=0.7)}, "the rate of stock alone is changed", _rate_alone
    ),
    "another rate wins in the search, and costs the accepted drop": Case(
        {STOCK: Planted(best=0.25, fresh_best=2 ** (-5 / 6))}, NO, _nothing
    ),
    "all steps are needed": Case({}, NO, _nothing),
    "each rung costs the accepted drop": Case({STOCK: Planted(late=1.0)}, NO, _nothing),
    "fewer steps suffice: 0.45": Case({STOCK: Planted(needed=0.45)}, "turned on within a rung", _only(STOCK, 0.4, 0.5)),
    "harmless": Case({"a": FAST}, YES, _only("a")),
    "better, in 0.6 of the steps": Case(
        {"a": Planted(0.5, needed=0.6)}, "turned on within a rung", _only("a", 0.55, 0.65)
    ),
    "harmless, saves nothing": Case({"a": Planted()}, NO, _nothing),
    "one harmless, one harmful and faster": Case(
        {"a": FAST, "b": Planted(-2.0, time=0.5)}, "the harmless one is turned on", _only("a")
    ),
    "seven recipes in the time of 30 runs": Case(
        {
            "a": Planted(0.5, needed=0.45, time=1.1),
            **{name: Planted(-1.0 - place, time=0.9) for place, name in enumerate("bcdef")},
        },
        "the one in 0.45 of the steps is turned on",
        _only("a", 0.4, 0.6),
        budget=30.0,
    ),
    "the same, with the best tried as the last": Case(
        {
            **{name: Planted(-1.0 - place, time=0.9) for place, name in enumerate("bcdef")},
            "a": Planted(0.5, needed=0.45, time=1.1),
        },
        "the one in 0.45 of the steps is turned on",
        _only("a", 0.4, 0.6),
        budget=30.0,
    ),
    "an algorithm saves steps of an optimizer": Case(
        {MUON: Planted(needed=0.7), "a": Planted(), f"{MUON} with a": Planted(needed=0.4)},
        "both are turned on, within a rung",
        _only(f"{MUON} with a", 0.35, 0.45),
    ),
    "the same, but it costs 2 points with fresh seeds": Case(
        {MUON: Planted(needed=0.7), "a": Planted(), f"{MUON} with a": Planted(needed=0.4, fresh=-2.0)},
        "the optimizer alone is turned on, or nothing",
        lambda chosen: chosen is None or chosen.name == MUON,
    ),
}


def tuned(planted: dict[str, Planted], seed: int, *, budget: float = 1e9, prior: Sequence[TuneReport] = ()) -> Race:
    """Return a tuning of recipes with planted effects; all runs follow from the seed."""

    def train(plan: Candidate, number: int, *_: object) -> Run:
        key = [ord(letter) for letter in plan.label]
        own, common = np.random.default_rng([seed, number, *key]), np.random.default_rng([seed, number])
        effect = planted.get(plan.name, Planted())
        noise = common.normal(0, 2 * SPREAD) + own.normal(0, SPREAD / 2**0.5)
        time = effect.time * plan.share * own.lognormal(0, 0.005)
        seconds = {"setup_seconds": 0.001, "seconds": time, "wall_seconds": time}
        metric = 0.9 + POINT * effect.points(plan, number) + noise
        return Run(name=plan.label, seed=number, steps=1 + round(100 * plan.share), metric=metric, **seconds)

    names = [name for name in planted if name != STOCK and not name.startswith(f"{MUON} with")]
    recipes, starts = ordered([Candidate(name=STOCK), *map(_recipe, names)], prior, LR)
    runs = Runs(train=train, budget=budget, total_steps=101)
    return Race(search=Search(runs=runs, recipes=recipes, drop=POINT, starts=starts), fresh=fresh_after(prior))


def _recipe(name: str) -> Candidate:
    optimizer = {"optimizer": "muon", "lr": 0.02}
    return Candidate(name=name, recipe=optimizer) if name == MUON else Candidate(name=name, extra={name: True})


def report_of(race: Race) -> TuneReport:
    """Return what a later tuning may begin from."""
    race.decide()
    runs, findings = list(race.search.runs.made.values()), list(race.search.findings.values())
    return TuneReport(
        title="planted",
        model="",
        parameters=0,
        drop=POINT,
        budget_seconds=1e9,
        steps=101,
        total_steps=101,
        most_seeds=race.most,
        error=race.error,
        lr=LR,
        environment=HERE,
        findings=findings,
        runs=runs,
    )


def another(planted: dict[str, Planted]) -> dict[str, Planted]:
    """Return a network with best rates 16 times as high and a fifth of the steps; its best recipe is the last one."""
    found = {name: replace(one, best=16.0, needed=0.2) for name, one in ({STOCK: Planted()} | planted).items()}
    last = list(found)[-1]
    return {**found, last: replace(found[last], effect=3.0)}


def harm(planted: dict[str, Planted], chosen: Candidate | None) -> float:
    """Return the points that an answer costs, against stock at its best rate with all steps.

    A rate that is changed alone is compared with the user's.
    """
    if chosen is None:
        return 0.0
    effect = planted.get(chosen.name, Planted())
    rate_alone = chosen.name == STOCK and chosen.share == 1
    against = effect.points(Candidate(name=STOCK), FRESH_SEED) if rate_alone else 0.0
    return against - effect.points(chosen, FRESH_SEED)


def answer_of(race: Race) -> Candidate | None:
    """Return what a tuning turns on: the plan that was confirmed, or else another rate of stock."""
    chosen, rate = race.decide(), race.search.rate
    return Candidate(name=STOCK, rate=rate.best) if chosen is None and rate is not None and rate.kept else chosen


Network = Callable[[dict[str, Planted]], dict[str, Planted]]

PRIORS: dict[str, Network | None] = {
    "without a prior": None,
    "prior of the same network": dict,
    "prior of another network": another,
}


def repeated(case: Case, of: int, network: Network | None) -> dict[str, float]:
    """Return how many tunings are right and how many harm, and their median cost; a network gives each a prior."""
    right, harmful, runs = 0, 0, []
    for seed in range(of):
        prior = [] if network is None else [report_of(tuned(network(case.recipes), OTHERS + seed))]
        race = tuned(case.recipes, seed, budget=case.budget, prior=prior)
        answer = answer_of(race)
        right, harmful = right + case.right(answer), harmful + (harm(case.recipes, answer) >= 1 - 1e-9)
        runs.append(race.search.runs.spent)
    return {"right": right, "harmful": harmful, "of": of, "runs": float(np.median(runs))}


def measure(options: Options) -> Path:
    found = {}
    for title, case in CASES.items():
        found[title] = {name: repeated(case, 5 if options.smoke else 100, prior) for name, prior in PRIORS.items()}
        print(f"{title}: {found[title]}", flush=True)
    return save_result(options.file("planted_effects", "tune"), spread=SPREAD, drop=POINT, cases=found)


def table(file: Path) -> Table:
    """Return how often each planted effect was decided rightly, how often harm was turned on, and what that cost."""
    lines = []
    for title, found in json.loads(file.read_text(encoding="utf-8"))["cases"].items():
        one = found["without a prior"]
        counts = (f"{one[name]} of {one['of']}" for name in ("right", "harmful"))
        lines.append((title, CASES[title].answer, *counts, f"{one['runs']:.0f}"))
    head = ("planted", "right answer", "tunings with this answer", "harm is turned on", "time in runs of stock, median")
    return Table(headings=head, rows=tuple(lines))


def prior_table(file: Path) -> Table:
    """Return right answers, harm and cost of tunings without a prior and with each of them."""
    cases = json.loads(file.read_text(encoding="utf-8"))["cases"]
    lines = [
        (title, *(f"{one['right']}, {one['harmful']}, {one['runs']:.0f}" for one in found.values()))
        for title, found in cases.items()
    ]
    return Table(headings=("planted", *(f"{name}: right, harmful, time" for name in PRIORS)), rows=tuple(lines))


if __name__ == "__main__":
    run_own(measure, parser(__doc__).parse_args())
