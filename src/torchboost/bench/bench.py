"""A whole benchmark: interleaved step times of all contestants, then training curves for each seed."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.bench.contestants import Loop, Planner, Recipe, averaged, build_loop, version_of
from torchboost.bench.digests import changes_by_call, check_unchanged, data_of, fingerprint_of, modes_of
from torchboost.bench.factory import (
    RETURNS,
    Epoch,
    Factory,
    check_seeds,
    copied,
    has_diverged,
    one_epoch,
    streams_restored,
)
from torchboost.bench.report import wording
from torchboost.bench.schedules import without_effect
from torchboost.bench.verdict import LEAST_PAIRS, stock_of
from torchboost.config import BoostConfig
from torchboost.core.forward import tensors_in
from torchboost.core.hardware import ProcessSettings
from torchboost.errors import IncompatibleError
from torchboost.measure.evidence import AlgorithmRow, BenchReport, Contestant, Curve, Quality
from torchboost.measure.machine import PeakMemory
from torchboost.measure.statistics import SequentialTest
from torchboost.measure.stopwatch import Clock, Progress, compare, environment, interrupts_kept

CONTESTANTS = ("stock", "hand", "O1", "O2")

WARM_BATCHES = 8
"""Batches of the warm-up. The timing has others, since lengths vary, and a kernel takes longer at a new shape. One of
another shape is in both, because a level looks at the first of these once."""
MOST_BYTES, MOST_SECONDS = 2**28, 30.0
"""Memory and time to read the batches of the timing, after which they are used again."""
# Timed steps are at the start of a long schedule, where rates are small and no contestant can diverge.
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
REWRITTEN = "contestant {!r}: the file has changed since its steps were timed; leave out --resume, or restore the file."
CHANGED = "its own trial turned on other switches or settings: trained with {}, timed with {}"
SHORT = "a pass had fewer batches than the first reading of them, so some runs made fewer steps than their schedule has"
FEW_ROUNDS = "timed in fewer than six rounds: too few for a 95 % interval"
ENVIRONMENT = ("torch", "torchboost", "processor", "instructions", "device", "threads")


@interrupts_kept()
@streams_restored()
def run_bench(
    factory: Factory,
    *,
    contestants: Sequence[str] = CONTESTANTS,
    pairs: int = 20,
    seeds: int = 3,
    epochs: int | None = None,
    total_steps: int | None = None,
    device: torch.device | str = "cpu",
    out: str | Path | None = None,
    resume: bool = False,
    decide: float | None = None,
    planner: Planner | None = None,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure how fast each contestant steps and how well it learns, under equal conditions.

    First the step times are measured: all contestants in this process, interleaved, on the same batches. Then, for
    every seed, each contestant trains the same number of epochs from the same weights on the same batches. The metric
    is computed on the test set after each epoch and is not timed. The first step of a training run (allocation, kernel
    choice) counts as set-up for all contestants. The training runs reuse the graphs that were compiled for the step
    times, so the cost of compilation is in ``warmup_seconds``.

    Args:
        factory: The training.
        contestants: Names as in :mod:`torchboost.bench.contestants`.
        pairs: Interleaved rounds of timing.
        seeds: Training runs per contestant, with the seeds 0, 1, ...
        epochs: Epochs per run, by default the factory's. 0 measures step times only.
        total_steps: Length of the run that the levels plan for, by default the length of the curves.
        device: Where to train.
        out: File of the report. Saved after the timing and after every run.
        resume: Continue the report in ``out`` and do not repeat its measurements. If a contestant is new, or if there
            are fewer rounds than ``pairs``, all are timed again.
        decide: Seconds for everything. Seeds are added until a sequential test has decided about the metric of every
            level, or the time is over. ``seeds`` is then ignored. Contestants that promise nothing get two seeds.
        planner: See :func:`~torchboost.bench.contestants.build_loop`.
        progress: Called in every phase.

    Raises:
        IncompatibleError: The factory's schedule cannot drive the optimizer of a configuration.
        ValueError: Contestants are unknown or repeated, the report in ``out`` belongs to another measurement,
            ``decide`` is given for a metric of unknown units or without stock, or ``epochs`` for a factory without a
            metric.
        KeyboardInterrupt: Passed on. The report in ``out`` holds all complete runs.
    """
    start = time.monotonic()
    recipes = {name: Recipe.parse(name) for name in contestants}
    if not recipes or len(recipes) < len(contestants):
        raise ValueError(f"contestants: found {list(contestants)}; give at least one, and each once.")
    if seeds < 0 or (epochs is not None and epochs < 0):
        raise ValueError(f"found seeds={seeds}, epochs={epochs}; neither may be negative.")
    if decide is not None and factory.drops is None:
        raise ValueError(UNITS_UNKNOWN)
    if decide is not None and STOCK not in recipes:
        raise ValueError(
            f"--decide: found {list(contestants)} without stock, which every level is compared with; add it."
        )
    tell: Progress = (lambda phase, done, total, note="": None) if progress is None else progress
    tell("data", 0, 1, factory.title)
    parts = factory.build(0)
    if epochs and parts.evaluate is None:
        raise ValueError(f"--epochs: found {epochs}, but the factory has no evaluate; needed: {RETURNS}.")
    data, fingerprint, modes = data_of(parts), fingerprint_of(parts), modes_of(parts.model)
    changes = changes_by_call(factory.build(0), fingerprint, data)
    epoch, model = factory.measured(parts), factory.model_name or type(parts.model).__name__
    tell("data", 1, 1, factory.title)
    epochs = 0 if parts.evaluate is None else factory.epochs if epochs is None else epochs
    report = BenchReport(
        title=f"{factory.title}: {model}",
        workload=factory.name,
        model=model,
        parameters=sum(param.numel() for param in parts.model.parameters()),
        batch=epoch.batch,
        metric_name=factory.metric,
        metric_higher_is_better=factory.higher_is_better,
        epochs=epochs,
        train_samples=epoch.samples,
        environment=environment(device),
        contestants=[],
        notes=[note for note in (changes, modes) if note],
        source=factory.source,
        fingerprint=fingerprint,
        data=data,
    )
    del parts
    session = _Session(
        factory=factory,
        epoch=epoch,
        total_steps=total_steps,
        device=torch.device(device),
        planner=planner,
        tell=tell,
        out=None if out is None else Path(out),
        report=report,
    )
    if resume:
        session.take_up()
    session.check_recipes(recipes)
    names = [contestant.name for contestant in session.report.contestants]
    rounds = min((len(contestant.samples) for contestant in session.report.contestants), default=0)
    if not recipes.keys() <= set(names) or rounds < pairs:
        session.time(list(dict.fromkeys([*names, *contestants])), pairs)
        session.save()
    session.train(contestants, seeds, None if decide is None else start + decide)
    return session.report


