"""The decisions of a tuning: a search, and a confirmation with fresh seeds that alone decides what is turned on.

All decisions are functions of the finished runs, in the order in which they are asked for. So a resumed tuning, which
has some of them already, decides the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchboost.bench.report import wording
from torchboost.measure.statistics import Look, SequentialTest, paired_ratio
from torchboost.tuning.report import FRESH_SEED, STOCK, Candidate, Finding, Outcome, Rate, Run
from torchboost.tuning.runs import HALF, EndedError, RecipeEndedError
from torchboost.tuning.search import LEAST_GAIN, RUNG, SEEDS, Search, memory_ratio

LONGER = 0.15
"""If the fastest plan is not confirmed, it is tried with so much more of the steps."""

MOST_ATTEMPTS = 3
"""Plans that the confirmation tries."""

MOST_TESTS = MOST_ATTEMPTS + 1
"""Tests that share the error rate: the attempts, and the test of stock's best rate."""

LEAST_SEEDS = 3
"""Fewest seeds of a test. Without time for them an attempt is not begun. Nothing is set aside for later attempts: a few
seeds for each of them would decide nothing."""

LARGE = 0.25
"""A drop of more than this share of the metric was perhaps meant in other units."""

OWN_SEEDS = 3
"""If stock's best rate is another than the user's, they are compared with so many fresh seeds."""


