"""Claim: a level saves so much of a training step, against the stock loop and the best loop by hand."""

from __future__ import annotations

from pathlib import Path

from options import Options, parser, run, single_algorithms

from torchboost.bench.bench import run_bench
from torchboost.workloads.named import find_workload

PLANNED_STEPS = 65_536
"""Length of the run that the levels plan for: the default of MindSpore's configuration."""

JOBS = ("cifar10-resnet-bottleneck", "cifar10-resnet-basic", "cifar10-vgg", "text-gpt")


def measure(options: Options) -> list[Path]:
    by_hand = ["hand", "hand+compile"] if options.compiled else ["hand"]
    paths = []
    for name in JOBS:
        job = find_workload(name)
        out = options.file("step_time", name)
        run_bench(
            job.factory(job.load(options.path_for(name), 8 * job.batch)),
            contestants=["stock", *by_hand, "O1", "O2", *single_algorithms()],
            pairs=2 if options.smoke else 30,
            epochs=0,
            total_steps=PLANNED_STEPS,
            out=out,
            resume=options.resume,
            progress=options.progress,
        )
        paths.append(out)
    return paths


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
