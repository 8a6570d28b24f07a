"""The data of a tuning: plain, frozen values that are saved as JSON after every training."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from torchboost.measure.evidence import Environment, Interval, Record, SavedRecord

__all__ = ["BLOCK", "STOCK", "Candidate", "Finding", "Outcome", "Run", "TuneReport"]

STOCK = "stock"

BLOCK = 20
"""Steps whose training losses are averaged for the curve of a run."""

Outcome = Literal[
    "kept", "lost", "not shown", "no gain", "not better than fewer steps", "not usable", "duplicate", "not tried"
]
"""What became of a candidate: accepted, or why not. A duplicate's training would be that of an earlier candidate."""


class Candidate(Record):
    """A way to train the model.

    Args:
        name: For people and for the report; unique.
        extra: The section ``extra`` of a configuration that turns it on.
        skips_work: Whether it leaves out a part of the training, so that it must do better than stock does with fewer
            steps. False for what computes the same in less time.
        share: Share of the steps that are trained, with the schedule fitted to them.
        recipe: Whether a factory of its own, known by the name, trains it. It is not part of a configuration.
        fingerprint: Of that factory: its optimizer's settings, the start weights of seed 0, and its source.
    """

    name: str
    extra: dict[str, Any] = Field(default_factory=dict)
    skips_work: bool = False
    share: float = 1.0
    recipe: bool = False
    fingerprint: str = ""


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

    def projected(self, total_steps: int, share: float = 1.0) -> float:
        """Return the seconds of a run of so many stock steps; set-up is paid once."""
        return self.setup_seconds + self.seconds / max(1, self.steps - 1) * max(0, share * total_steps - 1)


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
