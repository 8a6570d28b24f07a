"""Training loops on a GPU: the grid by hand, the levels with their trial, freezing over a run, AdamOffload.

Every contestant is timed in the same rounds as the stock loop, a level also in those of the best loop by hand so far.
Then it is freed. The precision of float32 products belongs to the process, so each loop has its own while it steps:
the full one, TF32 if its name has ``tf32``, or what a level sets. Convolutions use TF32 in all of them, as torch does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from gpu_networks import network, to_the_longest
from gpu_record import DEVICE, Results, Row, Task, Turn, apart, figures, host
from ratios import total_ratio
from torch import nn
from zoo_cells import CALIBRATION_STEPS, NO_FREEZING, PLANNED_STEPS, Step, boosted_loop, by_hand, has_images
from zoo_networks import Network
from zoo_verdict import AGAIN, STOCK

from torchboost.bench.verdict import LEAST_PAIRS
from torchboost.front import Boosted
from torchboost.measure.machine import PeakMemory
from torchboost.measure.statistics import bootstrap_median
from torchboost.measure.stopwatch import Clock, Warmup, compare
from torchboost.optim import AdamOffload
from torchboost.registry import LEVELS

FULL = "highest"
COMPARED_LOSSES = 8
SAMPLE_SECONDS = 0.25
"""A sample has so many steps that stock takes about so long."""
MOST_CALLS = 20
LEVEL_SECONDS = 110.0
"""A level does not begin with less: its trial may take a minute, and the price of a compilation. Then it is timed."""
MODES: Mapping[str, str | None] = {
    "compile": None,
    "compile reduce-overhead": "reduce-overhead",
    "compile max-autotune": "max-autotune",
}
RUN_STEPS = 1000
"""Steps of a run with freezing: in shorter ones the levels use the levers only."""
TINY_RUN_STEPS = 24


@dataclass(kw_only=True)
class Loop:
    """A loop that is ready to step, and what ``boost`` returned if it is a level's."""

    step: Step
    boosted: Boosted | None = None


Build = Callable[[], Loop]


@dataclass
class Loops:
    """The contestants of one network, and a stock loop that stays.

    Args:
        task: What was asked.
        results: Where the rows are, by which the best loop by hand is found.
        build_stock: Returns the stock loop.
    """

    task: Task
    results: Results
    build_stock: Build
    clock: Clock = field(default_factory=lambda: Clock.of(DEVICE))
    stock: Step | None = None
    stock_losses: list[float] = field(default_factory=list)
    calls: int = 1
    best: dict[str, Step] = field(default_factory=dict)

    def prepare(self) -> Step:
        """Return the stock loop. The first call builds it, keeps its first losses and times it."""
        if self.stock is not None:
            return self.stock
        step = self.build_stock().step
        losses = [float(step()) for _ in range(COMPARED_LOSSES)]
        begin = self.clock()
        step()
        self.calls = max(1, min(MOST_CALLS, int(SAMPLE_SECONDS / (self.clock() - begin))))
        self.stock, self.stock_losses = step, losses
        return step

    def measure(self, name: str, build: Build, others: Callable[[], Mapping[str, Step]] = dict) -> Row:
        """Run the first steps of a contestant, and time it in the rounds of stock and others."""
        stock = self.prepare()
        with PeakMemory(DEVICE) as memory:
            begin = self.clock()
            loop = build()
            losses, first = self._first_steps(loop)
            setup = self.clock() - begin
            torch.cuda.reset_peak_memory_stats(DEVICE)  # of a trial and a compilation
            loop.step()
        baselines = {STOCK: stock, **others()}
        found = compare(
            {**baselines, name: loop.step},
            baselines=list(baselines),
            pairs=self.task.pairs,
            calls=self.calls,
            warmup=Warmup(least=6, limit=40, seconds=60),
            clock=self.clock,
        )
        return {
            **figures(found, name),
            **host(loop.step, self.clock),
            "calls": self.calls,
            "first_step_seconds": first,
            "setup_seconds": setup,
            "peak_bytes": memory.bytes,
            "losses": losses,
            "stock_losses": self.stock_losses,
            "losses_apart": apart(losses, self.stock_losses),
            **said(loop.boosted),
        }

    def _first_steps(self, loop: Loop) -> tuple[list[float], float]:
        """Return the first losses and the seconds of the first step, when a level has chosen."""
        losses: list[float] = []
        begin, first = self.clock(), 0.0
        while len(losses) < COMPARED_LOSSES or (_undecided(loop) and len(losses) < CALIBRATION_STEPS):
            losses.append(float(loop.step()))
            first = first or self.clock() - begin
        return losses[:COMPARED_LOSSES], first

    def best_by_hand(self, cells: Mapping[str, Build]) -> Mapping[str, Step]:
        """Return the fastest loop by hand so far, which stays for the next level."""
        ratios = {
            name: row["ratios"][STOCK]["interval"]["mid"]
            for name, row in self.results.rows.items()
            if name in cells and "ratios" in row
        }
        name = max(ratios, key=ratios.__getitem__, default=None)
        if name is None:
            return {}
        if name not in self.best:
            self.best = {name: cells[name]().step}
        return self.best


