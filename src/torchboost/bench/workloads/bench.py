"""A whole benchmark: interleaved step times of all contestants, then training curves for each seed."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchboost.bench.workloads.contestants import Loop, Planner, Recipe, build_loop, plan_for
from torchboost.bench.workloads.data import Data
from torchboost.bench.workloads.factory import ignored_seed
from torchboost.bench.workloads.jobs import Job
from torchboost.measure.evidence import AlgorithmRow, BenchReport, Contestant, Curve, Quality
from torchboost.measure.machine import PeakMemory
from torchboost.measure.statistics import Look, SequentialTest, noninferiority
from torchboost.measure.stopwatch import Clock, Progress, Stopwatch, Warmup, compare, environment

__all__ = ["CONTESTANTS", "run_bench"]

CONTESTANTS = ("stock", "hand", "O1", "O2")

DISTINCT_BATCHES = 8
# Timed steps stay at the start of a long schedule, where rates are small and no contestant can diverge.
TIMING_SCHEDULE = 100_000
SMOOTHING = 0.95
STOCK = "stock"
PROMISING = ("O1", "O2")
MOST_SEEDS = 24
"""Seeds after which a sequential comparison ends."""
FEW_SEEDS = 2
"""Seeds of contestants that promise nothing, if seeds are added until the promises are decided."""
SEQUENTIAL = (
    "seeds were added until every promise was decided or the time was over; the bounds of the metric hold at all looks "
    "together"
)
UNITS_UNKNOWN = (
    "--decide: the levels promise points of accuracy, and the units of the factory's metric are not known. Add "
    "--accuracy if it is an accuracy. Otherwise leave --decide out, or test a limit of your own with "
    "`torchboost tune --drop`."
)
SAME = "turned on the same here, so their differences are chance"
ENOUGH_ROUNDS = 6
FEW_ROUNDS = "timed in fewer than six rounds: too few for a 95 % interval, the ones shown are too narrow"

Shown = Callable[[int], tuple[int, int]]
"""How much of all trainings is done, and how much there is, at the start of an epoch of the present one."""


@dataclass(frozen=True, kw_only=True)
class _Settings:
    job: Job
    data: Data
    epochs: int
    total_steps: int | None
    device: torch.device
    clock: Clock
    planner: Planner
    progress: Progress

    @property
    def steps(self) -> int:
        return self.epochs * self.data.steps(self.job.batch)

    def loop(self, name: str, seed: int, steps: int) -> Loop:
        return build_loop(
            Recipe.parse(name),
            self.job,
            self.data,
            seed=seed,
            steps=steps,
            total_steps=self.total_steps or self.steps or steps,
            device=self.device,
            planner=self.planner,
        )


def run_bench(
    job: Job,
    *,
    contestants: Sequence[str] = CONTESTANTS,
    pairs: int = 20,
    calls: int = 1,
    seeds: int = 3,
    epochs: int | None = None,
    total_steps: int | None = None,
    train_limit: int | None = None,
    data_path: str | Path | None = None,
    device: torch.device | str = "cpu",
    out: str | Path | None = None,
    resume: bool = False,
    decide: float | None = None,
    warmup: Warmup | None = None,
    clock: Clock | None = None,
    planner: Planner = plan_for,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure how fast each contestant steps and how well it learns, under equal conditions.

    First the step times are measured: all contestants in this process, interleaved, on the same batches. Then, for
    every seed, each contestant trains the same number of epochs from the same weights on the same batches. The metric
    is computed on the test set after each epoch and is not timed. The first step of a training run (allocation, kernel
    choice) counts as set-up for all contestants. The training runs reuse the graphs that were compiled for the step
    times, so the cost of compilation is in ``warmup_seconds``.

    Args:
        job: The training job.
        contestants: Names as in :mod:`torchboost.bench.workloads.contestants`.
        pairs: Number of interleaved rounds of timing.
        calls: Steps per sample.
        seeds: Training runs per contestant, with the seeds 0, 1, ...
        epochs: Epochs per run, by default the job's. 0 measures step times only.
        total_steps: Length of the run that the levels plan for, by default that of the curves.
        train_limit: Use only the first so many training samples.
        data_path: Path of the data, for jobs that need it.
        device: Where to train.
        out: File of the report. Saved after the timing and after every run.
        resume: Continue the report in ``out`` and do not repeat its measurements.
        decide: Seconds for everything. Seeds are added until a sequential test has decided about the metric of every
            level, or the time is over; ``seeds`` does not count then. Contestants that promise nothing get two seeds.
            The job must have margins.
        warmup: The rule by which a contestant counts as warm.
        clock: By default that of ``device``.
        planner: Chooses the algorithms of levels and additions.
        progress: Called in every phase.

    Raises:
        ValueError: Contestants are unknown or repeated, the report in ``out`` belongs to another measurement, or
            ``decide`` is given for a metric of unknown units.
        KeyboardInterrupt: Passed on. The report in ``out`` holds all complete runs.
    """
    _check(contestants, seeds, epochs)
    if decide is not None and job.margin is None:
        raise ValueError(UNITS_UNKNOWN)
    started = time.monotonic()
    device = torch.device(device)
    tell: Progress = progress if progress is not None else _silent
    tell("data", 0, 1, job.title)
    data = job.load(data_path, train_limit).to(device)
    tell("data", 1, 1, job.title)
    settings = _Settings(
        job=job,
        data=data,
        epochs=job.epochs if epochs is None else epochs,
        total_steps=total_steps,
        device=device,
        clock=clock if clock is not None else Clock.of(device),
        planner=planner,
        progress=tell,
    )
    report = _frame(settings)
    if resume and out is not None and Path(out).exists():
        report = _resumed(BenchReport.load(out), report, Path(out))
    known = [contestant.name for contestant in report.contestants]
    if not set(contestants) <= set(known):
        names = list(dict.fromkeys([*known, *contestants]))
        report = _timed(report, names, settings, pairs=pairs, calls=calls, warmup=warmup)
        _save(report, out)
    if decide is not None:
        return _decided(report, list(contestants), settings, end=started + decide, out=out)
    return _trained(report, list(contestants), settings, seeds=seeds, out=out)


