"""The runs of a tuning: which were made, whether the next one fits into the budget, and what the times tell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torchboost.bench.factory import check_seeds
from torchboost.calibration.choice import in_seconds
from torchboost.errors import FactoryError
from torchboost.tuning.report import FRESH_SEED, STOCK, Candidate, Outcome, Run

HALF = 0.5
"""Rates are compared at this share of the steps, with the schedule fitted to it."""

LEAST_RUNS = 7
"""A decision needs so many runs as long as stock's."""

MARGIN = 1.15
"""A longer budget gives more time to the trial of the switches, so that a decision needs more than a short one says."""

TOO_SLOW = 3.0
"""A training is stopped if its steps take longer than this multiple of stock's time."""


class EndedError(Exception):
    """The next run does not fit into the budget, or there is nothing more to train."""


class RecipeEndedError(Exception):
    """A training of a recipe did not come to its end, so the recipe is out."""

    outcome: Outcome
    reason: str

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


@dataclass(frozen=True, kw_only=True)
class Watch:
    """How a training is watched: when it is stopped early, and what its metric is for.

    Args:
        chooses: Whether choices are made by its metric, which then comes from ``validate``, if the factory has it.
        seconds: It is stopped if its steps take longer, without compilation.
        losses: The curve of the best run of as many steps. It is stopped if after a third of them its loss has
            fallen less than a third as far.
    """

    chooses: bool = False
    seconds: float = math.inf
    losses: Sequence[float] = ()


Job = tuple[Candidate, int, Watch]
"""A training: the candidate, the seed, and how it is watched."""


