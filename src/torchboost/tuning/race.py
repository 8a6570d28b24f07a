"""The decisions of a tuning: which candidate is trained next, when it is accepted or dropped, and what is composed.

All decisions are functions of the finished runs, in the order in which they were asked for. A resumed tuning, which has
some of them already, and all ranks, which share them, decide the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchboost.bench.workloads.factory import ignored_seed
from torchboost.errors import FactoryError
from torchboost.measure.evidence import Interval
from torchboost.measure.sequential import Look, SequentialTest
from torchboost.measure.statistics import paired_ratio
from torchboost.tuning.evidence import STOCK, Candidate, Finding, Outcome, Run

__all__ = ["FRESH_SEED", "LEAST_GAIN", "OverBudgetError", "Race", "combined"]

LEAST_GAIN = 1.03
"""A gain of less than 3 % is not worth the complexity."""

RESERVED_PAIRS, RESERVED = 6, 0.4
"""So many pairs of runs are set aside for the final test, but at most this share of the budget."""

LEAST_RUNS = 7
"""A decision needs so many runs as long as stock's."""

FRESH_SEED = 1000
"""The first seed of the final test, which shares no training with the tests that chose its members."""

GRID, FINE_GRID = 20, 50
"""Shares of steps of the rival are rounded up to twentieths, so that candidates share its runs, or, above 95 %, to
fiftieths."""


class OverBudgetError(Exception):
    """The next run does not fit into the budget."""


TOO_SLOW = 2.0
"""A candidate is stopped if its steps take longer than this multiple of the time of stock's."""


class Train(Protocol):
    """Trains a candidate with a seed, and stops it if its steps take longer than so many seconds."""

    def __call__(self, candidate: Candidate, seed: int, limit: float = math.inf, /) -> Run: ...