def _undecided(loop: Loop) -> bool:
    return loop.boosted is not None and loop.boosted.choice is None


def said(boosted: Boosted | None) -> Row:
    """Return what a level says of itself."""
    if boosted is None:
        return {}
    choice = boosted.choice
    return {
        "explain": boosted.explain(),
        "choice": None if choice is None else choice.model_dump(mode="json"),
        "checks": dict(boosted.checks),
        "said": "" if choice is None else boosted.explain(),
    }


@dataclass
class Precision:
    """The precision of float32 products while one loop runs; outside of the context it is as untouched."""

    wanted: str = FULL

    def __enter__(self) -> None:
        if self.wanted != FULL:
            torch.set_float32_matmul_precision(self.wanted)

    def __exit__(self, *_: object) -> None:
        self.wanted = torch.get_float32_matmul_precision()
        if self.wanted != FULL:
            torch.set_float32_matmul_precision(FULL)
            mkldnn: Any = torch.backends.mkldnn
            for backend in (torch.backends.cuda.matmul, mkldnn.matmul):
                backend.fp32_precision = "none"  # what torch begins with

    def around(self, step: Step) -> Step:
        def call() -> torch.Tensor:
            with self:
                return step()

        return call


def cell(net: Network, levers: tuple[str, ...], mode: str | None = None) -> Loop:
    step = by_hand(net, tuple(lever for lever in levers if lever != "tf32"), DEVICE, mode)
    return Loop(step=Precision("high" if "tf32" in levers else FULL).around(step))


def level(net: Network, name: str, steps: int, config: Mapping[str, Any]) -> Loop:
    precision = Precision()
    with precision:
        step, boosted = boosted_loop(net, name, device=DEVICE, total_steps=steps, config=config)
    return Loop(step=precision.around(step), boosted=boosted)


def grid(net: Network, *, compiled: bool) -> dict[str, Build]:
    """Return the loops by hand: the usual best one, single levers, and the usual best one compiled in three modes."""
    with torch.device("meta"):
        images = has_images(net.build())
    usual = (*(("channels_last",) if images else ()), "autocast", "fused_optimizer", "tf32")
    eager = [usual, ("tf32",), ("fused_optimizer",), ("autocast", "fused_optimizer"), ("autocast",)]
    if images:
        eager += [("channels_last",), usual[1:]]
    made: dict[str, Build] = {"+".join(levers): partial(cell, net, levers) for levers in eager}
    if compiled:
        made |= {"+".join((*usual, how)): partial(cell, net, (*usual, "compile"), mode) for how, mode in MODES.items()}
    return made


def no_freezing(compiled: bool) -> Mapping[str, Any]:
    return NO_FREEZING if compiled else {"extra": {**NO_FREEZING["extra"], "compile": False}}


def levels(task: Task, results: Results) -> Mapping[str, Turn]:
    """Return the grid and the levels, the most worth first. Compiling in every mode comes last."""
    net = network(task.subject, tiny=task.tiny)
    if task.compiled:
        torch._dynamo.config.recompile_limit = 64  # all loops share the code of the network
    loops = Loops(task, results, partial(cell, net, ()))
    cells, config = grid(net, compiled=task.compiled), no_freezing(task.compiled)
    best = partial(loops.best_by_hand, cells)

    def by_level(shown: str, name: str, steps: int) -> Turn:
        return Turn(partial(loops.measure, shown, partial(level, net, name, steps, config), best), LEVEL_SECONDS)

    hand = {name: Turn(partial(loops.measure, name, build), seconds_of(name)) for name, build in cells.items()}
    first = [name for name in hand if name == next(iter(hand)) or name.endswith(("compile", "reduce-overhead"))]
    last = [name for name in hand if name.endswith("max-autotune")]
    turns = {name: hand[name] for name in first}
    turns |= {name: by_level(name, name, PLANNED_STEPS) for name in ("O1", "O2")}
    turns |= {name: turn for name, turn in hand.items() if name not in (*first, *last)}
    turns[AGAIN] = Turn(partial(loops.measure, AGAIN, partial(cell, net, ())))
    turns |= {name: hand[name] for name in last}
    shown = {f"O1, {steps:,} steps": by_level(f"O1, {steps:,} steps", "O1", steps) for steps in (10_000, 450_000)}
    return {**turns, **shown} if task.only else turns


