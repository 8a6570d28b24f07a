"""The data of a tuning, saved as JSON after every training, and their summary in words and as one HTML page."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from typing_extensions import Self

from torchboost.bench.report import wording
from torchboost.bench.report.page import Scale, Tick, render, ticks
from torchboost.bench.verdict import COARSE
from torchboost.errors import ConfigError
from torchboost.measure.evidence import Environment, Interval, Record, SavedRecord
from torchboost.sheet import Sheet, percent

STOCK = "stock"
"""The name of the plain loop. Its rate and its length may differ from yours."""

BLOCK = 20
"""Steps whose training losses are averaged for the curve of a run."""

FRESH_SEED = 1000
"""The first seed of the confirmation, which shares no training with the search."""

Outcome = Literal[
    "kept",
    "lost",
    "not shown",
    "no gain",
    "not chosen",
    "not better than fewer steps",
    "not usable",
    "duplicate",
    "not tried",
]
"""What became of a recipe: confirmed, or why not. A duplicate's training would repeat an earlier one. Reports of
earlier versions have ``"not better than fewer steps"``."""


UNTRIED = ("not usable", "duplicate", "not tried", "not chosen")
"""Outcomes of recipes of which nothing was trained, unless there is a speed."""


class Candidate(Record, extra="ignore"):
    """A way to train the model: a recipe, at a rate, for a share of the steps.

    Args:
        name: Of the recipe, for people and for the report. Unique.
        extra: The section ``extra`` of a configuration that turns on its algorithms.
        recipe: Its optimizer at the rate that counts as 1: ``optimizer``, ``lr`` and ``rate`` of a section ``recipe``.
            Empty for the optimizer that the factory returns.
        rate: Multiple of that rate.
        share: Share of the steps that are trained, with the schedule fitted to them.
        base: Name of the recipe to which the search has added something. Empty for a recipe that was given.
    """

    name: str
    extra: dict[str, Any] = Field(default_factory=dict)
    recipe: dict[str, Any] = Field(default_factory=dict)
    rate: float = 1.0
    share: float = 1.0
    base: str = ""

    @field_validator("recipe", mode="before")
    @classmethod
    def _of_earlier_versions(cls, value: Any) -> Any:
        return {} if isinstance(value, bool) else value

    def at(self, rate: float, share: float = 1.0) -> Candidate:
        """Return the same recipe at another rate, for another share of the steps."""
        return self.model_copy(update={"rate": rate, "share": share})

    @property
    def label(self) -> str:
        """The name of its runs, unique among all recipes, rates and lengths."""
        rate = "" if self.rate == 1 else f", {self.rate:g} times the rate"
        if "lr" in self.recipe:  # of an optimizer that the user has no rate for
            rate = f" at {self.section['lr']:g}"
        return self.name + rate + self._others + ("" if self.share == 1 else f", {self.share:.0%} of the steps")

    @property
    def _others(self) -> str:
        """The rates of the weights that Muon leaves to their rule. Labels of earlier versions do not say them."""
        return f", other rates times {self.recipe['rate']:g}" if "rate" in self.recipe else ""

    @property
    def words(self) -> str:
        """The label as pages and tables show it. The label itself is the name of runs in saved files."""
        return self.label.replace(self._others, "").replace("% of the steps", " % of the steps")

    @property
    def section(self) -> dict[str, Any]:
        """The section ``recipe`` of a configuration. Empty if it changes nothing."""
        key, base = ("lr", self.recipe["lr"]) if "lr" in self.recipe else ("rate", self.recipe.get("rate", 1.0))
        section = {**self.recipe, key: float(f"{base * self.rate:.12g}"), "length": self.share}
        return {name: value for name, value in section.items() if name in ("optimizer", "lr") or value != 1}


class Run(Record):
    """One training.

    Args:
        name: Of the candidate.
        seed: Of weights and data.
        steps: Updates.
        metric: At the end. Higher is better. NaN if the training diverged, failed or was stopped. In the search it
            comes from ``validate``, if the factory has it, and with the seeds of the confirmation from ``evaluate``.
        setup_seconds: Construction, the first step, and compilation.
        seconds: Training after the first step, without evaluation.
        wall_seconds: Everything.
        charged_seconds: What it added to the time of the tuning, if it was made in a process that works with others.
            None if that is ``wall_seconds``.
        losses: The mean training loss of each complete block of 20 steps.
        peak_bytes: How far the memory rose. None if the system does not tell.
        first_loss: The loss of the first step. None if the training failed.
        last_loss: The loss of the last step. None if the training failed.
        failure: The error that the training raised. Empty if it raised none.
        too_slow: Whether the training was stopped because its steps took too long.
        hopeless: Whether it was stopped because another rate or recipe learned much faster.
    """

    name: str
    seed: int
    steps: int
    metric: float
    setup_seconds: float
    seconds: float
    wall_seconds: float
    charged_seconds: float | None = None
    losses: list[float] = Field(default_factory=list)
    peak_bytes: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    failure: str = ""
    too_slow: bool = False
    hopeless: bool = False

    @property
    def charge(self) -> float:
        """Its seconds of the budget."""
        return self.wall_seconds if self.charged_seconds is None else self.charged_seconds

    def projected(self, total_steps: int) -> float:
        """Return the seconds of a run of another number of steps. Set-up is paid once."""
        return self.setup_seconds + self.seconds / max(1, self.steps - 1) * max(0, total_steps - 1)


class Finding(Record):
    """The knowledge about a recipe, or about a plan in the confirmation.

    Args:
        candidate: The recipe at its best rate, and at the fewest steps that keep the metric.
        outcome: What became of it, or None if it was still being tried.
        reason: One sentence.
        rates: Multiple of the rate -> metric at half of the steps.
        seeds: Pairs with stock at its best rate.
        speed: Time of stock over its own for the whole run, projected to ``total_steps``.
        memory: Peak memory over stock's, the median of the pairs. None if the system does not tell.
        change: Metric minus stock's, the mean of the seeds.
        difference: The same with bounds that hold at all looks. Only the confirmation has it.
        detectable: How far the mean must be above minus the accepted drop to be shown by the planned seeds, in four of
            five repetitions.
        rival, rival_share: In reports of earlier versions, the difference to stock that is trained for equally long
            with fewer steps, and its share of them.
    """

    candidate: Candidate
    outcome: Outcome | None = None
    reason: str = ""
    rates: dict[float, float] = Field(default_factory=dict)
    seeds: int = 0
    speed: Interval | None = None
    memory: float | None = None
    change: float | None = None
    difference: Interval | None = None
    detectable: float | None = None
    rival: Interval | None = None
    rival_share: float | None = None


class Rate(Record):
    """Whether the user's learning rate is at its best.

    Args:
        best: The multiple of it with which stock ends best.
        change: The metric there minus the metric at the user's own rate. None if they were not compared at full length,
            or one of them diverged.
        seeds: Seeds of which it is the mean.
        fresh: Whether these are seeds of the confirmation, on the data of ``evaluate``.
        kept: Whether no plan was confirmed and this rate was: it is better, and costs no more than the accepted drop.
            If the user's own rate diverges, it suffices that this one does not.
    """

    best: float
    change: float | None = None
    seeds: int = 0
    fresh: bool = False
    kept: bool = False


class Start(Record):
    """The start of the search of a recipe, at which an earlier tuning ended.

    Args:
        rate: The multiple of its rate in the middle of those that are tried. None for the usual ones.
        share: The share of the steps that is tried first. None for a half.
    """

    rate: float | None = None
    share: float | None = None


class TuneReport(SavedRecord):
    """The result of a tuning, complete or as far as it came.

    The file has a seal, a hash of its content, which is compared when it is read.

    ``fingerprint`` tells trainings apart: the optimizer's settings, the modules, and the start weights and buffers of
    seed 0. ``data`` tells data apart by the first batch of seed 0. ``lr`` is the user's learning rate, the largest of
    the groups. Earlier files do not have them. ``source`` tells apart the versions of the file that defines the
    factory. It is empty if there is none. ``prior`` has the titles of the reports that the search began from,
    ``starts`` what they said about each recipe, and ``fresh_seed`` the first seed of the confirmation, which none of
    them has used. ``planned`` is the number of these seeds for which the budget had time when the first one was begun.
    ``tested`` has the labels of what was tested, also with an earlier budget, with the error rate of each test.
    ``rate_search`` is whether the user's learning rate was to be searched. ``left_out`` has the levers that the trial
    did not keep, with the reasons. ``levers`` are those that every recipe of the search has, ``exact`` the levers among
    them whose step is the plain one but for rounding. ``extra`` and ``recipe`` are the final configuration: the plan
    that was confirmed, or without one the exact levers.
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
    rate_search: bool = True
    state: Literal["running", "interrupted", "complete"] = "running"
    findings: list[Finding] = Field(default_factory=list)
    whole: list[Finding] = Field(default_factory=list)
    rate: Rate | None = None
    levers: list[str] = Field(default_factory=list)
    exact: list[str] = Field(default_factory=list)
    left_out: dict[str, str] = Field(default_factory=dict)
    extra: dict[str, Any] = Field(default_factory=dict)
    recipe: dict[str, Any] = Field(default_factory=dict)
    runs: list[Run] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    environment: Environment
    fingerprint: str = ""
    data: str = ""
    lr: float | None = None
    source: str = ""
    prior: list[str] = Field(default_factory=list)
    starts: dict[str, Start] = Field(default_factory=dict)
    fresh_seed: int = FRESH_SEED
    planned: int | None = None
    tested: dict[str, float] = Field(default_factory=dict)

    @property
    def sheet(self) -> Sheet:
        """The answer, what became of each candidate, and for which runs it holds."""
        return Sheet(
            before=tuple(filter(None, (headline(self), cost(self)))),
            headings=HEADINGS,
            rows=tuple(map(tuple, rows(self))),
            after=(horizon(self), *(f"Note: {note}" for note in notes(self))),
        )

    def __str__(self) -> str:
        return str(self.sheet)

    def _repr_html_(self) -> str:
        return self.sheet._repr_html_()

    def text(self) -> str:
        """Return the text that :meth:`save` writes: the report, after its seal."""
        content = json.loads(self.model_dump_json())
        return json.dumps({"seal": seal_of(content), **content}, indent=1, ensure_ascii=False)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of :meth:`save`. A file of an earlier version has no seal.

        Raises:
            ConfigError: The file was changed after it was written.
            pydantic.ValidationError: It is not a report of a tuning.
        """
        raw = Path(path).read_bytes()
        try:
            content = json.loads(raw)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            return cls.model_validate_json(raw)  # which says what is wrong
        if content.pop("seal", None) not in (None, seal_of(content)):
            raise ConfigError(
                "seal",
                found=f"that of another content in {path}",
                allowed="that of the content",
                hint="The report was changed after it was written. Restore it, or tune again.",
            )
        return cls.model_validate_json(json.dumps(content))

    @property
    def stock(self) -> Candidate:
        """Stock at its best rate, which the result is compared with."""
        return Candidate(name=STOCK, rate=self.rate.best if self.rate else 1.0)

    def stock_losses(self) -> list[float]:
        """Return the training loss of stock at its best rate, at every step, for :class:`torchboost.Guard`.

        It is the mean of all seeds, constant within blocks of 20 steps, and ends with the last complete block. A run
        that is compared with it must have the same number of steps and the same schedule.

        Raises:
            ValueError: The report has no complete block of stock.
        """
        runs = [run for run in self.runs if run.name == self.stock.label]
        curves = [run.losses for run in runs if len(run.losses) == self.steps // BLOCK]
        if not curves or not curves[0]:
            raise ValueError(
                f"the report has no losses of stock: found {len(curves)} complete runs of {self.steps} steps; a run "
                f"needs at least {BLOCK} steps."
            )
        return [sum(block) / len(block) for block in zip(*curves, strict=True) for _ in range(BLOCK)]

    def stock_finals(self) -> list[float]:
        """Return the metric of stock at its best rate at the end of each run of the confirmation.

        The runs of the search are excluded, because their metric may come from ``validate``.
        """
        return [run.metric for run in self.runs if run.name == self.stock.label and run.seed >= FRESH_SEED]


def seal_of(content: dict[str, Any]) -> str:
    """Return a hash of the content of a report, whatever the order and the layout of its JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


