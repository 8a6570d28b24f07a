"""Run the benchmarks behind the claims of torchboost; without a name, all of them. ``gpu.py`` is apart."""

from __future__ import annotations

import accuracy
import adasum_time
import dim_reduce
import fewer_steps_time
import fine_tune
import freeze_on_ranks
import freeze_savings
import freeze_types
import inference
import loss_scale
import optimizer_rules
import optimizer_step
import overhead
import step_time
import trainers
import whole_run
import zoo
from options import parser, run

CLAIMS = {
    "overhead": overhead.measure,
    "step_time": step_time.measure,
    "loss_scale": loss_scale.measure,
    "dim_reduce": dim_reduce.measure,
    "freeze_savings": freeze_savings.measure,
    "freeze_on_ranks": freeze_on_ranks.measure,
    "fine_tune": fine_tune.measure,
    "fewer_steps_time": fewer_steps_time.measure,
    "whole_run": whole_run.measure,
    "freeze_types": freeze_types.measure,
    "inference": inference.measure,
    "optimizer_step": optimizer_step.measure,
    "optimizer_rules": optimizer_rules.measure,
    "adasum_time": adasum_time.measure,
    "accuracy": accuracy.measure,
    "zoo": zoo.measure,
    "trainers": trainers.measure,
}


def main(argv: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("claim", nargs="*", help=f"any of {', '.join(CLAIMS)}")
    arguments = made.parse_args(argv)
    unknown = [name for name in arguments.claim if name not in CLAIMS]
    if unknown:
        made.error(f"found no claim {', '.join(unknown)}; there are {', '.join(CLAIMS)}")
    run([CLAIMS[name] for name in arguments.claim or CLAIMS], arguments)


if __name__ == "__main__":
    main()
