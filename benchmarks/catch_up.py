"""Claim: LazyAdam's missed steps take a C kernel less than a quarter of the time of tensor operations.

2,048 rows of 64 weights are read after up to 1,000 missed steps under a rate that changes at every step. The bound is
one root, one division and six other operations per weight and step until the row rests.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
from options import Options, parser, run, timed_contestants

from torchboost.measure.evidence import BenchReport
from torchboost.measure.stopwatch import compare, environment
from torchboost.optim.rules import missed_steps

ROWS, WIDTH, STEPS = 2048, 64, 1000
GROUP = {
    **{"weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "nesterov": False, "amsgrad": False},
    **{"decoupled_weight_decay": True, "bias_correction": True, "eps_uncorrected": False},
}
BASELINE, KERNEL = "tensor operations", "C kernel"


def measure(options: Options) -> list[Path]:
    past = missed_steps.new_past(GROUP)
    for step in range(1, STEPS + 1):
        missed_steps.record(past, step, {**GROUP, "lr": 0.01 * (1 - step / 2000)})
    draw = torch.Generator().manual_seed(0)
    rows = {key: torch.randn(ROWS, WIDTH, generator=draw) for key in ("weight", "exp_avg", "exp_avg_sq")}
    rows["exp_avg_sq"].square_()
    last = torch.randint(1, STEPS - 1, (ROWS,), generator=draw)

    def kernel() -> None:
        missed_steps.replay({key: value.clone() for key, value in rows.items()}, last, STEPS, past)

    def operations() -> None:
        with mock.patch.object(missed_steps, "_kernel", return_value=None):
            kernel()

    ways = {BASELINE: operations, KERNEL: kernel}
    found = compare(ways, baselines=[BASELINE], pairs=2 if options.smoke else 30, progress=options.progress)
    report = BenchReport(
        title=f"Catching up {ROWS:,} rows of {WIDTH} weights after up to {STEPS:,} missed steps",
        workload="catch_up",
        model="an embedding table",
        parameters=ROWS * WIDTH,
        batch=ROWS,
        metric_name="none",
        environment=environment(),
        contestants=timed_contestants(found, ways, BASELINE),
    )
    return [report.save(options.file("catch_up", "rows"))]


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