HEADINGS = ("recipe", "outcome", "rate", "steps", "speed", "memory", "metric against stock", "seeds", "why")


def headline(report: TuneReport) -> str:
    """Return the answer in one sentence, or how far the tuning came."""
    if report.state != "complete":
        return (
            f"Not finished: {len(report.runs)} runs in {wording.seconds(report.spent_seconds)}; continue with --resume."
        )
    proven = proven_whole(report)
    if proven is not None:
        return f"Turn on {turned_on(report)}.{_gain(proven)}"
    on, better = turned_on(report), report.rate is not None and report.rate.kept
    nothing = f"{'Nothing else' if on or better else 'Nothing'} is turned on"
    said = f"Turn on {on}: a step is faster and the same but for rounding. " if on else ""
    said += f"Train at {report.stock.rate:g} times your learning rate, as the configuration does. " if better else ""
    if report.whole:
        tested = max(report.whole, key=lambda finding: finding.seeds)  # of equals the first, which promised most
        more = " Continue with a longer --budget and --resume to decide it." if _ran_out(tested) else ""
        return (
            f"{said}{nothing}: {words_of(tested.candidate)} was not shown to keep the metric with fresh seeds "
            f"({tested.reason}).{more}"
        )
    if why := _untried(report):
        return f"{said}{why}."
    return f"{said}{nothing}: no recipe was found that saves time and keeps the metric within {report.drop:g}."


