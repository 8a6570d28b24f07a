"""Claim: how soon each way of training reaches the final metric of the stock loop.

On the workloads of ``promises.py``, the ways are the levers by themselves, which is what a loop by hand can have, and
the levels O1 and O2 with what their trial keeps here. Each is trained for the steps of stock and, as long as its mean
over the seeds is not below that of stock, for a smaller share of them, with the learning rate schedule fitted to it.
All are paired by seed. The time is that of the last share that was not below: the CPU time of a whole run, with its
set-up and the evaluation at its end, so that other programs on the machine do not count. A run that compiles finds
graphs in the cache on disk, as in the second start of a script; what is left of compilation counts. Use one thread and
one core, since the time of all is added up: ``OMP_NUM_THREADS=1 taskset -c 0 python time_to_metric.py``. Each run is
saved when it ends, and the script continues where it stopped.
"""

from __future__ import annotations

import itertools
import resource
from functools import partial
from pathlib import Path
from typing import Any

import torch
from options import Options, run_each
from promises import MARGINS, TRIAL, UNTUNED, WORKLOADS, final, job_of, joined, machine, on_at, signed
from saved_runs import Result, Run, SavedRuns, results

from torchboost.bench.report import wording
from torchboost.bench.report.table import Table
from torchboost.measure.evidence import Environment
from torchboost.measure.statistics import paired_difference, paired_ratio
from torchboost.tuning.report import STOCK, Candidate
from torchboost.tuning.training import Training, try_levers

SEEDS = 4
FEWER_SEEDS = {"resnet-bottleneck": 3}
"""Seeds of workloads whose runs take long."""
SHARES = (1.0, 0.8, 0.65, 0.5, 0.35, 0.25)
"""Shares of the steps of stock."""


def measure(name: str, options: Options) -> Path:
    work = WORKLOADS[name](options)
    make, steps = work.job.factory(work.data).make, work.job.epochs * work.data.steps(work.job.batch)
    trial, seeds = (2.0, 2) if options.smoke else (TRIAL, FEWER_SEEDS.get(name, SEEDS))
    runs = SavedRuns(options.file("time_to_metric", name), {"title": work.title, "steps": steps})
    result = runs.result
    if "ways" not in result:
        result["ways"] = _ways(make, steps, trial)
    train = Training(make=make, steps=steps, device=torch.device("cpu"))

    def trained(way: str, seed: int, share: float) -> Run:
        began = cpu_seconds()
        run = train(Candidate(name=way, extra=result["ways"][way], share=share), seed)
        return {"metric": run.metric, "seconds": cpu_seconds() - began, "failure": run.failure}

    for share in SHARES:
        due = [way for way in result["ways"] if _is_due(result, way, share)]
        for seed, way in itertools.product(range(seeds), due):
            runs.get({"way": way, "seed": seed, "share": share}, partial(trained, way, seed, share))
    return runs.file


def _ways(make: Any, steps: int, trial: float) -> dict[str, Any]:
    """Return what each way turns on: nothing in stock, the levers that pay here, and the levels."""
    levers = dict.fromkeys(try_levers(make, steps=steps, seconds=trial).kept, True)
    levels = {level: on_at(make, level, steps, trial) for level in MARGINS}
    for extra in levels.values():
        extra.get("grad_freeze", {}).pop("total_steps", None)  # each run has its own
    return {STOCK: {}, **joined({**levels, f"levers: {', '.join(levers)}": levers}, make)}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it started and that have ended, such as a compiler."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def _is_due(result: Result, way: str, share: float) -> bool:
    """Whether a way is trained for this share: all are for all steps, and then those that reached the metric before."""
    if share == SHARES[0]:
        return True
    before = SHARES[SHARES.index(share) - 1]
    return way != STOCK and bool(_of(result, way, before)) and _gap(result, way, before)[1] >= 0


def _of(result: Result, way: str, share: float) -> dict[int, dict[str, Any]]:
    return {one["seed"]: one for one in result["runs"] if (one["way"], one["share"]) == (way, share)}


def _gap(result: Result, way: str, share: float) -> tuple[Any, float]:
    """Return the difference to the stock loop in the final metric, with bounds of 95 % on each side, and its mean."""
    stock, own = _of(result, STOCK, 1.0), _of(result, way, share)
    found = paired_difference([stock[seed]["metric"] for seed in own], [own[seed]["metric"] for seed in own])
    return found, found.mid


def table(folder: Path) -> tuple[Table, str]:
    """Return the speed and the metric of whole runs on every workload that was run, and a note.

    How soon a way reaches the metric of stock is not shown: the learning rate of stock is not tuned.
    """
    saved = results(folder, "time_to_metric", WORKLOADS)
    lines = [line for name, result in saved.items() for line in _lines(name, result)]
    machines = sorted({machine(Environment(**result["environment"])) for result in saved.values()})
    said = (
        "Means over the seeds of whole runs; each bound of a difference holds with 95 %. Speed is the CPU time of a "
        "stock run over that of the way, with set-up and evaluation. The text has bits per character as its metric. "
        f"{'; '.join(machines)}. All runs: `benchmarks/results/time_to_metric-*.json`. {UNTUNED}"
    )
    return Table(
        headings=("workload", "way", "seeds", "speed of a run", "metric, against stock"), rows=tuple(lines)
    ), said


def _lines(name: str, result: Result) -> list[tuple[str, ...]]:
    job = job_of(name)
    stock = final([one["metric"] for one in _of(result, STOCK, 1.0).values()], job)
    lines = [(STOCK, _seeds(result, STOCK), wording.ratio(1.0), stock)]
    for way in sorted((way for way in result["ways"] if way != STOCK), key=lambda way: "levers" not in way):
        gap = signed(_gap(result, way, SHARES[0])[0], job.metric == "accuracy")
        lines.append((way, _seeds(result, way), _speed(result, way), gap))
    title = f"{result['title']}, {result['steps']:,} steps"
    return [(title if not at else "", *line) for at, line in enumerate(lines)]


def _seeds(result: Result, way: str) -> str:
    return str(len(_of(result, way, SHARES[0])))


def _speed(result: Result, way: str) -> str:
    stock, own = _of(result, STOCK, SHARES[0]), _of(result, way, SHARES[0])
    return wording.ratio_interval(
        paired_ratio([stock[seed]["seconds"] for seed in own], [own[seed]["seconds"] for seed in own])
    )


if __name__ == "__main__":
    run_each(__doc__, "workload", WORKLOADS, measure)
