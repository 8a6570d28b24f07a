"""The decisions of a tuning: which candidate is trained next, when it is accepted or dropped, and what is composed.

All decisions are functions of the finished runs, in the order in which they were asked for. So a resumed tuning, which
has some of them already, decides the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchboost.bench.factory import check_seeds
from torchboost.errors import FactoryError
from torchboost.measure.statistics import Look, SequentialTest, paired_ratio
from torchboost.tuning.report import STOCK, Candidate, Finding, Outcome, Run

__all__ = ["FRESH_SEED", "LEAST_GAIN", "OverBudgetError", "Race", "combined"]

LEAST_GAIN = 1.03
"""A gain of less than 3 % is not worth the complexity."""

RESERVED_PAIRS, RESERVED = 6, 0.4
"""So many pairs of runs are set aside for the final test, but at most this share of the budget. If there are several
candidates, so many runs more are set aside for its last attempt, which has the runs of stock already."""

MOST_ATTEMPTS = 3
"""The final test composes the accepted candidates in at most so many ways."""

LEAST_RUNS = 7
"""A decision needs so many runs as long as stock's."""

FRESH_SEED = 1000
"""The first seed of the final test, which shares no training with the tests that chose its members."""

GRID, FINE_GRID = 20, 50
"""Shares of steps of the rival are rounded up to twentieths, so that candidates share its runs, or, above 95 %, to
fiftieths."""


TOO_SLOW = 2.0
"""A candidate is stopped if its steps take longer than this multiple of the time of stock's."""


class OverBudgetError(Exception):
    """The next run does not fit into the budget."""