@dataclass(kw_only=True)
class Race:
    """A search, and the test of its fastest plans against stock.

    Args:
        search: The recipes, the runs and the accepted drop.
        most: Largest number of seeds of a test.
        error: Probability that something is turned on that costs more than the accepted drop.
        fresh: The first seed of the tests, with which no run was made before.
        planned: Number of seeds for which the budget has time, if it is known from before an interruption.
        tested: The labels of what was tested, also with an earlier budget, with the error rate of each test.
        whole: The findings of the tests.
        notes: Further notes for the reader.
    """

    search: Search
    most: int = 12
    error: float = 0.05
    fresh: int = FRESH_SEED
    planned: int | None = None
    tested: dict[str, float] = field(default_factory=dict)
    whole: list[Finding] = field(default_factory=list, init=False)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        SequentialTest(margin=self.search.drop, most=self.most, error=self.error / MOST_TESTS)  # the strictest

    def decide(self) -> Candidate | None:
        """Make all runs that are needed, and return the plan that was confirmed. None without one.

        The attempts are known before the first fresh seed, and each has an equal part of the error rate, as has the
        test of stock's best rate against the user's. So whatever the search found, the probability that a harmful one
        passes is at most the error rate. If an earlier budget had other attempts, a note gives the sum.
        """
        self.search.make()
        runs, attempts, chosen = self.search.runs, self.attempts(), None
        part = self.error / max(1, len(attempts) + (self.search.stock.rate != 1.0))
        runs.limit = runs.budget
        if attempts and self.planned is None:
            self.planned = self._affordable(attempts[0])
        for plan in attempts:
            if self.confirm(plan, part).outcome == "kept":
                chosen = plan
                break
        self._conclude(chosen)
        self._compare_rates(part, decides=chosen is None)
        self._note_tested()
        self._note_metric()
        return chosen

    def _affordable(self, plan: Candidate) -> int:
        """Return for how many fresh seeds of a plan and of stock, at its best rate and the user's, there is time."""
        left, each = self.search.runs.budget - self.search.runs.spent, self._seconds(plan, 1)
        return int(left * self.search.runs.processes / each) if each else self.most

    def _seconds(self, plan: Candidate, pairs: int) -> float:
        """Return the seconds of so many pairs, one run after the other. Runs of stock that were made cost nothing."""
        runs, seeds = self.search.runs, range(self.fresh, self.fresh + pairs)
        stocks = {one.label: one for one in (self.search.stock, Candidate(name=STOCK))}.values()
        new = [one for one in stocks for seed in seeds if (one.label, seed) not in runs.asked]
        return pairs * runs.wall_seconds(plan) + sum(map(runs.wall_seconds, new))

    def attempts(self) -> list[Candidate]:
        """Return the plans that the confirmation tries in turn.

        These are the fastest plan, the same with more steps or else the next plan, and at last the levers alone, which
        skip no work. Without levers the last one is the next plan.
        """
        plans, levers = self.search.plans(), self.search.levers
        plans[:1] = map(self._safe, plans[:1])
        longer = [one.at(one.rate, min(1.0, round(one.share + LONGER, 2))) for one in plans[:1]]
        second = list(filter(self._saves_time, longer)) or plans[1:2]
        others = [one for one in plans[1:] if one not in second]
        tried = [*plans[:1], *second, *([levers] if self._can_be_tried(levers) else others[:1])]
        return list({one.label: one for one in tried if one.label != self.search.stock.label}.values())

    def _safe(self, plan: Candidate) -> Candidate:
        """Return a plan with as many steps as it needs so that the seeds for which there is time would confirm it.

        The search has seen by two seeds how much the metric varies, and how much it rises with the steps.
        """
        search, change = self.search, self.search.findings[plan.name].change
        spread = search.spread(plan.name)
        if spread is None or change is None or plan.share == 1:
            return plan
        count = min(self.most, max(LEAST_SEEDS, self._affordable(plan)))
        test = SequentialTest(margin=search.drop, most=self.most, error=self.error / MOST_TESTS, planned=count)
        needed = test.limits[count - test.least] * spread / math.sqrt(count) - search.drop
        more = RUNG * math.ceil(min(LONGER, max(0.0, needed - change) / search.slope) / RUNG - 1e-9)
        longer = plan.at(plan.rate, min(1.0, round(plan.share + more, 2)))
        return longer if self._saves_time(longer) else plan

    def _saves_time(self, plan: Candidate) -> bool:
        runs = self.search.runs
        return runs.seconds(plan, plan.share) * LEAST_GAIN <= runs.seconds(Candidate(name=STOCK), 1.0)

    def _can_be_tried(self, levers: Candidate) -> bool:
        """Return whether there are levers and nothing speaks against them. A search that was cut short does not."""
        known = self.search.findings[levers.name].outcome in (None, "not tried")
        return levers.name != STOCK and known and bool(self.search.runs.asked)

    def confirm(self, plan: Candidate, error: float) -> Finding:
        """Test a plan against stock at its best rate, and at the user's, and return the finding."""
        self.whole.append(Finding(candidate=plan))
        outcome: Outcome = "kept"
        reason, runs = "", self.search.runs
        try:
            begun = (plan.label, self.fresh) in runs.made  # before an interruption
            if not begun and runs.spent + self._seconds(plan, LEAST_SEEDS) / runs.processes > runs.limit:
                raise EndedError(f"the budget of {runs.budget:.0f} s does not allow {LEAST_SEEDS} more pairs of runs")
            self._count(plan, error)
            for multiple in dict.fromkeys((self.search.stock.rate, 1.0)):
                outcome, reason = self._compared(plan, Candidate(name=STOCK, rate=multiple), error)
                if outcome != "kept":
                    break
        except EndedError as ended:
            outcome, reason = "not shown" if self.whole[-1].seeds else "not tried", str(ended)
        except RecipeEndedError as ended:
            outcome, reason = ended.outcome, ended.reason
        self.whole[-1] = self.whole[-1].model_copy(update={"outcome": outcome, "reason": reason})
        return self.whole[-1]

    def _compared(self, plan: Candidate, stock: Candidate, error: float) -> tuple[Outcome, str]:
        runs, pairs, saves = self.search.runs, list[tuple[Run, Run]](), None
        test = SequentialTest(margin=self.search.drop, most=self.most, error=error, planned=self.planned)
        is_best = stock.rate == self.search.stock.rate
        look = test.look([])
        for seed in range(self.fresh, self.fresh + self.most):
            later = [(one, number) for number in range(seed, self.fresh + self.most) for one in (stock, plan)]
            baseline = runs.run(stock, seed, later)
            if not math.isfinite(baseline.metric):
                if is_best:
                    return "not shown", f"stock itself diverges with seed {seed}, so nothing can be compared with it"
                return "kept", "it keeps the metric; stock at your rate diverges"
            runs.score(plan, seed, later)
            pairs.append((baseline, runs.made[plan.label, seed]))
            look = test.look([ours.metric - other.metric for other, ours in pairs])
            saves = self._saves(plan, pairs, error)
            if is_best:
                self.whole[-1] = self._noted(plan, pairs, look)
            if look.decided and (saves is not None or look.state != "passed"):
                break
        if look.state == "passed":
            return ("kept", "it keeps the metric and saves time") if saves else ("no gain", "it saves less than 3 %")
        outcome, reason = _lost(look, self.search.drop)
        return outcome, reason if is_best else f"against stock at your rate: {reason}"

    def _saves(self, plan: Candidate, pairs: Sequence[tuple[Run, Run]], error: float) -> bool | None:
        """Whether a run is at least 3 % faster. None if these seeds do not show it, but more of them may."""
        stock, ours = self.search.runs.times(plan, pairs)
        if paired_ratio(stock, ours).mid >= LEAST_GAIN:
            return True
        beyond = [math.log(one / (LEAST_GAIN * other)) for one, other in zip(stock, ours, strict=True)]
        look = SequentialTest(margin=0.0, most=self.most, error=error).look(beyond)
        return False if look.state == "failed" or len(beyond) >= self.most else None

    def _noted(self, plan: Candidate, pairs: Sequence[tuple[Run, Run]], look: Look) -> Finding:
        return Finding(
            candidate=plan,
            seeds=look.pairs,
            speed=paired_ratio(*self.search.runs.times(plan, pairs)),
            memory=memory_ratio(pairs),
            change=look.difference.mid if math.isfinite(look.difference.mid) else None,
            difference=look.difference if math.isfinite(look.difference.low) else None,
            detectable=look.detectable if math.isfinite(look.detectable) else None,
        )

    def _conclude(self, chosen: Candidate | None) -> None:
        """Say what became of every plan of the search. Of several attempts with a recipe, the last trained one counts.

        If none was trained, the finding of the search is kept.
        """
        search = self.search
        for tested in self.whole:
            name = tested.candidate.name
            known = search.findings[name]
            if tested.outcome != "not tried":
                search.findings[name] = tested.model_copy(update={"rates": known.rates})
            elif not any(one.candidate.name == name and one.outcome != "not tried" for one in self.whole):
                search.end(name, "not tried", tested.reason)
        for name, finding in list(search.findings.items()):
            if finding.outcome is None:
                search.end(name, *self._untested(finding, chosen))

    def _untested(self, finding: Finding, chosen: Candidate | None) -> tuple[Outcome, str]:
        """Return why a recipe that kept the metric in the search was not tested."""
        plan, runs = finding.candidate, self.search.runs
        if chosen is None and plan.label == self.search.stock.label:
            return self.search.all_steps
        others = [one.candidate for one in self.whole] if chosen is None else [chosen]
        if any(runs.seconds(plan, plan.share) < runs.seconds(one, one.share) for one in others):
            return "not chosen", "other plans were tested"
        longer = "it takes longer than what was tested"
        return "not chosen", longer if chosen is None else f"{chosen.words} takes less time"

    def _compare_rates(self, error: float, *, decides: bool) -> None:
        """Find out with fresh seeds what the user's rate costs, and whether stock's best one can take its place.

        If a plan was confirmed, its rate was too, and the first seeds suffice.
        """
        best, own = self.search.stock, Candidate(name=STOCK)
        if best.rate == own.rate:
            return
        if decides:
            self._count(best, error)
        test = SequentialTest(margin=self.search.drop, most=self.most, error=error, planned=self.planned)
        changes, look, sound = list[float](), test.look([]), True
        last = self.fresh + (self.most if decides else OWN_SEEDS)
        try:
            for seed in range(self.fresh, self.fresh + self.most):
                if len(changes) >= OWN_SEEDS and (look.decided or not decides):
                    break
                later = [(one, number) for number in range(seed, last) for one in (best, own)]
                first, second = (self.search.runs.run(one, seed, later).metric for one in (best, own))
                changes.append(first - second)
                sound = sound and math.isfinite(first)
                look = test.look(changes)
        except EndedError:
            pass
        if len(changes) >= OWN_SEEDS:
            change = statistics.fmean(changes)
            known = change if math.isfinite(change) else None
            better = sound if known is None else look.state == "passed" and known > 0  # the user's may diverge
            kept = decides and better
            self.search.rate = Rate(best=best.rate, change=known, seeds=len(changes), fresh=True, kept=kept)

    def _count(self, plan: Candidate, error: float) -> None:
        self.tested[plan.label] = max(error, self.tested.get(plan.label, 0.0))

    def _note_tested(self) -> None:
        total = sum(self.tested.values())
        if total > 1.001 * self.error:
            self.notes.append(
                f"{len(self.tested)} plans were tested, some of them with an earlier budget, so the probability of a "
                f"wrong decision in all of them is at most {total:.2g}, not {self.error:g}"
            )

    def _note_metric(self) -> None:
        own, made = self.search.recipes[0], self.search.runs.made
        half, whole = (made.get((own.at(1.0, share).label, SEEDS[0])) for share in (HALF, 1.0))
        if half is not None and whole is not None and half.metric - whole.metric > self.search.drop:
            self.notes.append(
                f"at your rate stock ends at {whole.metric:.4g}, below the {half.metric:.4g} after half of the steps; "
                "higher counts as better, so for a loss let evaluate return its negative"
            )
        metrics = [run.metric for one, run in self.search.runs.of(STOCK) if one.label == self.search.stock.label]
        if len(metrics) > 2 and len(set(metrics)) == 1:
            self.notes.append(
                f"the metric of stock was {metrics[0]:g} for all {len(metrics)} seeds; if it does not depend on the "
                "training, it cannot show a loss"
            )
        if metrics and self.search.drop > LARGE * abs(statistics.fmean(metrics)):
            self.notes.append(
                f"the accepted drop, {self.search.drop:g}, is more than a quarter of stock's metric, "
                f"{statistics.fmean(metrics):.4g}; it is in the units of the metric, in which half a point of an "
                "accuracy is 0.005"
            )


def _lost(look: Look, drop: float) -> tuple[Outcome, str]:
    mean = wording.better(look.difference.mid)
    if look.state == "failed" and not math.isfinite(look.difference.mid):
        return "lost", "its training diverged"
    if look.state == "failed":
        return "lost", f"it costs more than {drop:g}: {mean} on average"
    if look.state == "futile":
        outcome: Outcome = "lost" if look.difference.mid < -drop else "not shown"
        return outcome, f"{mean} on average; more seeds would hardly show that it keeps {drop:g}"
    return "not shown", f"{look.pairs} seeds do not show that it keeps the metric"
