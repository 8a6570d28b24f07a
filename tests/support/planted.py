"""Trainings that take no time, with known effects of recipes, rates and lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchboost.tuning.race import Race
from torchboost.tuning.report import FRESH_SEED, STOCK, Candidate, Run, Start
from torchboost.tuning.runs import Job, Runs, Watch
from torchboost.tuning.search import Search

__all__ = ["POINT", "Effect", "Planted", "at_once", "race"]

POINT = 0.01
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Effect:
    """What a recipe does.

    Args:
        points: Its metric in points, at its best rate with all steps.
        best: The multiple of the rate at which it is best; each doubling from there costs 2, 8, 18 points.
        needed: The share of the steps that it needs; each rung of 0.05 below costs ``late`` points.
        time: Of a step, times that of stock.
        fresh: Its points with the seeds of the confirmation; the same by default.
    """

    points: float = 0.0
    best: float = 1.0
    needed: float = 1.0
    time: float = 1.0
    fresh: float | None = None
    late: float = 2.0


class Planted:
    """Trains with planted effects. The noise of a run follows from its name and seed, so that runs can be repeated.

    ``change(candidate, seed, run)`` returns what is else in a run. A whole run of stock takes 10 s.
    """

    def __init__(
        self,
        effects: Mapping[str, Effect] = NOTHING,
        *,
        seed: int = 0,
        noise: float = 0.3,
        jitter: float = 0.0,
        change: Callable[[Candidate, int, Run], Mapping[str, Any]] = lambda candidate, seed, run: NOTHING,
    ) -> None:
        self.effects, self.seed, self.noise, self.jitter, self.change = effects, seed, noise, jitter, change
        self.trained: list[tuple[str, int]] = []
        self.watched: dict[tuple[str, int], Watch] = {}

    def __call__(self, candidate: Candidate, seed: int, watch: Watch) -> Run:
        self.trained.append((candidate.label, seed))
        self.watched[candidate.label, seed] = watch
        own = np.random.default_rng([self.seed, seed, *map(ord, candidate.label)])
        common = np.random.default_rng([self.seed, seed])
        effect = self.effects.get(candidate.name, Effect())
        points = effect.fresh if effect.fresh is not None and seed >= FRESH_SEED else effect.points
        points -= 2 * math.log2(candidate.rate / effect.best) ** 2
        points -= effect.late * max(0.0, effect.needed - candidate.share) / 0.05
        time = 10 * candidate.share * effect.time * own.lognormal(0, self.jitter)
        metric = 0.9 + POINT * (points + common.normal(0, 1) + own.normal(0, self.noise))
        run = Run(
            name=candidate.label,
            seed=seed,
            steps=1 + round(100 * candidate.share),
            metric=metric,
            peak_bytes=1000 if candidate.name == STOCK else 800,
            setup_seconds=0.0,
            seconds=time,
            wall_seconds=time + 0.5,
        )
        return run.model_copy(update=dict(self.change(candidate, seed, run)))


def at_once(train: Callable[[Candidate, int, Watch], Run]) -> Callable[[Sequence[Job]], Iterator[Run]]:
    """Return what trains several runs at the same time: together they take as long as the longest of them."""

    def made(jobs: Sequence[Job]) -> Iterator[Run]:
        before = 0.0
        for run in sorted((train(*job) for job in jobs), key=lambda run: run.wall_seconds):
            yield run.model_copy(update={"charged_seconds": run.wall_seconds - before})
            before = run.wall_seconds

    return made


def race(
    train: Callable[[Candidate, int, Watch], Run],
    names: str = "",
    *,
    recipes: list[Candidate] | None = None,
    budget: float = 1e6,
    rates: bool = True,
    most: int = 12,
    error: float = 0.05,
    starts: Mapping[str, Start] = NOTHING,
    fresh: int = FRESH_SEED,
    tested: Mapping[str, float] = NOTHING,
    **more: Any,
) -> Race:
    """Return a race of stock and recipes with names of one letter, or of the given ones, with a drop of one point."""
    known = [Candidate(name=STOCK), *(Candidate(name=name, extra={name: True}) for name in names)]
    runs = Runs(**({"train": train, "budget": budget, "total_steps": 101} | more))
    search = Search(runs=runs, recipes=recipes or known, drop=POINT, rates=rates, starts=starts)
    return Race(search=search, most=most, error=error, fresh=fresh, tested=dict(tested))