def _check(contestants: Sequence[str], seeds: int, epochs: int | None) -> None:
    for name in contestants:
        Recipe.parse(name)
    if not contestants or len(set(contestants)) < len(contestants):
        raise ValueError(f"contestants: found {list(contestants)}; give at least one, and each once.")
    if seeds < 0 or (epochs is not None and epochs < 0):
        raise ValueError(f"found seeds={seeds}, epochs={epochs}; neither may be negative.")


def _silent(phase: str, done: int, total: int, note: str = "") -> None:
    return None


def _save(report: BenchReport, out: str | Path | None) -> None:
    if out is not None:
        report.save(out)


def _frame(settings: _Settings) -> BenchReport:
    job = settings.job
    model = job.model(settings.data, 0)
    return BenchReport(
        title=f"{job.title}: {job.model_name}",
        workload=job.name,
        model=job.model_name,
        parameters=sum(p.numel() for p in model.parameters()),
        batch=job.batch,
        metric_name=job.metric,
        metric_higher_is_better=job.higher_is_better,
        epochs=settings.epochs,
        train_samples=settings.data.samples,
        environment=environment(settings.device),
        contestants=[],
        source=job.source,
    )


def _resumed(saved: BenchReport, now: BenchReport, path: Path) -> BenchReport:
    """Return the saved report if it belongs to the same measurement, otherwise raise ``ValueError``."""
    for key in ("workload", "model", "parameters", "batch", "metric_name", "epochs", "train_samples"):
        _must_agree(key, getattr(saved, key), getattr(now, key), path)
    keys = ("torch", "torchboost", "processor", "device", "threads")
    for key in (*keys, "instructions") if saved.environment.instructions else keys:
        _must_agree(key, getattr(saved.environment, key), getattr(now.environment, key), path)
    if saved.source and saved.source != now.source:
        raise ValueError(
            f"{path} was measured with another version of the file {now.workload.rpartition(':')[0]!r}, or with other "
            "arguments of its function; runs of both cannot be mixed. Restore the file, save to another one, or do not "
            "resume."
        )
    if saved.environment.commit == now.environment.commit:
        return saved
    note = f"continued at commit {now.environment.commit or 'unknown'}"
    return saved if note in saved.notes else saved.model_copy(update={"notes": [*saved.notes, note]})


def _must_agree(key: str, saved: object, now: object, path: Path) -> None:
    if saved != now:
        raise ValueError(
            f"{path} was measured with {key} {saved!r}, but now it is {now!r}; "
            "they cannot be mixed. Save to another file, or do not resume."
        )


