"""Claim: what gradient freezing gains over training for fewer steps.

Two freezing schedules are trained on top of the speed levers, and so are their rivals: everything is trained, for a
share of the steps, with the learning rate schedule fitted to it. Each is compared with the rival that takes as long, or
the next longer one. All are paired by seed. Each run is saved when it ends, and the script continues where it stopped.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from cases import WORKLOADS
from figures import signed
from options import Options, run_each
from saved_runs import Run, SavedRuns, results

from torchboost.bench.report import wording
from torchboost.bench.report.table import Table
from torchboost.measure.statistics import paired_difference
from torchboost.tuning.report import Candidate
from torchboost.tuning.training import Training

SEEDS = 5
FULL = "everything trained"
LEVERS = {"channels_last": True, "autocast": True}
FROZEN = (0.7, 0.3)
"""Shares of the run in which everything is trained, before freezing begins."""
SHARES = (0.95, 0.85, 0.7)
"""Shares of the steps of the rivals."""
NETWORKS = ("digits", "resnet-basic", "resnet-bottleneck", "fine-tuning")


def measure(name: str, options: Options) -> Path:
    work = WORKLOADS[name](options)
    steps = work.job.epochs * work.data.steps(work.job.batch)
    train = Training(make=work.job.factory(work.data).make, steps=steps, device=torch.device("cpu"))
    runs = SavedRuns(options.file("freeze_rival", name), {"title": work.title, "steps": steps})

    def run(way: str, seed: int, share: float, extra: dict[str, Any]) -> None:
        def trained() -> Run:
            made = train(Candidate(name=way, extra={**LEVERS, **extra}, share=share), seed)
            return {"metric": made.metric, "seconds": made.setup_seconds + made.seconds}

        runs.get({"way": way, "seed": seed, "share": share}, trained)

    for seed in range(2 if options.smoke else SEEDS):
        run(FULL, seed, 1.0, {})
        for begin in FROZEN:
            run(frozen(begin), seed, 1.0, {"grad_freeze": {"pattern": "progressive", "full_share": begin}})
        for share in SHARES:
            run(rival(share), seed, share, {})
    return runs.file


def frozen(begin: float) -> str:
    return f"freezing from {begin:.0%} of the run on"


def rival(share: float) -> str:
    return f"{share:.0%} of the steps"


def table(folder: Path) -> tuple[Table, str]:
    """Return freezing and its rivals on every network that was run, and a note."""
    saved = results(folder, "freeze_rival", NETWORKS).values()
    lines = [line for result in saved for line in _lines(result)]
    against = ("against everything trained", "against fewer steps in as much time")
    head = ("network", "way", "time of a run", "accuracy", "seeds", *against)
    machines = "; ".join(sorted({result["environment"]["processor"] for result in saved}))
    said = (
        "All with channels-last and autocast. The time is a multiple of that of training everything: the median over "
        "the seeds, and for fewer steps their share. "
        f"Each bound of a difference holds with 95 %. {machines}. "
        "All runs: `benchmarks/results/freeze_rival-*.json`."
    )
    return Table(headings=head, rows=tuple(lines)), said


def _lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    ways = (FULL, *map(frozen, FROZEN), *map(rival, SHARES))
    found = {way: runs for way in ways if (runs := _of(result, way))}
    times = {
        way: statistics.median(runs[seed]["seconds"] / found[FULL][seed]["seconds"] for seed in runs)
        for way, runs in found.items()
    } | {rival(share): share for share in SHARES if rival(share) in found}
    lines = []
    for way, runs in found.items():
        mean = sum(one["metric"] for one in runs.values()) / len(runs)
        longer = [each for each in map(rival, reversed(SHARES)) if times.get(each, 0.0) >= times[way]]
        other = found[longer[0]] if way in map(frozen, FROZEN) and longer else {}
        gap = _difference(other, runs)
        rival_gap = f"{longer[0]}: {gap}" if gap else ""
        whole = "" if way == FULL else _difference(found[FULL], runs)
        lines.append((way, wording.ratio(times[way]), f"{100 * mean:.2f} %", str(len(runs)), whole, rival_gap))
    title = f"{result['title']}, {result['steps']:,} steps"
    return [(title if not at else "", *line) for at, line in enumerate(lines)]


def _difference(baseline: dict[int, dict[str, Any]], runs: dict[int, dict[str, Any]]) -> str:
    """Return the mean difference over common seeds, with bounds of 95 % on each side; empty without two of them."""
    seeds = sorted(runs.keys() & baseline.keys())
    if len(seeds) < 2:
        return ""
    found = paired_difference([baseline[s]["metric"] for s in seeds], [runs[s]["metric"] for s in seeds])
    return signed(found)


def _of(result: dict[str, Any], way: str) -> dict[int, dict[str, Any]]:
    return {one["seed"]: one for one in result["runs"] if one["way"] == way}


if __name__ == "__main__":
    run_each(__doc__, "network", NETWORKS, measure)
