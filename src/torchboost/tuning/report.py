"""The data of a tuning, saved as JSON after every training, and what they say in words and as one HTML page."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field

from torchboost.bench.report.page import Scale, Tick, render, ticks
from torchboost.measure.evidence import Environment, Interval, Record, SavedRecord

__all__ = [
    "BLOCK",
    "HEADINGS",
    "STOCK",
    "Candidate",
    "Finding",
    "Outcome",
    "Run",
    "TuneReport",
    "cost",
    "headline",
    "horizon",
    "notes",
    "rows",
    "tune_page",
]

STOCK = "stock"

BLOCK = 20
"""Steps whose training losses are averaged for the curve of a run."""

Outcome = Literal[
    "kept", "lost", "not shown", "no gain", "not better than fewer steps", "not usable", "duplicate", "not tried"
]
"""What became of a candidate: accepted, or why not. A duplicate's training would be that of an earlier candidate."""


class Candidate(Record, extra="ignore"):
    """A way to train the model.

    Args:
        name: For people and for the report; unique.
        extra: The section ``extra`` of a configuration that turns it on.
        skips_work: Whether it leaves out a part of the training, so that it must do better than stock does with fewer
            steps. False for what computes the same in less time.
        share: Share of the steps that are trained, with the schedule fitted to them.
    """

    name: str
    extra: dict[str, Any] = Field(default_factory=dict)
    skips_work: bool = False
    share: float = 1.0


class Run(Record):
    """One training.

    Args:
        name: Of the candidate.
        seed: Of weights and data.
        steps: Updates.
        metric: At the end; higher is better. NaN if the training diverged, failed or was stopped.
        setup_seconds: Construction, the first step, and compilation.
        seconds: Training after the first step, without evaluation.
        wall_seconds: Everything, for the budget.
        losses: The mean training loss of each complete block of 20 steps.
        peak_bytes: How far the memory rose; None if the system does not tell.
        first_loss: The loss of the first step; None if the training failed.
        last_loss: The loss of the last step; None if the training failed.
        failure: The error that the training raised; empty if it raised none.
        too_slow: Whether the training was stopped because its steps took too long.
    """

    name: str
    seed: int
    steps: int
    metric: float
    setup_seconds: float
    seconds: float
    wall_seconds: float
    losses: list[float] = Field(default_factory=list)
    peak_bytes: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    failure: str = ""
    too_slow: bool = False

    def projected(self, total_steps: int) -> float:
        """Return the seconds of a run of another number of steps. Set-up is paid once."""
        return self.setup_seconds + self.seconds / max(1, self.steps - 1) * max(0, total_steps - 1)


class Finding(Record):
    """What is known about a candidate.

    Args:
        candidate: The candidate.
        outcome: What became of it, or None if it was still being tried.
        reason: One sentence.
        seeds: Pairs with stock.
        speed: Time of stock over its own for the whole run, projected to ``total_steps``.
        memory: Peak memory over that of stock, the median of the pairs; None if the system does not tell.
        difference: Metric minus that of stock, with bounds that hold at all looks; None before the first look.
        detectable: How far the mean must be above minus the accepted drop to be shown by the planned seeds, in four of
            five repetitions.
        rival: Metric minus that of stock trained for equally long with fewer steps, if that was compared.
        rival_share: Its share of the steps.
    """

    candidate: Candidate
    outcome: Outcome | None = None
    reason: str = ""
    seeds: int = 0
    speed: Interval | None = None
    memory: float | None = None
    difference: Interval | None = None
    detectable: float | None = None
    rival: Interval | None = None
    rival_share: float | None = None