def _timed(
    report: BenchReport, names: list[str], settings: _Settings, *, pairs: int, calls: int, warmup: Warmup | None
) -> BenchReport:
    """Return the report with new step times of all ``names``. Its curves are kept."""
    first_epoch = settings.data.train(settings.job.batch, seed=0, epoch=0)
    batches = list(itertools.islice(first_epoch, DISTINCT_BATCHES))
    loops = {name: settings.loop(name, 0, TIMING_SCHEDULE) for name in names}
    baselines = [name for name in names if Recipe.parse(name).kind in ("stock", "hand")]
    measured = compare(
        {name: _stepper(loop, batches) for name, loop in loops.items()},
        baselines=baselines,
        pairs=pairs,
        calls=calls,
        warmup=warmup,
        clock=settings.clock,
        progress=settings.progress,
    )
    earlier = {contestant.name: contestant for contestant in report.contestants}
    found = []
    for name, loop in loops.items():
        notes = list(loop.notes)
        if name in measured.unsettled:
            notes.append("its step time still changed at the end of the warm-up")
        found.append(
            Contestant(
                name=name,
                kind=Recipe.parse(name).kind,
                algorithms=loop.algorithms,
                dropped=loop.dropped,
                step_seconds=measured.step_seconds(name),
                samples=measured.samples[name],
                ratios=measured.ratios(name),
                warmup_seconds=measured.warmup_seconds[name],
                curves=earlier[name].curves if name in earlier else [],
                notes=notes,
            )
        )
    kept = [note for note in report.notes if note != FEW_ROUNDS and not note.endswith(SAME)]
    few = [FEW_ROUNDS] if pairs < ENOUGH_ROUNDS else []
    return report.model_copy(update={"contestants": found, "notes": [*kept, *few, *_same_plans(found)]})


def _same_plans(found: list[Contestant]) -> list[str]:
    """Return a note about levels with the same algorithms and settings, as O1 and O2 have in short runs."""
    groups: dict[tuple[AlgorithmRow, ...], list[str]] = {}
    for contestant in found:
        if contestant.kind == "level":
            groups.setdefault(tuple(contestant.algorithms), []).append(contestant.name)
    same = [names for names in groups.values() if len(names) > 1]
    return [f"{', '.join(first)} and {last} {SAME}" for *first, last in same]


def _stepper(loop: Loop, batches: list[tuple[Tensor, Tensor]]) -> Callable[[], object]:
    supply = itertools.cycle(batches)
    return lambda: loop.step(*next(supply))


def _trained(
    report: BenchReport, names: list[str], settings: _Settings, *, seeds: int, out: str | Path | None
) -> BenchReport:
    """Return the report with the missing curves. It is saved after each of them.

    A report whose seeds were added by a sequential test is judged by that test also after further seeds.
    """
    held = {(c.name, curve.seed) for c in report.contestants for curve in c.curves}
    runs = [(seed, name) for seed in range(seeds) for name in names] if settings.epochs else []
    for done, (seed, name) in enumerate(runs):
        if (name, seed) not in held:
            shown = functools.partial(_runs_done, done * settings.epochs, len(runs) * settings.epochs)
            curve = _curve(name, seed, settings, shown)
            report = _judged(_with_curve(report, name, curve), settings.job, sequential=SEQUENTIAL in report.notes)
            _check_seeds(report)
            _save(report, out)
    if runs:
        settings.progress("training", len(runs) * settings.epochs, len(runs) * settings.epochs)
    return report


def _decided(
    report: BenchReport, names: list[str], settings: _Settings, *, end: float, out: str | Path | None
) -> BenchReport:
    """Return the report with curves of as many seeds as the decisions need, begun before ``end`` on the clock."""
    if SEQUENTIAL not in report.notes:
        report = report.model_copy(update={"notes": [*report.notes, SEQUENTIAL]})
        report = _judged(report, settings.job, sequential=True)
    began, longest = time.monotonic(), 0.0
    for seed in range(MOST_SEEDS):
        now, opened = time.monotonic(), _open(report, settings.job)
        due = names if seed < FEW_SEEDS else [name for name in names if name in opened or name == STOCK]
        if seed >= FEW_SEEDS and (not opened or now + longest > end):
            break
        held = {(c.name, curve.seed) for c in report.contestants for curve in c.curves}
        for name in due:
            if (name, seed) not in held:
                curve = _curve(name, seed, settings, functools.partial(_time_spent, began, end))
                report = _judged(_with_curve(report, name, curve), settings.job, sequential=True)
                _check_seeds(report)
                _save(report, out)
        longest = max(longest, time.monotonic() - now)
    return report


def _runs_done(before: int, total: int, epoch: int) -> tuple[int, int]:
    return before + epoch, total


def _time_spent(began: float, end: float, epoch: int) -> tuple[int, int]:
    """Return the seconds since ``began``, and all of them. The first seeds are trained even if the time is over."""
    spent = round(time.monotonic() - began)
    return spent, max(1, spent, round(end - began))


