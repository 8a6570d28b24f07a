"""Claim: keeping freed memory in the process saves a part of each step. Every sample is a process of its own."""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
from pathlib import Path

from options import Options, parser, run

from torchboost.algorithms.host_memory import retain_host_memory
from torchboost.tuner.evidence import AlgorithmRow, BenchReport, Contestant, Ratio
from torchboost.tuner.statistics import bootstrap_median, detectable_ratio, paired_ratio
from torchboost.tuner.stopwatch import Clock, environment
from torchboost.workloads.contestants import Recipe, build_loop
from torchboost.workloads.jobs import Job, find_job

JOB = "cifar10-resnet-bottleneck"
BASES = ("stock", "hand")


def step_seconds(job: Job, base: str, data_path: str | None, steps: int) -> float:
    """Return the median time of a step, the first few apart."""
    data = job.load(data_path, 8 * job.batch)
    loop = build_loop(Recipe.parse(base), job, data, seed=0, steps=steps)
    clock, times = Clock(), []
    for inputs, targets in itertools.islice(itertools.cycle(list(data.train(job.batch, seed=0, epoch=0))), steps + 4):
        start = clock()
        loop.step(inputs, targets)
        times.append(clock() - start)
    return statistics.median(times[4:])


def in_a_process(base: str, keep: bool, options: Options) -> float:
    command = [sys.executable, __file__, "--child", base, "--steps", "3" if options.smoke else "20"]
    command += ["--keep"] if keep else []
    command += ["--data", str(options.data)] if options.data else []
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(options: Options) -> list[Path]:
    job = find_job(JOB)
    names = {f"{base}{'+host_memory' if keep else ''}": (base, keep) for base in BASES for keep in (False, True)}
    samples: dict[str, list[float]] = {name: [] for name in names}
    rounds = 2 if options.smoke else 8
    for done in range(rounds):
        options.progress("processes", done, rounds)
        for name, (base, keep) in sorted(names.items(), reverse=bool(done % 2)):
            samples[name].append(in_a_process(base, keep, options))
    data = job.load(options.data, 8 * job.batch)
    report = BenchReport(
        title="One process per sample: " + job.model_name,
        workload=job.name,
        model=job.model_name,
        parameters=sum(p.numel() for p in job.model(data, 0).parameters()),
        batch=job.batch,
        metric_name="none",
        environment=environment(),
        contestants=[contestant(name, base, samples) for name, (base, _) in names.items()],
    )
    return [report.save(options.file("host_memory", JOB))]


def contestant(name: str, base: str, samples: dict[str, list[float]]) -> Contestant:
    own, kept = samples[name], name != base
    ratio = Ratio(
        baseline=base,
        interval=paired_ratio(samples[base], own),
        pairs=len(own),
        detectable=detectable_ratio(samples[base], own),
    )
    return Contestant(
        name=name,
        kind="algorithm" if kept else "stock" if base == "stock" else "hand",
        algorithms=[AlgorithmRow(name="host_memory", settings="HostMemory()")] if kept else [],
        step_seconds=bootstrap_median(own),
        samples=own,
        ratios=[ratio] if kept else [],
    )


def child() -> None:
    made = argparse.ArgumentParser()
    for name in ("--child", "--data"):
        made.add_argument(name)
    made.add_argument("--steps", type=int)
    made.add_argument("--keep", action="store_true")
    asked = made.parse_args()
    if asked.keep:
        retain_host_memory()
    print(step_seconds(find_job(JOB), asked.child, asked.data, asked.steps))


if __name__ == "__main__":
    if "--child" in sys.argv:
        child()
    else:
        run([measure], parser(__doc__).parse_args())