@dataclass(kw_only=True)
class Race:
    """Candidates against stock, paired by seed.

    Args:
        train: Trains a candidate with a seed, and stops it if its steps take longer than so many seconds.
        candidates: Without stock.
        drop: Largest accepted drop of the metric.
        budget: Seconds of all runs together, at least those of the first.
        total_steps: Steps of the run that the user has in mind, over which set-up is spread.
        most: Largest number of seeds per comparison.
        error: Error rate of each test; the attempts of the final test share it.
        spent: Seconds that were spent before.
        told: Called after every run, with the findings so far.
    """

    train: Callable[[Candidate, int, float], Run]
    candidates: Sequence[Candidate]
    drop: float
    budget: float
    total_steps: int
    most: int = 12
    error: float = 0.05
    spent: float = 0.0
    told: Callable[[Race], None] = lambda race: None
    runs: dict[tuple[str, int], Run] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)
    whole: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _limit: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        SequentialTest(margin=self.drop, most=self.most, error=self.error / MOST_ATTEMPTS)  # the strictest
        self.findings = {one.name: Finding(candidate=one) for one in self.candidates}

    def decide(self) -> dict[str, Any]:
        """Make all runs that are needed, and return the section ``extra`` of the final configuration."""
        self._limit = self.budget
        try:
            self._screen()
        except OverBudgetError as error:
            self._close(str(error))
        self._limit = self.budget
        metrics = [run.metric for (name, seed), run in self.runs.items() if name == STOCK and seed < FRESH_SEED]
        if len(metrics) > 2 and len(set(metrics)) == 1:
            self.notes.append(
                f"the metric of stock was {metrics[0]:g} for all {len(metrics)} seeds; if it does not depend on the "
                "training, it cannot show a loss"
            )
        accepted = [one for one in self.findings.values() if one.outcome == "kept"]
        return self._composed(_without_rivals(accepted))

    def _screen(self) -> None:
        stock = Candidate(name=STOCK)
        for seed in range(self.most):
            trying = [finding.candidate for finding in self.findings.values() if finding.outcome is None]
            if not trying:
                return
            run = self._run(stock, seed).wall_seconds
            left = self.budget - self.spent
            if len(self.runs) == 1 and (LEAST_RUNS - 1) * run > left:  # a resumed tuning has shown that it has enough
                raise OverBudgetError(
                    f"a run takes {run:.0f} s, and a decision needs at least six more, {(LEAST_RUNS - 1) * run:.0f} s; "
                    f"{max(0.0, left):.0f} s are left. Shorten the run, or allow more time"
                )
            self._limit = self.budget - self._aside()
            for candidate in trying:
                self._run(candidate, seed)
                self._judge(candidate, range(seed + 1))
        self._close(f"{self.most} seeds show neither that it keeps the metric nor that it does not")

    def _aside(self) -> float:
        """Return the seconds that are set aside for the final test."""
        runs = 2 if len(self.candidates) < 2 else 3
        return min(RESERVED * self.budget, runs * RESERVED_PAIRS * self.runs[STOCK, 0].wall_seconds)

    def _run(self, candidate: Candidate, seed: int) -> Run:
        key = candidate.name, seed
        if key in self.runs:
            return self.runs[key]
        stock, ours = (
            [run for (name, _), run in self.runs.items() if name == each] for each in (STOCK, candidate.name)
        )
        expected = [run.wall_seconds for run in ours] or [candidate.share * run.wall_seconds for run in stock]
        if self.spent + max(expected, default=0.0) > self._limit:
            aside = self.budget - self._limit
            purpose = "its last attempt" if self.whole else "the final test"
            rest = f"; {aside:.0f} s are set aside for {purpose}" if aside > 0 else ""
            raise OverBudgetError(f"the budget of {self.budget:.0f} s does not allow another run{rest}")
        limit = math.inf
        if not self.runs:
            limit = (self.budget - self.spent) / LEAST_RUNS
        elif stock and candidate.name in self.findings:
            limit = TOO_SLOW * max(run.seconds for run in stock)
        run = self.train(candidate, seed, limit)
        if candidate.name == STOCK and run.too_slow:
            self.spent += run.wall_seconds
            raise OverBudgetError(
                f"a run takes more than {limit:.0f} s, and a decision needs at least {LEAST_RUNS}; the budget is "
                f"{self.budget:.0f} s. Shorten the run, or allow more time"
            )
        if candidate.name == STOCK and not math.isfinite(run.metric):
            raise FactoryError(
                f"the stock loop ended with the metric {run.metric} (seed {seed}); there is nothing to keep."
            )
        self.runs[key] = run
        stock_runs = ((number, one) for (name, number), one in self.runs.items() if name == STOCK)
        check_seeds(
            (number, (one.first_loss, *one.losses, one.last_loss, one.metric))
            for number, one in stock_runs
            if one.first_loss is not None
        )
        self.spent += run.wall_seconds
        self.told(self)
        return run

    def _pairs(self, first: str, second: str, seeds: range) -> list[tuple[Run, Run]]:
        """Return the runs of both. Only these seeds count: a resumed tuning has runs of later ones already."""
        keys = [((first, seed), (second, seed)) for seed in seeds]
        return [(self.runs[one], self.runs[other]) for one, other in keys if one in self.runs and other in self.runs]

    def _differences(self, first: str, second: str, seeds: range) -> list[float]:
        return [one.metric - other.metric for one, other in self._pairs(first, second, seeds)]

    def _look(self, differences: Sequence[float], margin: float, error: float | None = None) -> Look:
        error = self.error if error is None else error
        return SequentialTest(margin=margin, most=self.most, error=error).look(differences)

    def _times(self, candidate: Candidate, seeds: range) -> tuple[list[float], list[float]]:
        """Return the seconds of stock and of a candidate for the run that the user has in mind."""
        pairs = self._pairs(STOCK, candidate.name, seeds)
        stock = [run.projected(self.total_steps) for run, _ in pairs]
        return stock, [run.projected(self.total_steps) for _, run in pairs]

    def _judge(self, candidate: Candidate, seeds: range) -> None:
        name = candidate.name
        ended = _ended_early(self.runs[name, seeds[-1]])
        if ended is not None:
            self._set(self.findings[name], *ended)
            return
        look = self._look(self._differences(name, STOCK, seeds), self.drop)
        finding = self._noted(self.findings[name], look, seeds)
        saves = self._saves(candidate, seeds)
        if look.state in ("failed", "futile"):
            self._set(finding, *_lost(look, self.drop))
        elif saves is False and finding.speed is not None:
            reason = f"it takes {1 / finding.speed.mid:.2f} times as long as stock; a gain below 3 % is not worth it"
            self._set(finding, "no gain", reason)
        elif look.state == "passed" and saves:
            self.findings[name] = finding
            self._against_fewer_steps(candidate)
        elif look.state == "exhausted":
            self._set(finding, "not shown", f"{look.pairs} seeds do not show that it keeps the metric")
        else:
            self.findings[name] = finding

    def _saves(self, candidate: Candidate, seeds: range) -> bool | None:
        """Whether a run is at least 3 % faster; None if it is not in these seeds, but more of them may show that."""
        stock, ours = self._times(candidate, seeds)
        if paired_ratio(stock, ours).mid >= LEAST_GAIN:
            return True
        beyond = [math.log(one / (LEAST_GAIN * other)) for one, other in zip(stock, ours, strict=True)]
        return False if self._look(beyond, 0.0).state == "failed" or len(beyond) >= self.most else None

    def _noted(self, finding: Finding, look: Look, seeds: range) -> Finding:
        bounded = math.isfinite(look.difference.low) and look.pairs > 0
        stock, ours = self._times(finding.candidate, seeds)
        pairs = [(stock.peak_bytes, run.peak_bytes) for stock, run in self._pairs(STOCK, finding.candidate.name, seeds)]
        memory = [own / stock for stock, own in pairs if own is not None and stock]
        return finding.model_copy(
            update={
                "seeds": look.pairs,
                "speed": paired_ratio(stock, ours) if ours else None,
                "memory": statistics.median(memory) if memory else None,
                "difference": look.difference if bounded else None,
                "detectable": look.detectable if math.isfinite(look.detectable) else None,
            }
        )

    def _against_fewer_steps(self, candidate: Candidate) -> None:
        finding = self.findings[candidate.name]
        if not candidate.skips_work or finding.speed is None:
            self._set(finding, "kept", "it keeps the metric and saves time")
            return
        share, steps = _share_for(finding.speed.mid), self.runs[STOCK, 0].steps
        if round(share * steps) >= steps:
            self._set(finding, "kept", f"it keeps the metric; fewer than {steps} steps take less time than it does")
            return
        rival = Candidate(name=f"stock, {share:.0%} of the steps", share=share)
        look, seeds = self._look([], 0.0), range(0)
        for seed in range(self.most):
            seeds = range(seed + 1)
            self._run(Candidate(name=STOCK), seed)
            ours = self._run(candidate, seed)
            if not math.isfinite(self._run(rival, seed).metric) and math.isfinite(ours.metric):
                self._set(finding, "kept", f"it keeps the metric, and stock with {share:.0%} of its steps diverged")
                return
            look = self._look(self._differences(candidate.name, rival.name, seeds), 0.0)
            if look.decided:
                break
        finding = finding.model_copy(update={"rival": look.difference, "rival_share": share})
        if look.state == "passed":
            self._set(finding, "kept", f"it keeps the metric, and stock with {share:.0%} of its steps does worse")
        else:
            reason = f"stock trained for {share:.0%} of its steps takes as long, and is not shown to do worse"
            self._set(finding, "not better than fewer steps", reason)
        harmless = self._look(self._differences(rival.name, STOCK, seeds), self.drop).state == "passed"
        note = f"{share:.0%} of the steps, with the schedule fitted to them, keep the metric of stock too"
        if harmless and note not in self.notes:
            self.notes.append(note)

    def _composed(self, accepted: Sequence[Finding]) -> dict[str, Any]:
        """Test the accepted candidates together with fresh seeds; if they fail, fewer of them.

        The attempts are known before the first one, and each has an equal part of the error rate, so that the
        probability that any of them passes although it harms is at most the error rate.
        """
        attempts = _attempts(accepted)
        for number, members in enumerate(attempts, start=1):
            whole = Candidate(
                name=" + ".join(finding.candidate.name for finding in members),
                extra=combined([finding.candidate.extra for finding in members]),
                skips_work=any(finding.candidate.skips_work for finding in members),
            )
            self.whole.append(Finding(candidate=whole))
            self._limit = self.budget - (0.0 if number == len(attempts) else self._aside() / 3)
            self._test_whole(whole, self.error / len(attempts))
            if self.whole[-1].outcome == "kept":
                return whole.extra
        return {}

    def _test_whole(self, whole: Candidate, rate: float) -> None:
        finding, look, saves = self.whole[-1], self._look([], self.drop, rate), None
        try:
            for seed in range(FRESH_SEED, FRESH_SEED + self.most):
                self._run(Candidate(name=STOCK), seed)
                ended = _ended_early(self._run(whole, seed))
                if ended is not None:
                    outcome, reason = ended
                    self.whole[-1] = finding.model_copy(update={"outcome": outcome, "reason": reason})
                    return
                seeds = range(FRESH_SEED, seed + 1)
                look = self._look(self._differences(whole.name, STOCK, seeds), self.drop, rate)
                finding = self._noted(finding, look, seeds)
                self.whole[-1] = finding
                saves = self._saves(whole, seeds)
                if look.decided and (saves is not None or look.state != "passed"):
                    break
        except OverBudgetError as error:
            tried: Outcome = "not shown" if finding.seeds else "not tried"
            self.whole[-1] = finding.model_copy(update={"outcome": tried, "reason": str(error)})
            return
        outcome, reason = (
            ("kept", "together they keep the metric") if look.state == "passed" else _lost(look, self.drop)
        )
        if outcome == "kept" and not saves:
            outcome, reason = "no gain", "together they save less than 3 %"
        self.whole[-1] = finding.model_copy(update={"outcome": outcome, "reason": reason})

    def _set(self, finding: Finding, outcome: Outcome, reason: str) -> None:
        self.findings[finding.candidate.name] = finding.model_copy(update={"outcome": outcome, "reason": reason})

    def _close(self, reason: str) -> None:
        for finding in list(self.findings.values()):
            if finding.outcome is None:
                self._set(finding, "not shown" if finding.seeds else "not tried", reason)


