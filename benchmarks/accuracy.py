"""Claim: O1 keeps the accuracy within half a point, O2 within three; and what each algorithm does alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from options import Options, parser, run

from torchboost.registry import REGISTRY
from torchboost.workloads.bench import run_bench
from torchboost.workloads.data import Data, cifar10
from torchboost.workloads.jobs import find_job

JOB = "cifar10-resnet-bottleneck-small"


def few(path: str | Path | None, limit: int | None) -> Data:
    data = cifar10(path, train_limit=limit)
    return replace(data, test_images=data.test_images[:100], test_labels=data.test_labels[:100])


def measure(options: Options) -> list[Path]:
    single = [f"stock+{name}" for name in REGISTRY if name != "compile"]
    contestants = ["stock", "O1", "O2", *(single[:1] if options.smoke else single)]
    out = options.file("accuracy", JOB)
    job = find_job(JOB)
    run_bench(
        replace(job, load=few) if options.smoke else job,
        contestants=contestants,
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