@dataclass(kw_only=True)
class Race:
    """Candidates against stock, paired by seed.

    Args:
        train: Trains a candidate with a seed.
        candidates: Without stock.
        drop: Largest accepted drop of the metric.
        budget: Seconds of all runs together, at least those of the first.
        total_steps: Steps of the run that the user has in mind, over which set-up is spread.
        most: Largest number of seeds per comparison.
        error: Error rate of each test.
        spent: Seconds that were spent before.
        told: Called after every run, with the findings so far.
    """

    train: Train
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
        SequentialTest(margin=self.drop, most=self.most, error=self.error / 2)  # of the final test: the strictest
        self.findings = {one.name: Finding(candidate=one) for one in self.candidates}

    def decide(self) -> dict[str, Any]:
        """Make all runs that are needed, and return the section ``extra`` of the final configuration."""
        self._limit = self.budget
        try:
            self._screen()
        except OverBudgetError as error:
            self._close("not shown", str(error))
        self._limit = self.budget
        self._note_constant()
        accepted = [found for found in self.findings.values() if found.outcome == "kept" and not found.candidate.recipe]
        return self._composed(_without_rivals(accepted))

    def _screen(self) -> None:
        stock = Candidate(name=STOCK)
        for seed in range(self.most):
            trying = [found.candidate for found in self.findings.values() if found.outcome is None]
            if not trying:
                return
            self._run(stock, seed)
            if len(self.runs) == 1:  # a resumed tuning has shown that it can afford more
                self._check_affordable()
            aside = 2 * RESERVED_PAIRS * self.runs[STOCK, 0].wall_seconds
            self._limit = self.budget - min(RESERVED * self.budget, aside)
            for candidate in trying:
                self._run(candidate, seed)
                self._judge(candidate)
        self._close("not shown", f"{self.most} seeds show neither that it keeps the metric nor that it does not")

    def _check_affordable(self) -> None:
        run = self.runs[STOCK, 0].wall_seconds
        needed = (LEAST_RUNS - 1) * run
        if needed > self.budget - self.spent:
            raise OverBudgetError(
                f"a run takes {run:.0f} s, and a decision needs at least six more, {needed:.0f} s; "
                f"{max(0.0, self.budget - self.spent):.0f} s are left. Shorten the run, or allow more time"
            )

    def _run(self, candidate: Candidate, seed: int) -> Run:
        key = candidate.name, seed
        if key in self.runs:
            return self.runs[key]
        expected = self._expected(candidate)
        if self.spent + expected > self._limit:
            aside = self.budget - self._limit
            rest = f"; {aside:.0f} s are set aside for the final test" if aside > 0 else ""
            raise OverBudgetError(
                f"the budget was spent: {self.spent:.0f} s, and the next run takes {expected:.0f} s{rest}"
            )
        most = self._most_seconds(candidate)
        run = self.train(candidate, seed, most)
        if candidate.name == STOCK and run.too_slow:
            self.spent += run.wall_seconds
            raise OverBudgetError(
                f"a run takes more than {most:.0f} s, and a decision needs at least {LEAST_RUNS}; the budget is "
                f"{self.budget:.0f} s. Shorten the run, or allow more time"
            )
        if candidate.name == STOCK and not math.isfinite(run.metric):
            raise FactoryError(
                f"the stock loop ended with the metric {run.metric} (seed {seed}); there is nothing to keep."
            )
        self.runs[key] = run
        self._check_seeds()
        self.spent += run.wall_seconds
        self.told(self)
        return run

    def _check_seeds(self) -> None:
        """Raise ``FactoryError`` if two trainings of stock with different seeds are the same training."""
        seen: dict[tuple[float | None, ...], int] = {}
        for (name, seed), run in self.runs.items():
            if name == STOCK and run.first_loss is not None:
                same = seen.setdefault((run.first_loss, *run.losses, run.last_loss, run.metric), seed)
                if same != seed:
                    raise ignored_seed(same, seed)

    def _expected(self, candidate: Candidate) -> float:
        own = [run.wall_seconds for (name, _), run in self.runs.items() if name == candidate.name]
        stock = [run.wall_seconds for (name, _), run in self.runs.items() if name == STOCK]
        return max(own or [candidate.share * value for value in stock], default=0.0)

    def _note_constant(self) -> None:
        found = [run.metric for (name, _), run in self.runs.items() if name == STOCK]
        if len(found) > 2 and len(set(found)) == 1:
            self.notes.append(
                f"the metric of stock was {found[0]:g} for all {len(found)} seeds; if it does not depend on the "
                "training, it cannot show a loss"
            )

    def _most_seconds(self, candidate: Candidate) -> float:
        """Return when a training is stopped: the first one if the budget is too small for as many as are needed."""
        if not self.runs:
            return (self.budget - self.spent) / LEAST_RUNS
        stock = [run.seconds for (name, _), run in self.runs.items() if name == STOCK]
        if not stock or candidate.name not in self.findings:
            return math.inf
        return TOO_SLOW * max(stock)

    def _pairs(self, first: str, second: str, *, fresh: bool = False) -> list[int]:
        seeds = [seed for name, seed in self.runs if name == first and (seed >= FRESH_SEED) == fresh]
        return sorted(seed for seed in seeds if (second, seed) in self.runs)

    def _differences(self, first: str, second: str, *, fresh: bool = False) -> list[float]:
        seeds = self._pairs(first, second, fresh=fresh)
        return [self.runs[first, seed].metric - self.runs[second, seed].metric for seed in seeds]

    def _speed(self, candidate: Candidate, *, fresh: bool = False) -> Interval | None:
        seeds = self._pairs(candidate.name, STOCK, fresh=fresh)
        if not seeds:
            return None
        own = [self.runs[candidate.name, seed].projected(self.total_steps, candidate.share) for seed in seeds]
        return paired_ratio([self.runs[STOCK, seed].projected(self.total_steps) for seed in seeds], own)

    def _memory(self, name: str, *, fresh: bool) -> float | None:
        pairs = [(self.runs[name, seed], self.runs[STOCK, seed]) for seed in self._pairs(name, STOCK, fresh=fresh)]
        known = [(own.peak_bytes, stock.peak_bytes) for own, stock in pairs]
        found = [own / stock for own, stock in known if own is not None and stock]
        return statistics.median(found) if found else None

    def _judge(self, candidate: Candidate) -> None:
        name = candidate.name
        last = [run for (key, _), run in self.runs.items() if key == name][-1]
        ended = _ended_early(last)
        if ended is not None:
            self._set(self.findings[name], *ended)
            return
        look = SequentialTest(margin=self.drop, most=self.most, error=self.error).look(self._differences(name, STOCK))
        finding = self._noted(candidate, look)
        speed = finding.speed
        if look.state in ("failed", "futile"):
            self._set(finding, *_lost(look, self.drop))
        elif speed is not None and look.pairs >= 2 and speed.mid < LEAST_GAIN:
            reason = f"it takes {1 / speed.mid:.2f} times as long as stock; a gain below 3 % is not worth it"
            self._set(finding, "no gain", reason)
        elif look.state == "passed":
            self.findings[name] = finding
            self._against_fewer_steps(candidate)
        elif look.state == "exhausted":
            self._set(finding, "not shown", f"{look.pairs} seeds do not show that it keeps the metric")
        else:
            self.findings[name] = finding

    def _noted(self, candidate: Candidate, look: Look, *, fresh: bool = False) -> Finding:
        bounded = math.isfinite(look.difference.low) and look.pairs > 0
        return self.findings.get(candidate.name, Finding(candidate=candidate)).model_copy(
            update={
                "seeds": look.pairs,
                "speed": self._speed(candidate, fresh=fresh),
                "memory": self._memory(candidate.name, fresh=fresh),
                "difference": look.difference if bounded else None,
                "detectable": look.detectable if math.isfinite(look.detectable) else None,
            }
        )

    def _against_fewer_steps(self, candidate: Candidate) -> None:
        finding = self.findings[candidate.name]
        if not candidate.skips_work or finding.speed is None:
            self._set(finding, "kept", "it keeps the metric and saves time")
            return
        share = _share_for(finding.speed.mid)
        rival = Candidate(name=f"stock, {share:.0%} of the steps", share=share)
        test = SequentialTest(margin=0.0, most=self.most, error=self.error)
        look = test.look([])
        for seed in range(self.most):
            for one in (Candidate(name=STOCK), candidate, rival):
                self._run(one, seed)
            look = test.look(self._differences(candidate.name, rival.name))
            if look.decided:
                break
        finding = finding.model_copy(update={"rival": look.difference, "rival_share": share})
        if look.state == "passed":
            self._set(finding, "kept", f"it keeps the metric, and stock with {share:.0%} of its steps does worse")
        else:
            reason = f"stock trained for {share:.0%} of its steps takes as long, and is not shown to do worse"
            self._set(finding, "not better than fewer steps", reason)
        self._note_rival(rival)

    def _note_rival(self, rival: Candidate) -> None:
        test = SequentialTest(margin=self.drop, most=self.most, error=self.error)
        if test.look(self._differences(rival.name, STOCK)).state == "passed":
            note = f"{rival.share:.0%} of the steps, with the schedule fitted to them, keep the metric of stock too"
            self.notes += [] if note in self.notes else [note]

    def _composed(self, accepted: Sequence[Finding]) -> dict[str, Any]:
        """Test the accepted candidates together with fresh seeds; without the weakest if they fail."""
        members = sorted(accepted, key=lambda found: -(found.speed.mid if found.speed else 1.0))
        for attempt in range(2):
            if not members:
                return {}
            whole = Candidate(
                name=" + ".join(found.candidate.name for found in members),
                extra=combined([found.candidate.extra for found in members]),
                skips_work=any(found.candidate.skips_work for found in members),
            )
            self.whole.append(Finding(candidate=whole))
            self._test_whole(whole)
            if self.whole[-1].outcome == "kept":
                return whole.extra
            if attempt or len(members) == 1 or self.whole[-1].outcome == "not tried":
                return {}
            weakest = min(members, key=lambda found: found.difference.mid if found.difference else 0.0)
            members = [found for found in members if found is not weakest]
        return {}

    def _test_whole(self, whole: Candidate) -> None:
        test = SequentialTest(margin=self.drop, most=self.most, error=self.error / 2)
        finding, look = self.whole[-1], test.look([])
        try:
            for seed in range(FRESH_SEED, FRESH_SEED + self.most):
                self._run(Candidate(name=STOCK), seed)
                ended = _ended_early(self._run(whole, seed))
                if ended is not None:
                    outcome, reason = ended
                    self.whole[-1] = finding.model_copy(update={"outcome": outcome, "reason": reason})
                    return
                look = test.look(self._differences(whole.name, STOCK, fresh=True))
                finding = self._noted(whole, look, fresh=True)
                self.whole[-1] = finding
                if look.decided:
                    break
        except OverBudgetError as error:
            tried: Outcome = "not shown" if finding.seeds else "not tried"
            self.whole[-1] = finding.model_copy(update={"outcome": tried, "reason": str(error)})
            return
        outcome, reason = (
            ("kept", "together they keep the metric") if look.state == "passed" else _lost(look, self.drop)
        )
        if outcome == "kept" and finding.speed is not None and finding.speed.mid < LEAST_GAIN:
            outcome, reason = "no gain", "together they save less than 3 %"
        self.whole[-1] = finding.model_copy(update={"outcome": outcome, "reason": reason})

    def _set(self, finding: Finding, outcome: Outcome, reason: str) -> None:
        self.findings[finding.candidate.name] = finding.model_copy(update={"outcome": outcome, "reason": reason})

    def _close(self, outcome: Outcome, reason: str) -> None:
        for finding in list(self.findings.values()):
            if finding.outcome is None:
                self._set(finding, outcome if finding.seeds else "not tried", reason)


def _share_for(speed: float) -> float:
    """Return the share of the steps that takes as long as a candidate, or slightly longer; below 1."""
    share = math.ceil(GRID / speed) / GRID
    return share if share < 1 else math.ceil(FINE_GRID / speed) / FINE_GRID


def combined(extras: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the algorithms of several configurations together; an algorithm that one turns on is on."""
    names = dict.fromkeys(name for extra in extras for name in extra)
    values = {name: [extra[name] for extra in extras if name in extra] for name in names}
    return {name: next((value for value in found if value is not False), False) for name, found in values.items()}


def _without_rivals(accepted: Sequence[Finding]) -> list[Finding]:
    """Leave out candidates that set an algorithm which a faster one sets too."""
    chosen: list[Finding] = []
    taken: set[str] = set()
    for found in sorted(accepted, key=lambda one: -(one.speed.mid if one.speed else 1.0)):
        names = {name for name, value in found.candidate.extra.items() if value is not False}
        if not names & taken:
            chosen.append(found)
            taken |= names
    return chosen


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