class TuneReport(SavedRecord):
    """The result of a tuning, complete or as far as it came.

    ``fingerprint`` tells trainings apart: the optimizer's settings, the modules, and the start weights and buffers of
    seed 0. ``source`` tells apart the versions of the file that defines the factory; it is empty if there is none.
    ``left_out`` has the levers that the trial did not keep, with the reasons. ``extra`` is what the final configuration
    turns on: the accepted candidates together, if they passed as a whole.
    """

    format: Literal[1] = 1
    title: str
    model: str
    parameters: int
    drop: float
    budget_seconds: float
    spent_seconds: float = 0.0
    steps: int
    total_steps: int
    most_seeds: int
    error: float
    state: Literal["running", "interrupted", "complete"] = "running"
    findings: list[Finding] = Field(default_factory=list)
    whole: list[Finding] = Field(default_factory=list)
    left_out: dict[str, str] = Field(default_factory=dict)
    extra: dict[str, Any] = Field(default_factory=dict)
    runs: list[Run] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    environment: Environment
    fingerprint: str = ""
    source: str = ""

    def stock_losses(self) -> list[float]:
        """Return the training loss of stock at every step, for :class:`torchboost.Guard`.

        It is the mean of all seeds, constant within blocks of 20 steps, and ends with the last complete block. A run
        that is compared with it must have the same number of steps and the same schedule.

        Raises:
            ValueError: The report has no complete block of stock.
        """
        curves = [run.losses for run in self.runs if run.name == STOCK and len(run.losses) == self.steps // BLOCK]
        if not curves or not curves[0]:
            raise ValueError(
                f"the report has no losses of stock: found {len(curves)} complete runs of {self.steps} steps; a run "
                f"needs at least {BLOCK} steps."
            )
        return [sum(block) / len(block) for block in zip(*curves, strict=True) for _ in range(BLOCK)]


HEADINGS = ("candidate", "outcome", "speed", "memory", "metric against stock", "seeds", "why")


def headline(report: TuneReport) -> str:
    """Return the answer in one sentence, or how far the tuning came."""
    if report.state != "complete":
        return f"Not finished: {len(report.runs)} runs in {report.spent_seconds:.0f} s; continue with --resume."
    proven = proven_whole(report)
    if proven is not None:
        gain = "" if proven.speed is None else f" A training then takes {1 / proven.speed.mid:.0%} of the time."
        return f"Turn on {proven.candidate.name}.{gain}"
    if any(finding.outcome == "kept" for finding in report.findings):
        reason = report.whole[-1].reason if report.whole else "it was not tried"
        return f"Nothing is turned on: what passed alone was not shown to keep the metric in the final test ({reason})."
    return f"Nothing is turned on: no candidate was shown to save time and keep the metric within {report.drop:g}."


def cost(report: TuneReport) -> str:
    """Return what the answer costs in the metric; empty if nothing is turned on."""
    proven = proven_whole(report)
    if proven is None or proven.difference is None:
        return ""
    change = proven.difference
    return (
        f"The metric changes by {change.mid:+.2g}, at worst {change.low:+.2g} at {change.confidence:.1%} confidence, "
        f"over {proven.seeds} seeds; {report.drop:g} was accepted."
    )


def proven_whole(report: TuneReport) -> Finding | None:
    """Return the final test that passed; None without one."""
    return next((finding for finding in reversed(report.whole) if finding.outcome == "kept"), None)


def horizon(report: TuneReport) -> str:
    """Return for which runs the answer holds, and what it could have seen."""
    seen = [finding.detectable for finding in report.findings if finding.detectable is not None]
    power = f" The tests could see a drop of {max(seen):.3g} beyond the accepted one." if seen else ""
    return (
        f"Runs of {report.steps:,} steps, at most {report.most_seeds} seeds; the answer is for {report.total_steps:,} "
        f"steps. A drop that only shows later in a longer run cannot be seen.{power}"
    )


def notes(report: TuneReport) -> list[str]:
    """Return what else a reader must know: which levers were no candidates, and the notes of the tuning."""
    left_out = "; ".join(f"{name} ({reason})" for name, reason in report.left_out.items())
    trial = [f"The trial of the levers left out {left_out}"] if left_out else []
    return [f"{note}." for note in (*trial, *report.notes)]


def rows(report: TuneReport) -> list[list[str]]:
    """Return a line of text per candidate and final test."""

    def row(name: str, finding: Finding, reason: str) -> list[str]:
        speed = "" if finding.speed is None else f"{finding.speed.mid:.2f}x"
        memory = "" if finding.memory is None else f"{finding.memory:.2f}x"
        change, metric = finding.difference, ""
        if change is not None and math.isfinite(change.mid):
            metric = f"{change.mid:+.4f} ({change.low:+.4f} to {change.high:+.4f})"
        return [name, finding.outcome or "open", speed, memory, metric, str(finding.seeds or ""), reason]

    together = [row("together", one, f"{one.candidate.name}: {one.reason}") for one in report.whole]
    return [row(one.candidate.name, one, one.reason) for one in report.findings] + together


def tune_page(report: TuneReport) -> str:
    """Return the page of a tuning, with the answer first."""
    whole = [
        finding.model_copy(update={"candidate": finding.candidate.model_copy(update={"name": "together"})})
        for finding in report.whole
    ]
    differences = [one for one in (*report.findings, *whole) if one.difference and math.isfinite(one.difference.low)]
    bounds = [value for one in differences if one.difference for value in (one.difference.low, one.difference.high)]
    scale = Scale(min(*bounds, -1.4 * report.drop, 0), max(*bounds, 0.4 * report.drop, 0)) if bounds else Scale(0, 1)
    order = {STOCK: -1} | {finding.candidate.name: place for place, finding in enumerate(report.findings)}
    return render(
        "tuning.html",
        report=report,
        headline=headline(report),
        cost=cost(report),
        horizon=horizon(report),
        notes=notes(report),
        headings=HEADINGS,
        rows=rows(report),
        differences=differences,
        scale=scale,
        ticks=[Tick(scale(value), f"{value:+g}") for value in ticks(scale.low, scale.high)],
        runs=sorted(report.runs, key=lambda run: (order.get(run.name, len(order)), run.name, run.seed)),
    )