@dataclass(kw_only=True)
class _Session:
    """A benchmark under way: its settings, and the report as far as it came."""

    factory: Factory
    epoch: Epoch
    total_steps: int | None
    device: torch.device
    planner: Planner | None
    tell: Progress
    out: Path | None
    report: BenchReport

    def update(self, **changes: Any) -> None:
        self.report = self.report.model_copy(update=changes)

    def save(self) -> None:
        if self.out is not None:
            self.report.save(self.out)

    def loop(self, name: str, seed: int, steps: int) -> Loop:
        return build_loop(
            Recipe.parse(name),
            self.factory,
            seed=seed,
            steps=steps,
            total_steps=self.total_steps or self.report.epochs * self.epoch.steps or steps,
            device=self.device,
            planner=self.planner,
        )

    def batches(self, loop: Loop, seed: int, epoch: int) -> Iterator[tuple[Any, Any]]:
        drawn = one_epoch(loop.parts.batches, seed=seed, epoch=epoch, device=self.device)
        return itertools.islice(drawn, self.epoch.steps)

    def check_recipes(self, contestants: Mapping[str, Recipe]) -> None:
        """Note the parts of a configuration that have no effect here, and refuse one that cannot work."""
        steps = self.report.epochs * self.epoch.steps or TIMING_SCHEDULE
        for name, contestant in contestants.items():
            if contestant.kind == "config":
                recipe = BoostConfig.load(contestant.base).recipe
                try:
                    remark = without_effect(self.factory.make, recipe, steps)
                except IncompatibleError as error:
                    raise IncompatibleError(f"contestant {name!r}: {error}.") from None
                if remark and (note := f"{name}: {remark}") not in self.report.notes:
                    self.update(notes=[*self.report.notes, note])

    def take_up(self) -> None:
        """Continue the saved report, if there is one that belongs to this measurement."""
        path, now = self.out, self.report
        if path is None or not path.exists():
            return
        saved = BenchReport.load(path)
        names = ("workload", "model", "parameters", "batch", "metric_name", "epochs", "train_samples")
        check_same(path, saved, now, names, "was measured with")
        check_unchanged(path, saved, now, lambda: self.factory.build(0))
        self.report = saved
        note = f"continued at commit {now.environment.commit or 'unknown'}"
        if saved.environment.commit != now.environment.commit and note not in saved.notes:
            self.update(notes=[*saved.notes, note])

    def time(self, names: list[str], pairs: int) -> None:
        """Put new step times of all ``names`` into the report. Its curves are kept."""
        for known in self.report.contestants:
            self.check_version(known)
        settings, loops = {name: ProcessSettings() for name in names}, dict[str, Loop]()
        for name in names:
            with settings[name].in_force():
                loops[name] = self.loop(name, 0, TIMING_SCHEDULE)
        every = itertools.chain.from_iterable(self.batches(loops[names[0]], 0, epoch) for epoch in itertools.count())
        warm, timed = list(itertools.islice(every, WARM_BATCHES)), _taken(every, pairs)
        other = next((batch for batch in timed if _shapes(batch) != _shapes(warm[0])), None)
        batches = {"warm": warm if other is None else [warm[0], other, *warm[2:]], "timed": timed}
        steps = {
            part: {name: _Steps(loop, some, self.device) for name, loop in loops.items()}
            for part, some in batches.items()
        }
        comparison = compare(
            steps["warm"],
            timed=steps["timed"],
            around={name: functools.partial(_around, settings[name], steps["timed"][name]) for name in loops},
            baselines=[name for name in names if Recipe.parse(name).kind in ("stock", "hand")],
            pairs=pairs,
            clock=Clock.of(self.device),
            progress=self.tell,
        )
        before = {contestant.name: contestant for contestant in self.report.contestants}
        curves = {name: contestant.curves for name, contestant in before.items()}
        unsettled = ["its step time still changed at the end of the warm-up"]
        contestants = [
            Contestant(
                name=name,
                kind=Recipe.parse(name).kind,
                source=version_of(name),
                algorithms=loop.algorithms,
                dropped=loop.dropped,
                step_seconds=comparison.step_seconds(name),
                samples=comparison.samples[name],
                ratios=comparison.ratios(name),
                warmup_seconds=comparison.warmup_seconds[name],
                curves=curves.get(name, []),
                notes=loop.notes + (unsettled if name in comparison.unsettled else []),
            )
            for name, loop in loops.items()
        ]
        notes = [note for note in self.report.notes if note != FEW_ROUNDS and not note.endswith(SAME)]
        notes += [FEW_ROUNDS] if pairs < LEAST_PAIRS else []
        for one in contestants:
            if one.curves and (trained := before[one.name].algorithms) != one.algorithms:
                notes.append(f"{one.name}, earlier seeds: {_changed(trained, one.algorithms)}")
        self.update(contestants=contestants, notes=notes + _same_plans(contestants))

    def train(self, names: Sequence[str], seeds: int, end: float | None = None) -> None:
        """Add the missing curves to the report, which is saved after each of them.

        With ``end``, a time on the clock, as many seeds as the decisions need are begun before it, in place of
        ``seeds``. A report whose seeds were added so is judged by the sequential test also after further seeds.
        """
        epochs, start, longest, begun = self.report.epochs, time.monotonic(), 0.0, 0
        if end is not None:
            seeds, notes = MOST_SEEDS, self.report.notes
            self.update(notes=notes if SEQUENTIAL in notes else [*notes, SEQUENTIAL])
        total = seeds * len(names) * epochs

        def share(epoch: int) -> tuple[int, int]:  # the first seeds are trained even if the time is over
            if end is None:
                return (begun - 1) * epochs + epoch, total
            seconds = round(time.monotonic() - start)
            return seconds, max(1, seconds, round(end - start))

        for seed in range(seeds if epochs else 0):
            now, wanted = time.monotonic(), list(names)
            if end is not None and seed >= FEW_SEEDS:
                undecided = self.judge()
                if now + longest > end or not set(names) & set(undecided):
                    break
                wanted = [name for name in names if name == STOCK or name in undecided]
            for name in wanted:
                begun += 1
                self.add(name, seed, share)
            longest = max(longest, time.monotonic() - now)
        if total and end is None:
            self.tell("training", total, total)

    def add(self, name: str, seed: int, share: Callable[[int], tuple[int, int]]) -> None:
        """Train a contestant, unless the report has the curve, and save the judged report.

        ``share`` maps an epoch of this training to how much of all trainings is done, and how much there is.
        """
        contestant = next(c for c in self.report.contestants if c.name == name)
        if any(curve.seed == seed for curve in contestant.curves):
            return
        more = contestant.model_copy(update={"curves": [*contestant.curves, self.curve(name, seed, share)]})
        self.update(contestants=[more if c is contestant else c for c in self.report.contestants])
        if name == STOCK:
            sound = (curve for curve in more.curves if math.isfinite(curve.train_loss[-1]))
            check_seeds((curve.seed, (*curve.train_loss, *curve.metric)) for curve in sound)
        self.judge()
        self.save()

    def curve(self, name: str, seed: int, share: Callable[[int], tuple[int, int]]) -> Curve:
        """Train a contestant from scratch."""
        contestant = next(one for one in self.report.contestants if one.name == name)
        self.check_version(contestant)
        curve, clock = Curve(seed=seed, epochs=[], seconds=[], train_loss=[], metric=[]), Clock.of(self.device)
        losses, counted = list[Tensor](), 0
        with ProcessSettings().in_force(), PeakMemory(self.device) as peak:
            start, trained = clock(), 0.0
            loop = self.loop(name, seed, self.report.epochs * self.epoch.steps)
            setup = clock() - start
            for epoch in range(math.ceil(loop.steps / self.epoch.steps)):
                self.tell("training", *share(epoch), f"{name}, seed {seed}, epoch {epoch + 1}")
                left = loop.steps - epoch * self.epoch.steps
                batches = itertools.islice(self.batches(loop, seed, epoch), left)
                start = clock()
                if epoch == 0:
                    losses.append(loop.step(*next(batches)))
                    setup, start = setup + clock() - start, clock()
                for inputs, targets in batches:
                    losses.append(loop.step(inputs, targets))
                trained += clock() - start
                curve.epochs.append(min(epoch + 1.0, loop.steps / self.epoch.steps))
                curve.seconds.append(trained)
                curve.train_loss.append(_train_loss(losses, counted, loop.parts.model))
                counted = len(losses)
                with averaged(loop.parts.optimizer):
                    curve.metric.append(self.factory.evaluate(loop.parts, loop.predict, seed))
        if len(losses) < loop.steps and SHORT not in self.report.notes:
            self.update(notes=[*self.report.notes, SHORT])
        timed, used = contestant.algorithms, loop.algorithms
        if used != timed:
            self.update(notes=[*self.report.notes, f"{name}, seed {seed}: {_changed(used, timed)}"])
        return curve.model_copy(update={"setup_seconds": setup, "peak_bytes": peak.bytes})

    def check_version(self, contestant: Contestant) -> None:
        """Raise ``ValueError`` if the configuration has changed since its steps were timed."""
        if version_of(contestant.name) != contestant.source:
            raise ValueError(REWRITTEN.format(contestant.name))

    def judge(self) -> list[str]:
        """Judge the final metrics against stock's, if the allowed drops are known, and return the undecided levels."""
        stock, contestants, undecided = stock_of(self.report), [], []
        if stock is None or self.factory.drops is None:
            return []
        sign = 1.0 if self.factory.higher_is_better else -1.0
        theirs = {curve.seed: sign * curve.final for curve in stock.curves}
        for contestant in self.report.contestants:
            config = contestant.kind == "config"
            base, quality = "" if config else contestant.name.partition("+")[0], []
            ours = {curve.seed: sign * curve.final for curve in contestant.curves}
            differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
            margin = self.factory.drops[base == "O2"]
            if contestant is not stock and len(differences) > 1:
                promising = base in PROMISING or config
                sequential = SEQUENTIAL in self.report.notes and promising
                looks = {"most": MOST_SEEDS} if sequential else {"least": len(differences), "most": len(differences)}
                look = SequentialTest(margin=margin, **looks).look(differences)
                judged = {"seeds": look.pairs, "passed": look.state == "passed", "detectable": look.detectable}
                quality = [Quality(baseline=STOCK, difference=look.difference, margin=margin, **judged)]
                undecided += [contestant.name] if sequential and not look.decided else []
            contestants.append(contestant.model_copy(update={"quality": quality}))
        self.update(contestants=contestants)
        return undecided


