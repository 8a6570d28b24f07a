"""Claim: what each freezing schedule saves and costs in training from scratch, in addition to O1."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from images import endless
from options import Options, parameters_of, parser, run, save_steps
from ratios import total_ratio
from torch import nn
from torch.optim import Optimizer

from torchboost.algorithms.grad_freeze.algorithm import GradFreeze
from torchboost.algorithms.grad_freeze.schedule import BACKWARD_SHARE
from torchboost.bench.bench import run_bench
from torchboost.bench.contestants import Loop, Recipe, build_loop
from torchboost.measure.evidence import BenchReport, Contestant, Ratio
from torchboost.measure.statistics import bootstrap_median
from torchboost.measure.stopwatch import Clock
from torchboost.plan import Plan
from torchboost.registry import Facts
from torchboost.workloads.data import Images, cifar10
from torchboost.workloads.named import find_workload

JOB = "cifar10-resnet-bottleneck-small"
STEPS = 200
WARMUP = 3
"""Steps before the run, for allocation and the choice of kernels; their weights are part of the run like any others."""
NO_FREEZING = "full"
TYPES: Mapping[str, Mapping[str, Any]] = {
    "continuous": {"pattern": "continuous", "full_share": 0.7},
    "interval": {"pattern": "interval", "full_share": 0.7},
    "progressive": {"pattern": "progressive", "full_share": 0.7},
    "progressive_early": {"pattern": "progressive", "full_share": 0.3},
}
CONTESTANTS = [f"O1+{name}" for name in (NO_FREEZING, *TYPES)]


def with_freezing(level: str, added: Sequence[str], model: nn.Module, optimizer: Optimizer, total_steps: int) -> Plan:
    """A level whose freezing is that of the type named after the plus sign, or none."""
    settings = TYPES.get(added[0]) if added else None
    extra = {"grad_freeze": {**settings} if settings else False}
    facts = Facts.measure(model, total_steps=total_steps, loop="own")
    return Plan.of(level, {"extra": extra}, facts).fit(model, optimizer)


def ceiling(settings: Mapping[str, Any], groups: int = 10) -> float:
    """Largest saving of the type in groups of equal cost, as a share of the run: two thirds of what is frozen."""
    schedule = GradFreeze(total_steps=1000, **settings).schedule([1 / groups] * groups)
    return BACKWARD_SHARE * sum(schedule(step) for step in range(1000)) / 1000 / groups


def flipped_only(path: str | Path | None, limit: int | None) -> Images:
    """No random crops: with crops and flips the stock loop ended four points lower than without (one seed)."""
    return replace(cifar10(path, train_limit=limit), shift=0)


def few(path: str | Path | None, limit: int | None) -> Images:
    data = flipped_only(path, limit)
    return replace(data, test_inputs=data.test_inputs[:100], test_labels=data.test_labels[:100])


def times(options: Options) -> Path:
    """Train all contestants through one run, one step each in turn, and save their times."""
    job, steps = find_workload(JOB), 8 if options.smoke else STEPS
    data = job.load(options.path_for(JOB), 64 * job.batch)
    factory = job.factory(data)
    loops = {
        name: build_loop(Recipe.parse(name), factory, seed=0, steps=steps + WARMUP, planner=with_freezing)
        for name in ("stock", "hand", *CONTESTANTS)
    }
    samples = _in_turns(loops, endless(data, job.batch, 0), steps + WARMUP, options)
    run = {name: found[WARMUP:] for name, found in samples.items()}
    return save_steps(
        options.file("freeze_times", JOB),
        [
            Contestant(
                name=name,
                kind=Recipe.parse(name).kind,
                algorithms=loop.algorithms,
                dropped=loop.dropped,
                step_seconds=bootstrap_median(run[name]),
                samples=run[name],
                warmup_seconds=sum(samples[name][:WARMUP]),
                ratios=[
                    Ratio(baseline=other, interval=total_ratio(run[other], run[name]), pairs=steps)
                    for other in ("stock", "hand")
                    if other != name
                ],
            )
            for name, loop in loops.items()
        ],
        title=f"A whole run of {steps} steps: {job.title}, {job.model_name}",
        model=job.model_name,
        parameters=parameters_of(job.model(data, 0)),
        batch=job.batch,
        notes=[
            "ratios are of the times of all steps together; the schedule of freezing is that of a run of this length"
        ],
    )


def _in_turns(
    loops: Mapping[str, Loop], batches: Iterable[tuple[Any, Any]], steps: int, options: Options
) -> dict[str, list[float]]:
    """Return the times of the steps of each loop. Each batch goes to all of them, in an order of its own."""
    clock, order = Clock.of("cpu"), random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in loops}
    for done, (inputs, targets) in enumerate(islice(batches, steps), start=1):
        for name in order.sample(list(loops), len(loops)):
            begin = clock()
            loops[name].step(inputs, targets)
            samples[name].append(clock() - begin)
        options.progress("whole run", done, steps, JOB)
    return samples


def measure(options: Options) -> list[Path]:
    """Time whole runs side by side, each schedule at the length of this run, and then train to the end."""
    return [times(options), accuracy(options)]


def accuracy(options: Options) -> Path:
    out = options.file("freeze_types", JOB)
    data = few(options.data, 128) if options.smoke else flipped_only(options.data, 20_000)
    run_bench(
        find_workload(JOB).factory(data),
        contestants=["stock", *CONTESTANTS],
        pairs=2 if options.smoke else 10,
        seeds=2 if options.smoke else 5,
        epochs=1 if options.smoke else 4,
        out=out,
        resume=options.resume,
        planner=with_freezing,
        progress=options.progress,
    )
    report = BenchReport.load(out)
    limits = [
        f"{name}: at most {100 * ceiling(settings):.1f} % of a run can be saved (two thirds of the frozen share)"
        for name, settings in TYPES.items()
    ]
    return report.model_copy(update={"notes": list(dict.fromkeys([*report.notes, *limits]))}).save(out)


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
