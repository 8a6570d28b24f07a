"""Measure one network of the zoo in this process: every cell of the grid and both levels, paired and interleaved.

``zoo.py`` starts it for each network, because a kernel that crashes takes its process along.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from options import SYSTEM, Options, parameters_of
from torch import Tensor, nn
from zoo_networks import TINY, ZOO, Batch, Network
from zoo_verdict import AGAIN, LEVELS, STOCK

from torchboost import boost
from torchboost.bench.bench import FEW_ROUNDS
from torchboost.bench.verdict import LEAST_PAIRS
from torchboost.core.algorithm import Target
from torchboost.core.hardware import half_precision
from torchboost.core.torch_private import compiled_graphs
from torchboost.errors import IncompatibleError
from torchboost.front import Boosted
from torchboost.measure.evidence import AlgorithmRow, BenchReport, Contestant, DroppedRow
from torchboost.measure.statistics import bootstrap_median
from torchboost.measure.stopwatch import Comparison, Warmup, compare, environment
from torchboost.registry import REGISTRY

PLANNED_STEPS = 100_000
NO_FREEZING = {"extra": {"grad_freeze": False}}
CALIBRATION_STEPS = 20
"""A level that has not chosen after so many steps is timed as it is: it has nothing to choose."""
TRIES = 3
HOPELESS = 2.0
"""A cell each of whose first steps takes so many times as long as a step of stock right after it is not timed in
rounds."""
TOO_SLOW_TO_COMPILE = 1.15
"""A cell whose eager form takes so many times as long as stock in each of its first steps is not compiled, except with
``--compile``: to be the best, compilation would have to gain that much more on it than on stock."""
SECONDS_OF_STOCK = 2.0
"""Stock is timed for about so long in all rounds."""
WARMUP = Warmup(least=6, limit=60, seconds=300)

Grid = Literal["eager", "some", "all"]
"""Which cells are compiled: none, those with a fused optimizer, or all."""
Cell = tuple[str, ...]
Step = Callable[[], Tensor]
"""Trains a step and returns its loss."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What ``zoo.py`` asks of this process.

    Args:
        network: A name in ``ZOO`` or ``TINY``.
        out: File of the report.
        state: File that holds the name of the contestant that runs, to be read if this process crashes.
        pairs: Rounds.
        grid: Which cells are compiled.
        cold: Whether the levels come before the cells.
        left_out: Contestant -> why it is not run.
        notes: For the report.
    """

    network: str
    out: str
    state: str
    pairs: int
    grid: Grid
    cold: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def cell_name(levers: Iterable[str]) -> str:
    chosen = set(levers)
    return "+".join(lever for lever in SYSTEM if lever in chosen) or STOCK


def cells(*, images: bool, grid: Grid) -> list[Cell]:
    """Return the cells of the grid, stock first. Without two-dimensional convolutions none is channels-last."""
    eager = [lever for lever in SYSTEM if lever != "compile" and (images or lever != "channels_last")]
    chosen = [found for count in range(len(eager) + 1) for found in itertools.combinations(eager, count)]
    if grid == "eager":
        return chosen
    compiled = [cell for cell in chosen if grid == "all" or "fused_optimizer" in cell]
    return chosen + [(*cell, "compile") for cell in compiled]


def usual_cell(*, images: bool) -> Cell:
    """Return what a loop by hand usually has on this machine, without compilation."""
    half = half_precision("cpu").fast
    return tuple(
        lever for lever, wanted in (("channels_last", images), ("autocast", half), ("fused_optimizer", True)) if wanted
    )


def has_images(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def by_hand(network: Network, cell: Cell, device: torch.device | str = "cpu", mode: str | None = None) -> Step:
    """Return a training step in plain torch. ``mode`` is that of ``torch.compile``.

    Raises:
        IncompatibleError: torchboost refuses one of the levers on this network.
    """
    kind = torch.device(device).type
    training = network.training(device=device, **({"fused": True} if "fused_optimizer" in cell else {}))
    for lever in cell:
        REGISTRY[lever].algorithm().check(Target(training.model, training.optimizer))
    last = "channels_last" in cell
    if last:
        training.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    forward = compiled(training.model, mode) if "compile" in cell else training.model
    half, supply = "autocast" in cell, itertools.cycle(training.batches)

    def step() -> Tensor:
        batch = next(supply)
        if last:
            batch = images_last(batch)
        training.optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16) if half else contextlib.nullcontext():
            loss = training.loss(forward(*batch.args, **batch.kwargs), batch)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    return step


def compiled(model: nn.Module, mode: str | None = None) -> Callable[..., Any]:
    """Compile with graphs of its own: torch falls back to eager after 8 graphs of one code, which older ones share."""
    options: Any = {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
    return torch.compile(model, mode=mode, **options)


def images_last(batch: Batch) -> Batch:
    def convert(value: Tensor) -> Tensor:
        return value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value

    kwargs = {name: convert(value) for name, value in batch.kwargs.items()}
    return Batch(tuple(map(convert, batch.args)), kwargs, batch.target)


def boosted_loop(
    network: Network,
    level: str,
    *,
    device: torch.device | str = "cpu",
    total_steps: int = PLANNED_STEPS,
    config: Mapping[str, Any] = NO_FREEZING,
) -> tuple[Step, Boosted]:
    """Return the loop of a user who has added one line."""
    training = network.training(device=device)
    boosted = boost(training.model, training.optimizer, level=level, total_steps=total_steps, config=config)
    model, optimizer = boosted
    supply = itertools.cycle(training.batches)

    def step() -> Tensor:
        batch = next(supply)
        optimizer.zero_grad()
        loss = training.loss(model(*batch.args, **batch.kwargs), batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, boosted


def calibrate(step: Step, boosted: Boosted) -> list[float]:
    """Step until the level has chosen, if it chooses while it trains. Return the seconds of each step."""
    seconds: list[float] = []
    while len(seconds) < TRIES or (len(seconds) < CALIBRATION_STEPS and getattr(boosted, "choice", ...) is None):
        seconds.append(timed(step))
    return seconds


class Paired(NamedTuple):
    """Seconds of a step, and of a step of stock right after it."""

    own: float
    stock: float

    @property
    def share(self) -> float:
        return self.own / self.stock


def timed(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


@dataclass
class Tried:
    """The contestants of a network after their first steps.

    Args:
        steps: Those that are timed in rounds.
        boosted: Level -> what ``boost`` returned.
        setup: Name -> seconds of the first steps, with compilation and calibration.
        hopeless: Name -> first steps with those of stock, of cells that are too slow.
        uncompiled: Names of compiled cells of which the compiler made no graph.
        shares: Name of an eager cell -> how many times as long as stock its fastest first step took.
        notes: Why others are missing.
    """

    steps: dict[str, Step] = field(default_factory=dict)
    boosted: dict[str, Boosted] = field(default_factory=dict)
    setup: dict[str, float] = field(default_factory=dict)
    hopeless: dict[str, list[Paired]] = field(default_factory=dict)
    uncompiled: set[str] = field(default_factory=set)
    shares: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def try_all(network: Network, chosen: list[Cell], task: Task, mark: Callable[[str], object]) -> Tried:
    """Run the first steps of each contestant, and keep those that run and are not hopeless.

    The cells come first, so the compiler finds their graphs in its cache when it compiles for a level. With
    ``task.cold`` the levels come right after stock.
    """
    tried, progress = Tried(), Options().progress
    named: list[tuple[str, Cell | None]] = [(cell_name(cell), cell) for cell in chosen] + [(AGAIN, ())]
    place = 1 if task.cold else len(named)
    named[place:place] = [(level, None) for level in LEVELS]
    for done, (name, cell) in enumerate(named):
        progress("first steps", done, len(named), name)
        if name in task.left_out:
            tried.notes.append(f"{name}: {task.left_out[name]}")
            continue
        share = tried.shares.get(name.removesuffix("+compile"), 1.0) if name.endswith("+compile") else 1.0
        if task.grid != "all" and share > TOO_SLOW_TO_COMPILE:
            tried.notes.append(f"{name}: not compiled, its eager form takes {share:.2f} times as long as stock")
            continue
        mark(name)
        try:
            try_one(network, name, cell, tried, mark)
        except IncompatibleError as error:
            tried.notes.append(f"{name}: refused: {error}")
        except Exception as error:  # whatever a lever raises on this network
            if name == STOCK:
                raise
            tried.notes.append(f"{name}: raised {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    progress("first steps", len(named), len(named))
    return tried


def try_one(network: Network, name: str, cell: Cell | None, tried: Tried, mark: Callable[[str], object]) -> None:
    """Build a cell, or a level if ``cell`` is None, and run its first steps."""
    if cell is None:
        step, boosted = boosted_loop(network, name)
        tried.setup[name] = sum(calibrate(step, boosted))
        tried.boosted[name] = boosted
        step = marked(step, name, mark)
    else:
        step = by_hand(network, cell)
        # A cell that writes past a buffer may crash the step after it, which is often one of stock.
        step = step if name == STOCK else marked(step, name, mark)
        graphs = compiled_graphs()
        tried.setup[name] = timed(step)
        if "compile" in cell and compiled_graphs() == graphs:
            tried.uncompiled.add(name)
        pairs = first_pairs(step, tried.steps.get(STOCK, step), all_of_them="compile" in cell)
        tried.setup[name] += sum(pair.own for pair in pairs)
        tried.shares[name] = min(pair.share for pair in pairs)
        if name != STOCK and tried.shares[name] > HOPELESS:
            tried.hopeless[name] = pairs
            return
    tried.steps[name] = step


def first_pairs(step: Step, stock: Step, *, all_of_them: bool) -> list[Paired]:
    """Time the step and stock in turn; once, if it takes ten times as long, since it may take minutes.

    Args:
        step: Of a cell, after its very first one.
        stock: The step to compare with.
        all_of_them: Do not stop early, because the second step may compile once more.
    """
    pairs: list[Paired] = []
    while len(pairs) < TRIES and (all_of_them or not pairs or pairs[0].share <= 10):
        pairs.append(Paired(timed(step), timed(stock)))
    return pairs


def rounds(least: int, stock: Step) -> int:
    """Return how many rounds to time: more if a step is short, since its time varies more."""
    if least < LEAST_PAIRS:
        return least
    return max(least, round(SECONDS_OF_STOCK / min(timed(stock) for _ in range(TRIES))))


def marked(step: Step, name: str, mark: Callable[[str], object]) -> Step:
    def call() -> Tensor:
        mark(name)
        return step()

    return call


class GraphLimit(logging.Handler):
    """Keeps what the compiler says when it stops compiling."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "recompile_limit" in text:
            self.said.append(text.partition("\n")[0])