def _check_seeds(report: BenchReport) -> None:
    """Raise ``FactoryError`` if two trainings of stock with different seeds are the same training."""
    seen: dict[tuple[float, ...], int] = {}
    for curve in next((c.curves for c in report.contestants if c.name == STOCK), []):
        same = seen.setdefault((*curve.train_loss, *curve.metric), curve.seed)
        if same != curve.seed and math.isfinite(curve.train_loss[-1]):
            raise ignored_seed(same, curve.seed)


def _open(report: BenchReport, job: Job) -> list[str]:
    """Return the levels about which a sequential test has not decided."""
    stock = next((c for c in report.contestants if c.name == "stock"), None)
    if stock is None:
        return []
    levels = [c for c in report.contestants if Recipe.parse(c.name).base in PROMISING]
    return [c.name for c in levels if not _look(stock, c, job).decided]


def _look(stock: Contestant, other: Contestant, job: Job) -> Look:
    margin = _margin(other, job)
    assert margin is not None
    return SequentialTest(margin=margin, most=MOST_SEEDS).look(_differences(stock, other, job))


def _curve(name: str, seed: int, settings: _Settings, shown: Shown) -> Curve:
    with PeakMemory(settings.device) as peak:
        curve = _learned(name, seed, settings, shown)
    return curve.model_copy(update={"peak_bytes": peak.bytes})


def _learned(name: str, seed: int, settings: _Settings, shown: Shown) -> Curve:
    setup, watch = Stopwatch(settings.clock), Stopwatch(settings.clock)
    with setup:
        loop = settings.loop(name, seed, settings.steps)
    curve = Curve(seed=seed, epochs=[], seconds=[], train_loss=[], metric=[])
    losses: list[Tensor] = []
    for epoch in range(settings.epochs):
        settings.progress("training", *shown(epoch), f"{name}, seed {seed}, epoch {epoch + 1}")
        batches = settings.data.train(settings.job.batch, seed=seed, epoch=epoch)
        if epoch == 0:
            with setup:
                losses.append(loop.step(*next(batches)))
        with watch:
            for inputs, targets in batches:
                losses.append(loop.step(inputs, targets))
        curve.epochs.append(epoch + 1.0)
        curve.seconds.append(watch.seconds)
        curve.train_loss.append(_smoothed(losses))
        curve.metric.append(_evaluated(loop, settings))
    return curve.model_copy(update={"setup_seconds": setup.seconds})


def _evaluated(loop: Loop, settings: _Settings) -> float:
    """Compute the metric without another compilation of the model."""
    loop.model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            return settings.job.evaluate(loop.predict, settings.data)
    finally:
        loop.model.train()


def _smoothed(losses: list[Tensor]) -> float:
    """Return the exponential average of the losses, corrected for its start."""
    average, weight = 0.0, 0.0
    for loss in torch.stack(losses).float().tolist():
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        weight = SMOOTHING * weight + (1 - SMOOTHING)
    return average / weight


def _with_curve(report: BenchReport, name: str, curve: Curve) -> BenchReport:
    contestants = [
        c.model_copy(update={"curves": [*c.curves, curve]}) if c.name == name else c for c in report.contestants
    ]
    return report.model_copy(update={"contestants": contestants})


def _judged(report: BenchReport, job: Job, *, sequential: bool = False) -> BenchReport:
    """Return the report with every contestant's final metric judged against stock's, if the job has margins."""
    stock = next((c for c in report.contestants if c.name == "stock"), None)
    if stock is None:
        return report
    contestants = [
        c if c is stock else c.model_copy(update={"quality": _quality(stock, c, job, sequential=sequential)})
        for c in report.contestants
    ]
    return report.model_copy(update={"contestants": contestants})


def _quality(stock: Contestant, other: Contestant, job: Job, *, sequential: bool) -> list[Quality]:
    margin, found = _margin(other, job), _differences(stock, other, job)
    if margin is None or len(found) < 2:
        return []
    if not sequential or Recipe.parse(other.name).base not in PROMISING:
        return [noninferiority([0.0] * len(found), found, margin, against=stock.name)]
    look = _look(stock, other, job)
    return [
        Quality(
            baseline=stock.name,
            difference=look.difference,
            margin=margin,
            seeds=look.pairs,
            passed=look.state == "passed",
            detectable=look.detectable,
        )
    ]


def _margin(contestant: Contestant, job: Job) -> float | None:
    return job.loose_margin if Recipe.parse(contestant.name).base == "O2" else job.margin


def _differences(stock: Contestant, other: Contestant, job: Job) -> list[float]:
    """Return the differences of the final metric by seed; higher is better."""
    sign = 1.0 if job.higher_is_better else -1.0
    ours, theirs = ({curve.seed: sign * curve.final for curve in c.curves} for c in (other, stock))
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