def check_same(path: Path, saved: Any, now: Any, names: Sequence[str], history: str) -> None:
    """Raise ``ValueError`` if the saved report of a file and a new one differ in what the runs depend on.

    These are the attributes ``names``, the environment, and the source of the factory. ``history`` says how the file
    came about, such as ``"was made with"``.
    """
    environment = [name for name in ENVIRONMENT if name != "instructions" or saved.environment.instructions]
    pairs = [(name, getattr(saved, name), getattr(now, name)) for name in names]
    pairs += [(name, getattr(saved.environment, name), getattr(now.environment, name)) for name in environment]
    for name, before, after in pairs:
        if before != after:
            raise ValueError(
                f"{path} {history} {name} {before!r}, but now it is {after!r}; they cannot be mixed. Save to another "
                "file, or do not resume."
            )
    if saved.source and saved.source != now.source:
        raise ValueError(
            f"{path} {history} another version of the factory's file, or other arguments of its function; runs of both "
            "cannot be mixed. Restore the file, save to another one, or do not resume."
        )


def _changed(trained: Sequence[AlgorithmRow], timed: Sequence[AlgorithmRow]) -> str:
    return CHANGED.format(wording.turned_on(trained), wording.turned_on(timed))


def _same_plans(contestants: list[Contestant]) -> list[str]:
    """Return a note about levels with the same algorithms and settings, as O1 and O2 have in short runs."""
    groups: dict[tuple[AlgorithmRow, ...], list[str]] = {}
    for contestant in contestants:
        if contestant.kind == "level":
            groups.setdefault(tuple(contestant.algorithms), []).append(contestant.name)
    same = [names for names in groups.values() if len(names) > 1]
    return [f"{', '.join(first)} and {last} {SAME}" for *first, last in same]


