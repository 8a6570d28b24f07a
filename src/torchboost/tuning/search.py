"""The search of a tuning: the best rate of every recipe, and the fewest steps with which it keeps the metric."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchboost.bench.report import wording
from torchboost.measure.statistics import paired_ratio
from torchboost.sheet import percent
from torchboost.tuning.report import STOCK, Candidate, Finding, Outcome, Rate, Run, Start
from torchboost.tuning.runs import HALF, EndedError, RecipeEndedError, Runs

LEAST_GAIN = 1.03
"""A gain of less than 3 % is not worth the complexity."""

BUDGET, FOUND = 0.5, 0.35
"""The search may take so much of the budget. The rest is for the confirmation. Once it has a plan that takes half of
the time of stock with the levers, the second share."""

MULTIPLES, MORE_MULTIPLES = (1.0, 0.5, 2.0), 4
"""Multiples of its rate that every recipe gets, and how many more at most while an edge may be the best of them."""

RUNG = 0.05
SHARES = tuple(round(RUNG * step, 2) for step in range(4, 21))
"""Shares of the steps among which the fewest are found. They differ by a rung."""

MOSTLY = 0.75
"""Up to this share of the steps a recipe has the rate that was best at half of them, and beyond it the best at all."""

SEEDS = (0, 1)
"""Rates are compared with the first of these seeds alone, lengths with both."""

SLACK, HOPELESS = 2 / 3, 3.0
"""A length passes if it loses at most this part of the accepted drop on average: a plan that loses all of it could not
be confirmed. One that loses so many times the drop with the first seed gets no second one."""

FIRST = 2
"""So many recipes, stock and the one after it, get their lengths before the rates of the others are searched. With a
prior these are the recipes for which it has a plan."""


@dataclass(kw_only=True)
class Search:
    """Recipes against each other: each gets the same search of its rate, and then of its length.

    Args:
        runs: The trainings.
        recipes: The first is stock with the levers, or :data:`~torchboost.tuning.report.STOCK` itself without any.
        drop: Largest accepted drop of the metric.
        rates: Whether the rates of recipes without a rate of their own are searched too.
        starts: The starts of the searches, by the names of the recipes.
        least: Smallest share of the steps that a run can have. A smaller one would be trained with more than it says.
        findings: The knowledge about each recipe.
        rate: The knowledge about the user's rate.
        target: The metric of stock at its best rate, the mean of the seeds.
        all_steps: The outcome of stock with all of its steps, and why it has no fewer.
    """

    runs: Runs
    recipes: Sequence[Candidate]
    drop: float
    rates: bool = True
    starts: Mapping[str, Start] = field(default_factory=dict)
    least: float = 0.0
    findings: dict[str, Finding] = field(init=False)
    rate: Rate | None = field(default=None, init=False)
    target: float = field(default=math.nan, init=False)
    all_steps: tuple[Outcome, str] = field(default=("not tried", ""), init=False)

    def __post_init__(self) -> None:
        self.findings = {one.name: Finding(candidate=one) for one in self.recipes}

    @property
    def levers(self) -> Candidate:
        """Stock as the search trains it, at its best rate as far as that is known."""
        return self.recipes[0].at(self.rate.best if self.rate else 1.0)

    @property
    def stock(self) -> Candidate:
        """The plain loop at its best rate as far as that is known."""
        return Candidate(name=STOCK, rate=self.levers.rate)

    def plans(self) -> list[Candidate]:
        """Return the plans that keep the metric in the search, the fastest first."""
        found = [one.candidate for one in self.findings.values() if one.change is not None and one.outcome is None]
        return sorted(found, key=lambda one: self.runs.seconds(one, one.share))

    @property
    def slope(self) -> float:
        """How much the metric of stock with the levers rises, in the second half of the steps, per share of them."""
        return max(self.target - self._half(), self.drop) / HALF

    def spread(self, name: str) -> float | None:
        """Return how much the difference of a recipe to stock varies among seeds. None if no length had two seeds."""
        made, squares = self.runs.made, list[float]()
        for label in {one.label for one in self.runs.asked.values() if one.name == name} - {self.levers.label}:
            if all((label, seed) in self.runs.asked for seed in SEEDS):
                first, second = (made[label, seed].metric - made[self.levers.label, seed].metric for seed in SEEDS)
                squares.append((first - second) ** 2 / 2)
        return math.sqrt(statistics.fmean(squares)) if squares and math.isfinite(sum(squares)) else None

    def make(self) -> None:
        """Make the search as far as the budget allows."""
        self.runs.limit = BUDGET * self.runs.budget
        try:
            self._all()
        except EndedError as ended:
            if not self.all_steps[1]:
                self.all_steps = "not tried", f"its search for fewer steps did not end: {ended}"
            for name, finding in self.findings.items():
                if finding.outcome is None and finding.change is None:
                    self.end(name, "not tried", str(ended))

    def end(self, name: str, outcome: Outcome, reason: str) -> None:
        """Say what became of a recipe."""
        self.findings[name] = self.findings[name].model_copy(update={"outcome": outcome, "reason": reason})

    def _all(self) -> None:
        self.runs.score(Candidate(name=STOCK, share=HALF), SEEDS[0])
        self._tune(self.recipes[0])
        self._aim()
        first = max(FIRST, 1 + sum(self._start(recipe).share is not None for recipe in self.recipes[1:]))
        self._tune_all(self.recipes[1:first])
        self._build_up([recipe for recipe in self.recipes[first:] if not recipe.recipe])
        self._shorten_all()
        others = [recipe for recipe in self.recipes[first:] if self.findings[recipe.name].outcome is None]
        self._tune_all(others)
        self._shorten_all([recipe.name for recipe in others])

    def _tune_all(self, recipes: Sequence[Candidate]) -> None:
        for place, recipe in enumerate(recipes, start=1):
            self._tune(recipe, recipes[place:])

    def _build_up(self, recipes: Sequence[Candidate]) -> None:
        """Add algorithms to the recipe that promises most, if it has another optimizer, as long as it gets better.

        A first run has the rate that is best without the addition. If it promises more, its rate is searched too.
        """
        best = min(self._open(), key=self._promise, default=None)
        if best is None or not best.candidate.recipe:
            return
        for place, recipe in enumerate(recipes):
            base = best.candidate
            plan, *later = [self._added(base, one) for one in recipes[place:]]
            if plan is None:
                self.end(recipe.name, "not chosen", f"{base.name} promises more")
                continue
            try:
                score = self.runs.score(plan, SEEDS[0], [(one, SEEDS[0]) for one in later if one is not None])
            except RecipeEndedError:
                continue  # it is tried without the other optimizer
            self.end(recipe.name, "not chosen", f"it was tried together with {base.name}, which promises more")
            self.findings[plan.name] = Finding(candidate=plan.at(base.rate), rates={base.rate: score})
            if self._promise(self.findings[plan.name]) * LEAST_GAIN > self._promise(best):
                self.end(plan.name, "no gain", f"at half of the steps it promises no more than {base.name}")
                continue
            self.starts = {**self.starts, plan.name: Start(rate=base.rate)}
            self._tune(plan)
            best = self.findings[plan.name] if self.findings[plan.name].outcome is None else best

    def _added(self, base: Candidate, recipe: Candidate) -> Candidate | None:
        """Return a recipe with the algorithms of another one, at half of the steps. None if it sets them already."""
        added = {name: value for name, value in recipe.extra.items() if name not in self.recipes[0].extra}
        if added.keys() & base.extra.keys():
            return None
        name = f"{base.name} {'and' if base.base else 'with'} {recipe.name}"
        plan = base.model_copy(update={"name": name, "extra": {**base.extra, **added}, "base": base.name})
        return plan.at(base.rate, HALF)

    def _open(self, names: Collection[str] | None = None) -> list[Finding]:
        """Return what was found about recipes whose rates were searched, and that are still in the race."""
        found = [self.findings[name] for name in (self.findings if names is None else names)]
        return [one for one in found if one.outcome is None and one.rates]

    def _shorten_all(self, names: Collection[str] | None = None) -> None:
        for finding in sorted(self._open(names), key=self._promise):
            self._shorten(finding)
        whole = self.runs.seconds(self.levers, 1.0)
        if any(self.runs.seconds(plan, plan.share) <= HALF * whole for plan in self.plans()):
            self.runs.limit = FOUND * self.runs.budget

    def _tune(self, recipe: Candidate, others: Sequence[Candidate] = ()) -> None:
        """Find the best rate of a recipe at half of the steps. If that reaches the target, it is a plan at once.

        The first rates of the ``others`` will be tried next.
        """
        scores: dict[float, float] = {}
        recipe = self._based(recipe)
        try:
            while wanted := self._rates(recipe, scores):
                later = [*wanted[1:], *(one for other in others for one in self._rates(self._based(other), {}))]
                scores[wanted[0].rate] = self.runs.score(wanted[0], SEEDS[0], [(one, SEEDS[0]) for one in later])
                best = best_rate(scores)
                self.findings[recipe.name] = Finding(candidate=recipe.at(best), rates=dict(scores))
                if scores[best] >= self.target - SLACK * self.drop and self._slower(recipe) * HALF * LEAST_GAIN <= 1:
                    self._note(self.findings[recipe.name], recipe.at(best, HALF))
        except RecipeEndedError as ended:
            self._withdraw(recipe.name)
            self.end(recipe.name, ended.outcome, ended.reason)
            return
        best = best_rate(scores)
        if scores[best] == -math.inf:
            self.end(recipe.name, "lost", "its training diverged at every rate")
        elif recipe.name != self.levers.name:
            behind, slower = scores[best] - self._half(), self._slower(recipe)
            if behind < 0 and slower * LEAST_GAIN > 1:
                lost = wording.better(behind)
                reason = f"at half of the steps it ends {lost} than stock, in {slower:.2f} times the time"
                self.end(recipe.name, "no gain", reason)

    def _based(self, recipe: Candidate) -> Candidate:
        """Return a recipe at the rates from which it is searched. Muon trains the other weights as stock does best."""
        if recipe.recipe.get("optimizer") != "muon":
            return recipe
        return recipe.model_copy(update={"recipe": {**recipe.recipe, "rate": self.levers.rate}})

    def _rates(self, recipe: Candidate, scores: Mapping[float, float]) -> list[Candidate]:
        """Return a recipe at the rates that are tried next, given the metric at those that were tried."""
        grid = MULTIPLES if self.rates or "lr" in recipe.recipe else (1.0,)
        wanted = next_multiples(scores, grid, self._start(recipe).rate, self.drop)
        return [recipe.at(multiple, HALF) for multiple in wanted]

    def _start(self, recipe: Candidate) -> Start:
        return self.starts.get(recipe.name, Start())

    def _half(self) -> float:
        return self.findings[self.levers.name].rates[self.levers.rate]

    def _slower(self, recipe: Candidate) -> float:
        return self.runs.seconds(recipe, HALF) / self.runs.seconds(self.levers, HALF)

    def _aim(self) -> None:
        """Compare stock's best rate with the user's at full length. The better one gives the target.

        A rate that is far behind gets one seed.
        """
        finding = self.findings[self.levers.name]
        if finding.outcome is not None:
            raise EndedError(f"{self.levers.name}: {finding.reason}")
        means: dict[float, float] = {}
        plans = [self.recipes[0].at(multiple) for multiple in dict.fromkeys((finding.candidate.rate, 1.0))]
        for plan in plans:
            means[plan.rate] = self._mean(plan, plans)
            self.target = max(means.values())
        best = best_rate(means)
        if means[best] == -math.inf:
            raise EndedError(f"{self.levers.name}: its training diverged at full length")
        if self.rates:
            self.rate = self._rate(best)
        self._note(finding, self.levers)

    def _rate(self, best: float) -> Rate:
        """Return what stock's best rate gains over the user's, with the seeds that both have."""
        ours, own = self.recipes[0].at(best), self.recipes[0].at(1.0)
        seeds = [seed for seed in SEEDS if (own.label, seed) in self.runs.asked]
        made = self.runs.made
        change = statistics.fmean(made[ours.label, seed].metric - made[own.label, seed].metric for seed in seeds)
        return Rate(best=best, change=change if math.isfinite(change) else None, seeds=len(seeds))

    def _promise(self, finding: Finding) -> float:
        """Return the seconds in which a recipe is expected to reach the target, by its metric at half of the steps."""
        lacking = self.target - max(finding.rates.values())
        slope = max(self.target - self._half(), self.drop)
        share = min(1.0, max(SHARES[0], HALF + (1 - HALF) * lacking / slope))
        return self.runs.seconds(finding.candidate, share)

    def _shorten(self, finding: Finding) -> None:
        """Find the fewest steps with which a recipe keeps the target, if that takes less time than any plan so far."""
        plan, passed = finding.candidate, {}
        start = self._start(plan).share
        fastest = next(one for one in self.plans() if one.name != plan.name or one.share == 1)
        most = self.runs.seconds(fastest, fastest.share) / LEAST_GAIN
        shares = [share for share in SHARES if share >= self.least and self.runs.seconds(plan, share) <= most]
        if HALF not in shares and plan.share == HALF:
            self._withdraw(plan.name)
        try:
            while (share := next_share(shares, passed, start)) is not None:
                trial = plan.at(plan.rate if share > MOSTLY else best_rate(finding.rates), share)
                passed[share] = self._mean(trial) >= self.target - SLACK * self.drop
                if passed[share]:
                    self._note(self.findings[plan.name], trial)
                elif self.findings[plan.name].candidate.share == share:  # one seed alone had reached the target
                    self._withdraw(plan.name)
        except RecipeEndedError as ended:
            if self.findings[plan.name].seeds < len(SEEDS):
                self._withdraw(plan.name)
            if self.findings[plan.name].change is None:
                self.end(plan.name, ended.outcome, ended.reason)
            return
        if plan.name == self.levers.name:
            none = f"even {percent(max(SHARES[0], self.least))} of the steps save no time against {fastest.words}"
            self.all_steps = "no gain", "no smaller number of steps was found" if shares else none
        if self.findings[plan.name].change is None:
            lost = f"with {percent(shares[-1])} of the steps it does not keep the metric" if shares else ""
            slow = "" if shares and shares[-1] == 1 else f"more steps take longer than {fastest.words}"
            self.end(plan.name, "no gain", ", and ".join(filter(None, (lost, slow))))

    def _withdraw(self, name: str) -> None:
        """Take a recipe off the plans."""
        self.findings[name] = self.findings[name].model_copy(update={"change": None})

    def _mean(self, plan: Candidate, plans: Sequence[Candidate] = ()) -> float:
        """Return the mean metric of the seeds. Minus infinity, after one of them, if the target is out of reach.

        Those of other ``plans`` will be asked for next.
        """
        later = [(one, seed) for one in (plan, *plans) for seed in SEEDS]
        first = self.runs.score(plan, SEEDS[0], later)
        if first < self.target - HOPELESS * self.drop:
            return -math.inf
        return statistics.fmean([first, *(self.runs.score(plan, seed, later) for seed in SEEDS[1:])])

    def _note(self, finding: Finding, plan: Candidate) -> None:
        """Note that a plan keeps the metric, and what it saves."""
        both = [seed for seed in SEEDS if (plan.label, seed) in self.runs.asked]
        pairs = [(self.runs.made[self.levers.label, seed], self.runs.made[plan.label, seed]) for seed in both]
        self.findings[plan.name] = finding.model_copy(
            update={
                "candidate": plan,
                "seeds": len(both),
                "speed": paired_ratio(*self.runs.times(plan, pairs)),
                "change": statistics.fmean(run.metric for _, run in pairs) - self.target,
                "memory": memory_ratio(pairs),
            }
        )


def best_rate(scores: Mapping[float, float]) -> float:
    """Return the multiple with the best metric. Of equal ones, return the one that changes the rate least."""
    return max(scores, key=lambda multiple: (scores[multiple], -abs(math.log(multiple)), multiple))


def next_multiples(
    scores: Mapping[float, float],
    grid: Sequence[float] = MULTIPLES,
    start: float | None = None,
    tolerance: float = 0.0,
) -> list[float]:
    """Return the multiples that are tried next: those of the grid, or if the best is at an edge, one beyond it.

    The search also continues beyond an edge that is hardly worse than the best, since chance may have made it so.

    Args:
        scores: The metric at the multiples that were tried.
        grid: The usual ones.
        start: The best one of an earlier tuning. It is compared with 1, and if it is better, with its neighbours. The
            grid is skipped only if it is the best of all. So a wrong one makes the search longer, and no narrower.
        tolerance: How much worse such an edge may be.
    """
    near: tuple[float, ...] = ()
    wanted = grid
    if start is not None and len(grid) > 1:
        near = start, start / 2, start * 2
        if not {start, 1.0} <= scores.keys():
            wanted = start, 1.0
        elif best_rate(scores) == start and scores[start] > -math.inf:
            wanted = near
    left = [multiple for multiple in wanted if multiple not in scores]
    if left:
        return left
    best = best_rate(scores)
    more = scores.keys() - {*grid, *near}
    if len(grid) < 2 or len(more) >= MORE_MULTIPLES or scores[best] == -math.inf:
        return []
    edges = {min(scores): 0.5, max(scores): 2.0}
    beyond = [edge * step for edge, step in edges.items() if scores[edge] >= scores[best] - tolerance]
    return [multiple for multiple in (best / 2, best * 2, *beyond) if multiple not in scores][:1]


def next_share(shares: Sequence[float], passed: Mapping[float, bool], start: float | None = None) -> float | None:
    """Return the share of the steps that is tried next, or None if the fewest are known. It halves the open range.

    Args:
        shares: Those that would save time, in ascending order.
        passed: Whether those that were tried keep the metric. More steps than those that do keep it too.
        start: The fewest of an earlier tuning. It is tried first, and if it passes, the share below it.
    """
    low = max((place + 1 for place, share in enumerate(shares) if passed.get(share) is False), default=0)
    high = min((place for place, share in enumerate(shares) if passed.get(share)), default=len(shares))
    if low >= high:
        return None
    if not passed:
        return min(shares, key=lambda share: abs(share - (HALF if start is None else start)))
    if start is not None and len(passed) == 1 and high < len(shares):
        return shares[high - 1]
    return shares[(low + high) // 2]


def memory_ratio(pairs: Iterable[tuple[Run, Run]]) -> float | None:
    """Return the peak memory over stock's, the median of the pairs. None if the system does not tell."""
    known = ((stock.peak_bytes, ours.peak_bytes) for stock, ours in pairs)
    ratios = [own / stock for stock, own in known if own is not None and stock]
    return statistics.median(ratios) if ratios else None
