"""Claim: what each freezing schedule saves and costs in training from scratch, in addition to O1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accuracy import JOB, few, flipped_only
from options import Options, parser, run
from torch import nn
from torch.optim import Optimizer
from whole_run import side_by_side

from torchboost.algorithms.grad_freeze.algorithm import GradFreeze
from torchboost.algorithms.grad_freeze.schedule import BACKWARD_SHARE
from torchboost.bench.bench import run_bench
from torchboost.measure.evidence import BenchReport
from torchboost.plan import Plan
from torchboost.registry import Facts
from torchboost.workloads.named import find_workload

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


def measure(options: Options) -> list[Path]:
    """Time whole runs side by side, each schedule at the length of this run, and then train to the end."""
    contestants = ["stock", "hand", *CONTESTANTS]
    return [side_by_side("freeze_times", find_workload(JOB), contestants, options, with_freezing), accuracy(options)]


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
