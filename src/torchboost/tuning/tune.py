"""Find out which algorithms pay on a model without losing accuracy, within a budget of time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchboost.bench.bench import check_same
from torchboost.bench.factory import count_of, made_by, source_of
from torchboost.core.arguments import check_count, check_number, is_number, seconds_of
from torchboost.distributed.topology import Topology
from torchboost.errors import FactoryError, IncompatibleError
from torchboost.measure.stopwatch import Progress, environment, interrupts_kept
from torchboost.plan import Plan
from torchboost.registry import Facts
from torchboost.tuning.race import Race
from torchboost.tuning.report import Finding, TuneReport
from torchboost.tuning.training import (
    LEAST_STEPS,
    Training,
    fingerprint_of,
    fresh,
    looked_at,
    named_candidates,
    standard_candidates,
    try_levers,
)

__all__ = ["report_path", "tune"]

TRIAL_SHARE, TRIAL_MOST = 0.1, 60.0
"""The trial of the levers takes at most this share of the budget, and at most so many seconds."""

LEAST_ERROR, MOST_ERROR = 0.01, 0.5
"""Limits of ``error``; an attempt of the final test, with a third of it, needs 0.003 at least."""

LEAST_SEEDS, MOST_SEEDS = 3, 100
"""The limits of the sequential test are simulated for all seeds, which takes seconds for a hundred."""


def tune(
    make: Callable[[int], object],
    *,
    drop: float,
    budget: float | str,
    epochs: int = 1,
    total_steps: int | None = None,
    candidates: Mapping[str, Mapping[str, Any]] | None = None,
    seeds: int = 12,
    error: float = 0.05,
    device: torch.device | str = "cpu",
    title: str = "a model",
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> TuneReport:
    """Train candidates against the stock loop, and return what may be turned on for this model.

    First a trial chooses the levers that make a step faster here. Then every candidate is trained against stock, paired
    by seed, until a sequential test shows that it keeps the metric within ``drop``, or that it does not, or that more
    seeds would hardly decide. What leaves out work must also end with a better metric than stock trained for equally
    long with fewer steps. At last the accepted candidates are trained together, with fresh seeds, and tested as a
    whole; the result turns them on only if that passes. If not, fewer of them are tested, at last those that leave out
    no work. These attempts, at most three, have equal parts of ``error``, so the probability that something which costs
    more than ``drop`` is turned on is at most ``error``.

    Everything runs in this process. Of a training on several ranks, tune the part of one rank.

    The answer is valid for runs like those that were made: ``epochs`` passes over the factory's batches. A drop that
    only shows later in a longer run cannot be seen.

    Args:
        make: ``make(seed) -> (model, optimizer, loss, batches, evaluate[, schedule])``. ``evaluate(model)`` returns the
            metric, higher is better. ``schedule(optimizer, steps)`` returns a torch scheduler, stepped after every
            update.
        drop: Largest accepted drop of the metric, in its own units: 0.005 for half a point of an accuracy.
        budget: Seconds, or text such as ``"30m"``. The next run is not begun if it does not fit.
        epochs: Passes over the batches in a run of stock.
        total_steps: Updates of the training that the answer is for, over which compilation is spread; by default those
            of a run.
        candidates: Name -> section ``extra`` of a configuration, in place of the standard ones.
        seeds: Most seeds per comparison, from 3 to 100.
        error: Probability of a wrong decision in each comparison, and in the final test as a whole.
        device: Where the batches go.
        title: Of the report.
        out: JSON file of the resulting configuration; the report is saved next to it after every run, see
            :func:`report_path`.
        resume: Continue the report that is there. The runs in it are not repeated.
        progress: Called with the seconds that were spent.

    Raises:
        FactoryError: The factory returns something else or has no ``evaluate``, or the stock loop cannot be compared:
            it diverges, or has the same losses and metric for two seeds.
        IncompatibleError: ``torch.distributed`` has several ranks.
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, or the report belongs to another tuning.
        KeyboardInterrupt: Passed on. The report holds all finished runs.

    Example:
        >>> import torchboost
        >>> report = torchboost.tune(make, drop=0.005, budget="30m", out="boost.json")  # doctest: +SKIP
        >>> model, optimizer = torchboost.boost(model, optimizer, config="boost.json")  # doctest: +SKIP
    """
    check_number("drop", drop, above=True)
    check_count("epochs", epochs, of="passes over the batches")
    check_count("seeds", seeds, of="seeds per comparison")
    if not LEAST_SEEDS <= seeds <= MOST_SEEDS:
        raise ValueError(f"seeds: found {seeds}; give a number from {LEAST_SEEDS} to {MOST_SEEDS}.")
    if total_steps is not None:
        check_count("total_steps", total_steps, of="updates")
    if not is_number(error) or not LEAST_ERROR <= error < MOST_ERROR:
        raise ValueError(f"error: found {error!r}; give a number from {LEAST_ERROR} to below {MOST_ERROR}.")
    started, seconds, path = time.perf_counter(), seconds_of(budget), None if out is None else Path(out)
    if path is not None:
        _check_free(path, resume)
    parts = fresh(make)
    if parts.evaluate is None:
        raise FactoryError(
            "the factory has no evaluate; tune needs it: return (model, optimizer, loss, batches, evaluate)."
        )
    if Topology.current().world_size > 1:
        raise IncompatibleError("tune runs in one process, and here are several ranks; let one of them tune its part.")
    steps = epochs * count_of(parts.batches, seconds)
    if steps < LEAST_STEPS:
        raise FactoryError("a run has one step, of which no speed is known; give more batches, or more epochs.")
    if total_steps is not None and total_steps < steps:
        raise ValueError(f"total_steps: found {total_steps}; the runs that are made have {steps} steps.")
    report = TuneReport(
        title=title,
        model=type(parts.model).__name__,
        parameters=sum(param.numel() for param in parts.model.parameters()),
        drop=drop,
        budget_seconds=seconds,
        steps=steps,
        total_steps=steps if total_steps is None else total_steps,
        most_seeds=seeds,
        error=error,
        environment=environment(device),
        fingerprint=fingerprint_of(parts),
        source=source_of(make),
    )
    session = _Session(
        started=started,
        make=make,
        device=torch.device(device),
        out=path,
        progress=(lambda phase, done, total, note="": None) if progress is None else progress,
        report=report,
    )
    del parts  # a model less in memory during the runs
    if resume:
        session.take_up()
    return session.run(candidates)


def report_path(out: str | Path) -> Path:
    """Return where the report of a configuration file is: ``boost.report.json`` for ``boost.json`` and ``boost``.

    Raises:
        ValueError: It is a folder.
    """
    path = Path(out)
    if not path.name or path.is_dir():
        raise ValueError(f"out: found {str(out)!r}, a folder; give a file, such as boost.json.")
    return path.with_name(path.name.removesuffix(".json") + ".report.json")


@dataclass(kw_only=True)
class _Session:
    """A tuning under way: what was asked, and the report as far as it came."""

    started: float
    make: Callable[[int], object]
    device: torch.device
    out: Path | None
    progress: Progress
    report: TuneReport

    def tell(self, phase: str, done: float, total: float, note: str = "") -> None:
        """Tell the progress in whole seconds."""
        self.progress(phase, round(done), round(total), note)

    def take_up(self) -> None:
        """Continue the saved report.

        Raises:
            ValueError: It belongs to another tuning.
        """
        path, now = None if self.out is None else report_path(self.out), self.report
        if path is None or not path.is_file():
            return
        saved = TuneReport.load(path)
        names = ("title", "model", "parameters", "drop", "steps", "total_steps", "most_seeds", "error", "fingerprint")
        check_same(path, saved, now, names, "was made with")
        self.report = saved.model_copy(update={"budget_seconds": now.budget_seconds, "state": "running", "whole": []})

    @interrupts_kept()
    def run(self, extras: Mapping[str, Mapping[str, Any]] | None) -> TuneReport:
        findings = self._findings(extras)
        training = Training(
            make=self.make,
            steps=self.report.steps,
            device=self.device,
            told=lambda candidate, seed: self._spent(self.report.spent_seconds, f"{candidate.name}, seed {seed}"),
        )
        race = Race(
            train=training,
            candidates=[finding.candidate for finding in findings if finding.outcome is None],
            drop=self.report.drop,
            budget=self.report.budget_seconds,
            total_steps=self.report.total_steps,
            most=self.report.most_seeds,
            error=self.report.error,
            spent=self.report.spent_seconds + time.perf_counter() - self.started,
            told=lambda race: self._note(race, findings),
            runs={(run.name, run.seed): run for run in self.report.runs},
        )
        try:
            extra = race.decide()
        except KeyboardInterrupt:
            self._note(race, findings, state="interrupted")
            raise
        self._note(race, findings, state="complete", extra=extra)
        if self.out is not None:
            parts = made_by(self.make, 0)
            facts = Facts.measure(parts.model, total_steps=self.report.total_steps, loop="own")
            Plan.of("O0", {"extra": extra}, facts).fit(parts.model, parts.optimizer).save(self.out)
        return self.report

    def _findings(self, extras: Mapping[str, Mapping[str, Any]] | None) -> list[Finding]:
        """Return a finding for each candidate, with an outcome for those that cannot work here."""
        if self.report.findings:
            self._check_same_candidates(extras)
            kept = [finding for finding in self.report.findings if finding.outcome in ("not usable", "duplicate")]
            others = [finding for finding in self.report.findings if finding not in kept]
            return [*kept, *(Finding(candidate=finding.candidate) for finding in others)]
        candidates = [] if extras is None else named_candidates(extras)
        if extras is None:
            self.tell("trial of the levers", 0, 1)
            seconds = min(TRIAL_MOST, TRIAL_SHARE * self.report.budget_seconds)
            levers, left_out = try_levers(self.make, steps=self.report.total_steps, seconds=seconds)
            self.report = self.report.model_copy(update={"left_out": left_out})
            candidates = standard_candidates(levers)
            self.tell("trial of the levers", 1, 1)
        return looked_at(candidates, self.make, self.report.steps)

    def _check_same_candidates(self, extras: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Raise ``ValueError`` if the candidates are not those of the report that is continued."""
        saved = [finding.candidate for finding in self.report.findings]
        now = saved if extras is None else named_candidates(extras)
        if sorted(map(repr, saved)) != sorted(map(repr, now)):
            known = ", ".join(repr(one.name) for one in saved)
            raise ValueError(
                f"the report was made with other candidates, or settings of them ({known}); give the same ones, or "
                "choose another file."
            )

    def _spent(self, seconds: float, note: str) -> None:
        self.tell("tuning", seconds, self.report.budget_seconds, note)

    def _note(self, race: Race, known: list[Finding], **update: Any) -> None:
        """Put what the race knows into the report, and save it."""
        self.report = self.report.model_copy(
            update={
                "findings": [race.findings.get(finding.candidate.name, finding) for finding in known],
                "whole": list(race.whole),
                "runs": list(race.runs.values()),
                "spent_seconds": race.spent,
                "notes": list(race.notes),
                **update,
            }
        )
        if self.out is not None:
            self.report.save(report_path(self.out))
        last = self.report.runs[-1] if self.report.runs else None
        self._spent(race.spent, "" if last is None else f"{last.name}, seed {last.seed}: {last.metric:.4g}")


def _check_free(out: Path, resume: bool) -> None:
    """Raise ``ValueError`` if the files cannot be written, or would replace something."""
    report = report_path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"out: {out.parent} cannot be written to; choose another folder.")
    if report.exists() and not resume:
        raise ValueError(f"{report} exists; continue it with resume=True (--resume), or choose another file.")
    if out.exists() and not report.exists():
        raise ValueError(f"{out} exists and is not from a tuning, since {report.name} is missing; choose another file.")
