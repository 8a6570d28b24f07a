"""Claim: O1 keeps the accuracy within half a point, O2 within three; and the effect of each algorithm alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from options import Options, parser, run

from torchboost.bench.bench import run_bench
from torchboost.workloads.data import Images, cifar10
from torchboost.workloads.named import find_workload

JOB = "cifar10-resnet-bottleneck-small"
DEEP = "cifar10-resnet-bottleneck"
"""The network of the step times. It has longer stages, in which O2 removes more BatchNorms than on ``JOB``."""

LEVELS = ["stock", "O1", "O2"]
ALONE = ["hand+gradient_centralization", "hand+less_bn"]


def flipped_only(path: str | Path | None, limit: int | None) -> Images:
    """No random crops: with crops and flips the stock loop ended four points lower than without (one seed)."""
    return replace(cifar10(path, train_limit=limit), shift=0)


def few(path: str | Path | None, limit: int | None) -> Images:
    data = flipped_only(path, limit)
    return replace(data, test_inputs=data.test_inputs[:100], test_labels=data.test_labels[:100])


def measure(options: Options) -> list[Path]:
    """Train the levels, then the deeper network, then single algorithms. Each adds to the saved report."""
    levels = train(options, JOB, LEVELS, seeds=5, epochs=4)
    deep = train(options, DEEP, ["stock", "O2"], seeds=3, epochs=2)
    alone = train(replace(options, resume=True), JOB, [*LEVELS, *ALONE], seeds=5, epochs=4)
    return list(dict.fromkeys([levels, deep, alone]))


def train(options: Options, name: str, contestants: list[str], *, seeds: int, epochs: int) -> Path:
    out = options.file("accuracy", name)
    data = few(options.data, 128) if options.smoke else flipped_only(options.data, 20_000)
    run_bench(
        find_workload(name).factory(data),
        contestants=contestants,
        pairs=2 if options.smoke else 20,
        seeds=2 if options.smoke else seeds,
        epochs=1 if options.smoke else epochs,
        out=out,
        resume=options.resume,
        progress=options.progress,
    )
    return out


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
