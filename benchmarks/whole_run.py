"""Claim: the speed of a level over a whole run, with freezing, against the best loop by hand.

All contestants train the same run side by side in one process, one step each in turn, so that every step of one is
paired with the same step of the others; a ratio is that of the summed times.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from options import Options, parameters_of, parser, run, save_steps
from ratios import total_ratio

from torchboost.bench.contestants import Planner, Recipe, build_loop, plan_for
from torchboost.measure.evidence import Contestant, Ratio
from torchboost.measure.statistics import bootstrap_median
from torchboost.measure.stopwatch import Clock
from torchboost.workloads.named import Workload, find_workload

JOBS = ("cifar10-resnet-bottleneck",)
CONTESTANTS = ("stock", "hand", "O1", "O2")
STEPS = 200
WARMUP = 3
"""Steps before the run, for allocation and the choice of kernels; their weights are part of the run like any others."""


def measure(options: Options) -> list[Path]:
    return [side_by_side("whole_run", find_workload(name), CONTESTANTS, options) for name in JOBS]


def side_by_side(
    claim: str, job: Workload, contestants: Sequence[str], options: Options, planner: Planner = plan_for
) -> Path:
    """Train all contestants through one run, one step each in turn, and save their times."""
    steps = 8 if options.smoke else STEPS
    data = job.load(options.path_for(job.name), 64 * job.batch)
    loops = {
        name: build_loop(Recipe.parse(name), job.factory(data), seed=0, steps=steps + WARMUP, planner=planner)
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


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