def _gain(proven: Finding) -> str:
    """Return how long a training takes, with both ends if they are far apart, as on a busy machine."""
    if proven.speed is None:
        return ""
    share = proven.speed.inverse
    ends = f" ({percent(share.low)} to {percent(share.high)})" if share.high > share.low * (1 + COARSE) else ""
    return f" A training then takes {percent(share.mid)} of the time{ends}."


def _untried(report: TuneReport) -> str:
    """Return why no recipe that can be used was tried. Empty if one was."""
    usable = [one for one in report.findings if one.outcome not in ("not usable", "duplicate")]
    if not usable or any(one.outcome != "not tried" for one in usable):
        return ""
    reason = usable[0].reason
    short = reason.partition(": ")[0] if _ran_out(usable[0]) else reason
    return f"{'No recipe was tried to its end' if report.runs else 'Nothing was tried'}: {short}"


def _ran_out(finding: Finding) -> bool:
    return finding.reason.startswith("the budget")


def turned_on(report: TuneReport) -> str:
    """Return what the final configuration turns on, in words. Empty without an algorithm."""
    proven = proven_whole(report)
    if proven is not None:
        return words_of(proven.candidate)
    return ", ".join(name for name, value in report.extra.items() if value is not False)


def words_of(candidate: Candidate) -> str:
    """Return a plan in words, with the algorithms that its name does not tell."""
    others = [name for name, value in candidate.extra.items() if value is not False and name not in candidate.name]
    return candidate.words + (f", with {', '.join(others)}" if others else "")