def measure(task: Task) -> BenchReport:
    network = {**ZOO, **TINY}[task.network]
    state = os.open(task.state, os.O_CREAT | os.O_WRONLY)

    def mark(name: str) -> None:
        os.pwrite(state, name.ljust(100).encode(), 0)

    limited = GraphLimit()
    logging.getLogger("torch").addHandler(limited)
    plain = network.training()
    images = has_images(plain.model)
    tried = try_all(network, cells(images=images, grid=task.grid), task, mark)
    found = compare(
        tried.steps,
        baselines=[name for name in tried.steps if name not in LEVELS],
        pairs=rounds(task.pairs, tried.steps[STOCK]),
        warmup=WARMUP,
        progress=Options().progress,
    )
    parts = [*(timed_contestant(name, found, tried) for name in tried.steps)]
    parts += [slow_contestant(name, pairs) for name, pairs in tried.hopeless.items()]
    notes = [
        f"the levels plan for {PLANNED_STEPS:,} steps, without grad_freeze, which trains a part of the model only; "
        "they may remove BatchNorms, which the cells keep",
        f"a loop by hand usually has {cell_name(usual_cell(images=images))} here",
        f"in the compiler's cache when the levels started: {'nothing' if task.cold else 'the graphs of the cells'}",
        f"vector instructions: {torch.backends.cpu.get_cpu_capability()}",
        *task.notes,
        *tried.notes,
        *(f"the compiler: {text}" for text in limited.said),
        *([FEW_ROUNDS] if task.pairs < LEAST_PAIRS else []),
    ]
    return BenchReport(
        title=f"Zoo: {network.title}",
        workload=f"zoo-{task.network}",
        model=network.title,
        parameters=parameters_of(plain.model),
        batch=plain.batches[0].size,
        metric_name="none",
        environment=environment(),
        contestants=parts,
        notes=notes,
    )