def _taken(batches: Iterator[Any], count: int) -> list[Any]:
    """Return the next batches: this number of them, or fewer if they are large or take long to read."""
    taken, size, start = [], 0, time.monotonic()
    while len(taken) < count and size < MOST_BYTES and time.monotonic() - start < MOST_SECONDS:
        taken.append(next(batches))
        size += sum(tensor.nbytes for tensor in tensors_in(taken[-1]))
    return taken


def _shapes(batch: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_in(batch)]


class _Steps:
    """Steps of a loop on copies of some batches in turn, since a loss may write into its batch or take entries out."""

    def __init__(self, loop: Loop, batches: Sequence[tuple[Any, Any]], device: torch.device) -> None:
        self._loop, self._batches, self._device = loop, itertools.cycle(batches), device
        self._next: tuple[Any, Any] | None = None

    def copy(self) -> tuple[Any, Any]:
        """Copy the next batch, unless it has been copied."""
        if self._next is None:
            self._next = copied(next(self._batches), self._device)
        return self._next

    def __call__(self) -> None:
        batch, self._next = self.copy(), None
        self._loop.step(*batch)


@contextmanager
def _around(settings: ProcessSettings, steps: _Steps) -> Iterator[None]:
    with settings.in_force():
        steps.copy()  # not timed
        yield


def _train_loss(losses: Sequence[Tensor], counted: int, model: nn.Module) -> float:
    """Return the average of the finite losses. NaN if none was finite since ``counted``, or if the model diverged."""
    values = torch.stack(list(losses)).flatten().float().tolist()
    finite = list(filter(math.isfinite, values))
    harmless = any(map(math.isfinite, values[counted:])) and (len(finite) == len(values) or not has_diverged(model))
    return _smoothed(finite) if harmless else math.nan


def _smoothed(losses: Sequence[float]) -> float:
    """Return the exponential average of the losses, corrected for its start."""
    average, weight = 0.0, 0.0
    for loss in losses:
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        weight = SMOOTHING * weight + (1 - SMOOTHING)
    return average / weight