def _changed(value: float) -> str:
    return wording.difference(value, share=False)


def cost(report: TuneReport) -> str:
    """Return what the user's rate costs, what the answer costs in the metric, and when the tuning is repaid."""
    said = [rate_words(report)] if report.state == "complete" and report.rate else []
    proven = proven_whole(report)
    if proven is not None and proven.difference is not None:
        change, best = proven.difference, " at its best rate" if report.stock.rate != 1 else ""
        said.append(
            f"Against stock{best} the metric is {wording.better(change.mid)}, at worst {wording.better(change.low)}, "
            f"at {100 * change.confidence:.3g} % confidence, over {proven.seeds} seeds; {report.drop:g} was accepted."
        )
    return " ".join([*said, *repaid(report)])


def rate_words(report: TuneReport) -> str:
    """Return whether the user's rate is at its best, in one sentence. Empty if that is not known."""
    found = report.rate
    if found is None:
        return ""
    if found.best == 1:
        return "Your rate is at its best."
    times = f"{max(found.best, 1 / found.best):g} times too {'high' if found.best < 1 else 'low'}"
    many = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
    seeds = f"{found.seeds} fresh seeds" if found.fresh else f"{many} of the search"
    if found.change is not None and found.change <= 0:
        better = f"The search preferred {found.best:g} times your rate, but the metric is not higher there"
        return f"{better}: {_changed(found.change)}, with {seeds}."
    gain = "" if found.change is None else f": {_changed(found.change)} at {found.best:g} of it, with {seeds}"
    return f"Your rate is {times}{gain}.{' The configuration has the better one.' if found.kept else ''}"


def repaid(report: TuneReport) -> list[str]:
    """Return what the tuning cost, and after how many runs it is repaid, if that is known."""
    runs = [run for run in report.runs if run.name == report.stock.label and math.isfinite(run.metric)]
    if report.state != "complete" or not runs:
        return []
    stock = statistics.median(run.projected(report.total_steps) for run in runs)
    text = f"The tuning took as long as {report.spent_seconds / stock:.1f} runs of stock"
    proven = proven_whole(report)
    if proven is None or proven.speed is None:
        return [f"{text}."]
    saved = stock * (1 - 1 / proven.speed.mid)
    return [f"{text}, and is repaid after {math.ceil(report.spent_seconds / saved)} further runs."]


def proven_whole(report: TuneReport) -> Finding | None:
    """Return the plan that was confirmed. None without one."""
    return next((finding for finding in reversed(report.whole) if finding.outcome == "kept"), None)


