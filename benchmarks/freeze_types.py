"""Claim: what each freezing schedule saves and costs in training from scratch, in addition to O1."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from options import Options, parameters_of, parser, run, save_steps
from ratios import total_ratio
from torch import nn
from torch.optim import Optimizer

from torchboost.algorithms.grad_freeze.algorithm import GradFreeze
from torchboost.algorithms.grad_freeze.schedule import BACKWARD_SHARE
from torchboost.bench.bench import run_bench
from torchboost.bench.contestants import Recipe, build_loop
from torchboost.measure.evidence import BenchReport, Contestant, Ratio
from torchboost.measure.statistics import bootstrap_median
from torchboost.measure.stopwatch import Clock
from torchboost.plan import Plan
from torchboost.registry import Facts
from torchboost.workloads.data import Images, cifar10
from torchboost.workloads.named import Workload, find_workload

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


def side_by_side(claim: str, job: Workload, contestants: Sequence[str], options: Options) -> Path:
    """Train all contestants through one run, one step each in turn, and save their times."""
    steps = 8 if options.smoke else STEPS
    data = job.load(options.path_for(job.name), 64 * job.batch)
    loops = {
        name: build_loop(Recipe.parse(name), job.factory(data), seed=0, steps=steps + WARMUP, planner=with_freezing)
        for name in contestants
    }
    clock, order = Clock.of("cpu"), random.Random(0)
    setup = dict.fromkeys(contestants, 0.0)
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    done = 0
    for epoch in range(1 + (steps + WARMUP) // 64):
        for inputs, targets in data.train(job.batch, seed=0, epoch=epoch):
            if done == steps + WARMUP:
                break
            names = list(contestants)
            order.shuffle(names)
            for name in names:
                begin = clock()
                loops[name].step(inputs, targets)
                seconds = clock() - begin
                if done >= WARMUP:
                    samples[name].append(seconds)
                else:
                    setup[name] += seconds
            done += 1
            options.progress("whole run", done, steps + WARMUP, job.name)
    return save_steps(
        options.file(claim, job.name),
        [
            Contestant(
                name=name,
                kind=Recipe.parse(name).kind,
                algorithms=loops[name].algorithms,
                dropped=loops[name].dropped,
                step_seconds=bootstrap_median(times),
                samples=times,
                warmup_seconds=setup[name],
                ratios=[
                    Ratio(baseline=other, interval=total_ratio(samples[other], times), pairs=steps)
                    for other in ("stock", "hand")
                    if other != name and other in contestants
                ],
            )
            for name, times in samples.items()
        ],
        title=f"A whole run of {steps} steps: {job.title}, {job.model_name}",
        model=job.model_name,
        parameters=parameters_of(job.model(data, 0)),
        batch=job.batch,
        notes=[
            "ratios are of the times of all steps together; the schedule of freezing is that of a run of this length"
        ],
    )


def measure(options: Options) -> list[Path]:
    """Time whole runs side by side, each schedule at the length of this run, and then train to the end."""
    contestants = ["stock", "hand", *CONTESTANTS]
    return [side_by_side("freeze_times", find_workload(JOB), contestants, options), accuracy(options)]


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