@dataclass(kw_only=True)
class Runs:
    """Makes each requested run once, and keeps the budget.

    Its answers depend on the requested runs alone. So a tuning that was interrupted, which has more of them from the
    beginning, goes the same way.

    Args:
        train: Trains a candidate with a seed.
        budget: Seconds of all runs together.
        total_steps: Steps of the run that the user has in mind, over which set-up is spread.
        aside: Seconds that were spent on anything but runs.
        made: Runs, by label and seed. At first the runs of an earlier session.
        told: Called after every run that was made.
        limit: Seconds that may be spent at present.
        at_once: Trains at the same time, if there are processes for it, and returns the runs as they end.
        processes: How many trainings it makes at the same time.
        asked: The requested runs, which alone decide.
        ahead: Those that were made for a later request, if there is one. They count in the budget.
    """

    train: Callable[[Candidate, int, Watch], Run]
    budget: float
    total_steps: int
    aside: float = 0.0
    made: dict[tuple[str, int], Run] = field(default_factory=dict)
    told: Callable[[], None] = lambda: None
    limit: float = math.inf
    at_once: Callable[[Sequence[Job]], Iterable[Run]] | None = None
    processes: int = 1
    asked: dict[tuple[str, int], Candidate] = field(default_factory=dict, init=False)
    ahead: dict[tuple[str, int], Candidate] = field(default_factory=dict, init=False)

    @property
    def spent(self) -> float:
        """Seconds of the requested runs so far, and of all other work."""
        return self.aside + sum(self.made[key].charge for key in {**self.asked, **self.ahead})

    def score(self, candidate: Candidate, seed: int, then: Iterable[tuple[Candidate, int]] = ()) -> float:
        """Train, and return the metric. Minus infinity if the training diverged, or was stopped as hopeless.

        Raises:
            EndedError: The run does not fit into the budget.
            RecipeEndedError: It failed, or its steps took too long.
            FactoryError: Stock cannot be compared: it diverges, or it ignores its seed.
        """
        run = self.run(candidate, seed, then)
        if run.failure:
            raise RecipeEndedError("not usable", f"its training raised {run.failure}")
        if run.too_slow:
            reason = f"its steps took more than {TOO_SLOW:g} times as long as stock's, so its training was stopped"
            raise RecipeEndedError("no gain", reason)
        return run.metric if math.isfinite(run.metric) else -math.inf

    def run(self, candidate: Candidate, seed: int, then: Iterable[tuple[Candidate, int]] = ()) -> Run:
        """Train, whatever becomes of it.

        Args:
            candidate: What is trained.
            seed: Of weights and data.
            then: What will be asked for next, whatever this run shows. It is trained at the same time, if there are
                processes and seconds for it.
        """
        key, is_first = (candidate.label, seed), not self.asked
        later = {(one.label, number): one for one, number in then}
        new = key not in self.made
        if new:
            if self.spent + self.wall_seconds(candidate) > self.limit:
                aside = self.budget - self.limit
                rest = f"; {aside:.0f} s are set aside for what follows" if aside > 0 else ""
                raise EndedError(f"the budget of {self.budget:.0f} s does not allow another run{rest}")
            if self.at_once is None:
                self.made[key] = self.train(candidate, seed, self._watch(candidate, seed))
            else:
                self._make_at_once({key: candidate, **later}, self.at_once)
        charged = (one for one in later if one in self.made and self.made[one].charged_seconds is not None)
        self.ahead.update((one, later[one]) for one in charged)
        self.asked[key] = candidate
        if is_first and new:  # a tuning that is continued has shown that it has the time
            self._check_first(key)
        self._check_seeds(candidate)
        if new and self.at_once is None:
            self.told()
        return self.made[key]

    def _make_at_once(
        self, wanted: dict[tuple[str, int], Candidate], at_once: Callable[[Sequence[Job]], Iterable[Run]]
    ) -> None:
        """Train the first of the wanted runs, and with it those for which there are processes and seconds."""
        new = [(key, one) for key, one in wanted.items() if key not in self.made][: self.processes]
        fitting = [(key, one) for key, one in new if self.spent + self.wall_seconds(one) <= self.limit]
        for run in at_once([(one, seed, self._watch(one, seed)) for (_, seed), one in fitting]):
            self.made[run.name, run.seed] = run
            self.told()

    def of(self, name: str) -> list[tuple[Candidate, Run]]:
        """Return the runs of a recipe that came to their end."""
        found = ((one, self.made[key]) for key, one in self.asked.items() if one.name == name)
        return [(one, run) for one, run in found if math.isfinite(run.metric)]

    def steps(self, share: float) -> int:
        """Return a share of the steps of the run that the user has in mind."""
        return round(share * self.total_steps)

    def seconds(self, recipe: Candidate, share: float) -> float:
        """Return the seconds of a recipe for a share of the run that the user has in mind."""
        times = [run.projected(self.steps(share)) for _, run in self.of(recipe.name)]
        return statistics.median(times) if times else math.inf

    def times(self, plan: Candidate, pairs: Sequence[tuple[Run, Run]]) -> tuple[list[float], list[float]]:
        """Return the seconds of stock and of a plan for the run that the user has in mind, from pairs of their runs."""
        stock = [run.projected(self.total_steps) for run, _ in pairs]
        return stock, [run.projected(self.steps(plan.share)) for _, run in pairs]

    def wall_seconds(self, candidate: Candidate) -> float:
        """Return how long a run takes at most, by the runs of the recipe, or of stock."""
        known = self.of(candidate.name) or self.of(STOCK)
        longer = (run.wall_seconds + (candidate.share / one.share - 1) * run.seconds for one, run in known)
        return max(longer, default=0.0)

    def _watch(self, candidate: Candidate, seed: int) -> Watch:
        if not self.asked:
            return Watch(chooses=True, seconds=(self.budget - self.aside) * HALF / LEAST_RUNS)
        slow = TOO_SLOW * candidate.share * max(run.seconds / one.share for one, run in self.of(STOCK))
        alike = (key for key, one in self.asked.items() if one.share == HALF == candidate.share and key[1] == seed)
        rivals = [self.made[key] for key in alike if math.isfinite(self.made[key].metric)]
        best = max(rivals, key=lambda run: run.metric, default=None)
        return Watch(
            chooses=seed < FRESH_SEED,
            seconds=math.inf if candidate.name == STOCK else slow,
            losses=best.losses if best is not None and seed < FRESH_SEED else (),
        )

    def _check_first(self, key: tuple[str, int]) -> None:
        """Refuse a training of stock that diverges, and a budget that leaves no time for a decision."""
        run = self.made[key]
        if run.too_slow or self.aside + LEAST_RUNS * run.wall_seconds / HALF > self.budget:
            before, self.aside = self.aside, self.aside + run.charge
            del self.made[key], self.asked[key]
            raise EndedError(self._too_short(before, run))
        if not math.isfinite(run.metric):
            raise FactoryError(
                f"the stock loop ended with the metric {run.metric} (seed {key[1]}); there is nothing to keep."
            )

    def _too_short(self, before: float, run: Run) -> str:
        """Return why the budget is refused, and which one is not, given the first run and the seconds before it."""
        needed = math.ceil(MARGIN * (before + LEAST_RUNS * run.wall_seconds / HALF))
        return (
            f"the budget of {self.budget:.0f} s is too short; at least {needed} s are needed: half of a run takes "
            f"{'more than ' if run.too_slow else ''}{in_seconds(run.wall_seconds)}, a decision needs at least "
            f"{LEAST_RUNS} runs, and {in_seconds(before)} were spent before the first. Shorten the run, or allow more "
            "time"
        )

    def _check_seeds(self, candidate: Candidate) -> None:
        """Refuse a factory whose runs are the same for two seeds."""
        runs = ((seed, self.made[label, seed]) for label, seed in self.asked if label == candidate.label)
        check_seeds(
            (seed, (run.first_loss, *run.losses, run.last_loss, run.metric))
            for seed, run in runs
            if run.first_loss is not None
        )
