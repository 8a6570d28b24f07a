"""Claim: O1 keeps the accuracy within half a point, O2 within three; and what each algorithm does alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from options import Options, parser, run

from torchboost.workloads.bench import run_bench
from torchboost.workloads.data import Images, cifar10
from torchboost.workloads.jobs import find_job

JOB = "cifar10-resnet-bottleneck-small"
CONTESTANTS = ["stock", "O1", "O2", "hand+gradient_centralization", "hand+less_bn"]


def flipped_only(path: str | Path | None, limit: int | None) -> Images:
    """Leave out random crops: with crops and flips the stock loop ended four points lower than without (one seed)."""
    return replace(cifar10(path, train_limit=limit), shift=0)


def few(path: str | Path | None, limit: int | None) -> Images:
    data = flipped_only(path, limit)
    return replace(data, test_images=data.test_images[:100], test_labels=data.test_labels[:100])


def measure(options: Options) -> list[Path]:
    out = options.file("accuracy", JOB)
    job = find_job(JOB)
    run_bench(
        replace(job, load=few if options.smoke else flipped_only),
        contestants=CONTESTANTS,
        pairs=2 if options.smoke else 20,
        seeds=2 if options.smoke else 5,
        epochs=1 if options.smoke else 4,
        train_limit=128 if options.smoke else 20_000,
        data_path=options.data,
        out=out,
        resume=options.resume,
        progress=options.progress,
    )
    return [out]


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
