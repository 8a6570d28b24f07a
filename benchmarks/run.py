"""Run the benchmarks behind the claims of torchboost; without a name, all of them. ``gpu.py`` is apart."""

from __future__ import annotations

from importlib import import_module

from options import parser, run

CLAIMS = (
    "overhead",
    "loss_scale",
    "dim_reduce",
    "freeze_savings",
    "freeze_on_ranks",
    "fine_tune",
    "fewer_steps_time",
    "freeze_types",
    "inference",
    "optimizer_step",
    "optimizer_rules",
    "adasum_time",
    "zoo",
    "trainers",
)
"""Each is a file of this folder with a function ``measure``."""


def main(argv: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("claim", nargs="*", help=f"any of {', '.join(CLAIMS)}")
    arguments = made.parse_args(argv)
    unknown = [name for name in arguments.claim if name not in CLAIMS]
    if unknown:
        made.error(f"found no claim {', '.join(unknown)}; there are {', '.join(CLAIMS)}")
    run([import_module(name).measure for name in arguments.claim or CLAIMS], arguments)


if __name__ == "__main__":
    main()