def timed_contestant(name: str, found: Comparison, tried: Tried) -> Contestant:
    boosted = tried.boosted.get(name)
    plan = None if boosted is None else boosted.plan
    notes = [] if boosted is None else [boosted.explain(), *choice_of(boosted)]
    if name in tried.uncompiled:
        notes.append("the compiler made no graph of this network, so it runs as without compile")
    if name in found.unsettled:
        notes.append("its step time still changed at the end of the warm-up")
    return Contestant(
        name=name,
        kind="stock" if name == STOCK else "hand" if boosted is None else "level",
        algorithms=[AlgorithmRow(name=a.name, settings=repr(a)) for a in plan.algorithms] if plan else [],
        dropped=[DroppedRow(name=d.name, reason=d.reason) for d in plan.dropped] if plan else [],
        step_seconds=found.step_seconds(name),
        samples=found.samples[name],
        ratios=found.ratios(name),
        warmup_seconds=tried.setup[name] + found.warmup_seconds[name],
        notes=notes,
    )


def choice_of(boosted: Boosted) -> list[str]:
    """Return what the level measured as JSON, if it measures."""
    choice: Any = getattr(boosted, "choice", None)
    return [] if choice is None else [f"choice: {choice.model_dump_json()}"]


def slow_contestant(name: str, pairs: list[Paired]) -> Contestant:
    seconds = [pair.own for pair in pairs]
    times = min(pair.share for pair in pairs)
    return Contestant(
        name=name,
        kind="hand",
        step_seconds=bootstrap_median(seconds),
        samples=seconds,
        notes=[f"not timed in rounds: each of its first steps took at least {times:.1f} times as long as stock"],
    )


def main(text: str) -> None:
    task = Task(**json.loads(text))
    measure(task).save(Path(task.out))


if __name__ == "__main__":
    main(sys.argv[1])