def horizon(report: TuneReport) -> str:
    """Return for which runs the answer holds, and what it could have seen."""
    seen = [finding.detectable for finding in report.whole if finding.detectable is not None]
    power = f" The tests could see a drop of {max(seen):.3g} beyond the accepted one." if seen else ""
    return (
        f"Runs of {report.steps:,} steps, at most {report.most_seeds} seeds; the answer is for {report.total_steps:,} "
        f"steps. A drop that only shows later in a longer run cannot be seen.{power}"
    )


def notes(report: TuneReport) -> list[str]:
    """Return further notes for the reader: how to use the result, which levers all recipes have, and remarks."""
    left_out = "; ".join(f"{name} ({reason})" for name, reason in report.left_out.items())
    use = (
        ["Build the schedule after boost, on boosted.optimizer, and train boosted.steps updates"]
        if report.recipe
        else []
    )
    if report.recipe.get("optimizer") == "schedule_free_adamw":
        use = ["Leave the schedule out, call optimizer.eval() before an evaluation, and train boosted.steps updates"]
    trial = [f"Every recipe but stock has the switches {', '.join(report.levers)}"] if report.levers else []
    trial += [f"The trial of the switches left out {left_out}"] if left_out else []
    return [f"{note[:1].upper()}{note[1:]}." for note in (*use, *trial, *report.notes)]


def rows(report: TuneReport) -> list[list[str]]:
    """Return a line of text per recipe and plan that was confirmed or not."""

    def row(name: str, finding: Finding, reason: str, *, attempt: bool = False) -> list[str]:
        known, change = finding.candidate, finding.difference
        tried = attempt or finding.speed is not None or finding.outcome not in UNTRIED
        found = attempt or finding.change is not None or finding.outcome not in ("no gain", "lost")
        share = percent(known.share) if found else ""
        rate = f"{known.section['lr']:g}" if "lr" in known.recipe else wording.multiple(known.rate)
        speed = "" if finding.speed is None else wording.ratio(finding.speed.mid)
        memory = "" if finding.memory is None else wording.ratio(finding.memory)
        metric = "" if finding.change is None else _changed(finding.change)
        if change is not None and math.isfinite(change.mid):
            metric = wording.difference_interval(change)
        cells = [rate, share] if tried else ["", ""]
        return [name, finding.outcome or "open", *cells, speed, memory, metric, str(finding.seeds or ""), reason]

    confirmed = [row("confirmation", one, f"{one.candidate.name}: {one.reason}", attempt=True) for one in report.whole]
    untried = [one for one in report.findings if one.outcome == "not tried" and not one.rates and one.speed is None]
    alike = untried if len(untried) > 1 and len({one.reason for one in untried}) == 1 else []
    names = "; ".join(one.candidate.name for one in alike)
    together = [row(f"{len(alike)} recipes", one, f"{one.reason} ({names})") for one in alike[:1]]
    shown = [one for one in report.findings if one not in alike]
    return [*(row(one.candidate.name, one, one.reason) for one in shown), *together, *confirmed]


def rate_rows(report: TuneReport) -> list[list[str]]:
    """Return a line per recipe whose rate was searched: the metric at half of the steps, by multiples of the rate."""
    found = [finding for finding in report.findings if finding.rates]
    multiples = sorted({multiple for finding in found for multiple in finding.rates})

    def cell(finding: Finding, multiple: float) -> str:
        metric = finding.rates.get(multiple)
        return "" if metric is None else wording.measure(metric, share=False) if math.isfinite(metric) else "stopped"

    head = ["recipe", *map(wording.multiple, multiples)]
    return [head, *([one.candidate.name, *(cell(one, multiple) for multiple in multiples)] for one in found)]


def tune_page(report: TuneReport) -> str:
    """Return the page of a tuning, with the answer first."""
    differences = [one for one in report.whole if one.difference and math.isfinite(one.difference.low)]
    bounds = [value for one in differences if one.difference for value in (one.difference.low, one.difference.high)]
    low, high = min([*bounds, -1.4 * report.drop, 0]), max([*bounds, 0.4 * report.drop, 0])
    scale = Scale(low, high, 7.0, 93.0) if bounds else Scale(0, 1)  # the text of a mark has room on both sides
    return render(
        "tuning.html",
        report=report,
        headline=headline(report),
        cost=cost(report),
        horizon=horizon(report),
        notes=notes(report),
        headings=HEADINGS,
        rows=rows(report),
        rates=rate_rows(report),
        differences=differences,
        scale=scale,
        ticks=[Tick(scale(value), wording.difference(value, share=False)) for value in ticks(scale.low, scale.high)],
        runs=report.runs,
    )