def padding(task: Task, results: Results) -> Mapping[str, Turn]:
    """Return O1 on padded batches, against loops by hand: padded to the longest text of a batch, and compiled."""
    net = network(task.subject, tiny=task.tiny)
    longest, levers = to_the_longest(net), ("autocast", "fused_optimizer", "tf32")
    loops = Loops(task, results, partial(cell, net, ()))
    cells: dict[str, Build] = {"by hand, to the longest": partial(cell, longest, levers)}
    if task.compiled:
        torch._dynamo.config.recompile_limit = 64
        cells["by hand, compiled"] = partial(cell, net, (*levers, "compile"))
    best, config = partial(loops.best_by_hand, cells), no_freezing(task.compiled)
    turns = {name: Turn(partial(loops.measure, name, build), seconds_of(name)) for name, build in cells.items()}
    for name, given in (("O1", net), ("O1, to the longest", longest)):
        build = partial(level, given, "O1", PLANNED_STEPS, config)
        turns[name] = Turn(partial(loops.measure, name, build, best), LEVEL_SECONDS)
    return {**turns, AGAIN: Turn(partial(loops.measure, AGAIN, loops.build_stock))}


def seconds_of(name: str) -> float:
    """Return how much time must be left for a loop by hand to begin."""
    return 90.0 if name.endswith("max-autotune") else 40.0 if "compile" in name else 10.0


def offload(task: Task, results: Results) -> Mapping[str, Turn]:
    """Return AdamOffload, against torch's fused AdamW, which keeps its moments on the device, under autocast."""
    net = network(task.subject, tiny=task.tiny)
    loops = Loops(task, results, partial(cell, net, ("autocast", "fused_optimizer")))

    def optimizer(params: Iterable[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
        return AdamOffload(params, lr=1e-4, weight_decay=0.01, decoupled_weight_decay=True, **settings)

    def turn(name: str, **settings: Any) -> Turn:
        offloaded = replace(net, optimizer=partial(optimizer, **settings))
        return Turn(partial(loops.measure, name, partial(cell, offloaded, ("autocast",))), 40)

    kept = partial(loops.measure, AGAIN, loops.build_stock)
    return {
        "AdamOffload": turn("AdamOffload"),
        "AdamOffload, buffers of 256 MiB": turn("AdamOffload, buffers of 256 MiB", chunk_mebibytes=256),
        AGAIN: Turn(kept, 30),
    }


def freezing(task: Task, results: Results) -> Mapping[str, Turn]:
    """Return one contestant: a run of O2 with freezing and without, of stock and of the best eager loop by hand."""
    net, steps = network(f"{task.subject}-short", tiny=task.tiny), TINY_RUN_STEPS if task.tiny else RUN_STEPS
    return {f"a run of {steps:,} steps": Turn(partial(whole_run, net, steps, task.compiled), 60)}


def whole_run(net: Network, steps: int, compiled: bool) -> Row:
    """Train all loops through one run, a step each in turn, so that every step is paired."""
    plain = no_freezing(compiled)
    froze = {"extra": {name: value for name, value in plain["extra"].items() if name != "grad_freeze"}}
    if steps < RUN_STEPS:  # so few that the level itself does not freeze
        froze["extra"]["grad_freeze"] = LEVELS["O2"]["grad_freeze"]
    usual, build = next(iter(grid(net, compiled=False).items()))
    loops = {
        STOCK: cell(net, ()),
        usual: build(),
        "O2 without freezing": level(net, "O2", steps, plain),
        "O2": level(net, "O2", steps, froze),
    }
    clock, order, names = Clock.of(DEVICE), random.Random(0), list(loops)
    samples: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    setup = dict.fromkeys(names, 0.0)
    for done in range(steps):
        order.shuffle(names)
        for name in names:
            begin = clock()
            loss = loops[name].step()
            seconds = clock() - begin
            losses[name].append(float(loss))
            if done < LEAST_PAIRS:  # allocation, the choice of kernels, the trial
                setup[name] += seconds
            else:
                samples[name].append(seconds)
    return {
        "seconds": bootstrap_median(samples["O2"]).model_dump(),
        "ratios": {
            base: {"interval": total_ratio(samples[base], samples["O2"]).model_dump()}
            for base in samples
            if base != "O2"
        },
        "samples": samples["O2"],
        "baselines": {name: samples[name] for name in samples if name != "O2"},
        "setup_seconds": setup["O2"],
        "baselines_setup_seconds": setup,
        "losses": losses,
        **said(loops["O2"].boosted),
    }