def _share_for(speed: float) -> float:
    """Return the share of the steps that takes as long as a candidate, or slightly longer; below 1."""
    share = math.ceil(GRID / speed) / GRID
    return share if share < 1 else math.ceil(FINE_GRID / speed) / FINE_GRID


def combined(extras: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the algorithms of several configurations together; an algorithm that one turns on is on."""
    names = dict.fromkeys(name for extra in extras for name in extra)
    values = {name: [extra[name] for extra in extras if name in extra] for name in names}
    return {name: next((value for value in finding if value is not False), False) for name, finding in values.items()}


def _without_rivals(accepted: Sequence[Finding]) -> list[Finding]:
    """Leave out candidates that set an algorithm which a faster one sets too."""
    chosen: list[Finding] = []
    taken: set[str] = set()
    for finding in sorted(accepted, key=lambda one: -(one.speed.mid if one.speed else 1.0)):
        names = {name for name, value in finding.candidate.extra.items() if value is not False}
        if not names & taken:
            chosen.append(finding)
            taken |= names
    return chosen


def _attempts(accepted: Sequence[Finding]) -> list[list[Finding]]:
    """Return what the final test tries in turn: all, all but one, and at last what leaves out no work.

    What leaves out work goes first; among equals what was shown to cost something, then what saves least.
    """

    def place(finding: Finding) -> tuple[bool, bool, float]:
        costs = finding.difference is not None and finding.difference.high < 0
        return finding.candidate.skips_work, costs, -(finding.speed.mid if finding.speed else 1.0)

    members = sorted(accepted, key=place)
    count, exact = len(members), sum(not finding.candidate.skips_work for finding in members)
    last = exact if 0 < exact < count - 1 else 1
    return [members[:size] for size in dict.fromkeys((count, count - 1, last)) if 0 < size <= count]


def _ended_early(run: Run) -> tuple[Outcome, str] | None:
    """Return what becomes of a candidate if a training of it did not come to its end; None if it did."""
    if run.failure:
        return "not usable", f"its training raised {run.failure}"
    if run.too_slow:
        return "no gain", f"its steps took more than {TOO_SLOW:g} times as long as stock's, so its training was stopped"
    return None


def _lost(look: Look, drop: float) -> tuple[Outcome, str]:
    if look.state == "failed" and not math.isfinite(look.difference.mid):
        return "lost", "its training diverged"
    if look.state == "failed":
        return "lost", f"it costs more than {drop:g}: {look.difference.mid:+.4g} on average"
    if look.state == "futile":
        outcome: Outcome = "lost" if look.difference.mid < -drop else "not shown"
        return outcome, f"{look.difference.mid:+.4g} on average; more seeds would hardly show that it keeps {drop:g}"
    return "not shown", f"{look.pairs} seeds do not show that it keeps the metric"
