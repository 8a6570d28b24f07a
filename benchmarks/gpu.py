"""Claim: the levels pay on a GPU too. ResNet-50 at 224 pixels and a GPT of 124 M weights on synthetic batches."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from options import Options, parser, run
from torch import nn

from torchboost.bench.workloads.bench import run_bench
from torchboost.bench.workloads.data import Data, Text, synthetic_images
from torchboost.bench.workloads.jobs import Job, find_job
from torchboost.bench.workloads.models import GPT, Bottleneck, ResNet
from torchboost.registry import REGISTRY

VOCABULARY = 50257


def resnet50(data: Any) -> nn.Module:
    return ResNet(Bottleneck, [3, 4, 6, 3], classes=data.classes, stem="imagenet")


def images(count: int, path: object, limit: int | None) -> Data:
    return synthetic_images(count, size=224)


def gpt2_small(data: Any) -> nn.Module:
    return GPT(VOCABULARY, context=data.context)


def tokens(count: int, path: object, limit: int | None) -> Data:
    generator = torch.Generator().manual_seed(0)
    made = torch.randint(VOCABULARY, (count * 1024 + 1,), generator=generator)
    return Text(train_tokens=made, test_tokens=made, characters="", context=1024)


def jobs(smoke: bool) -> list[Job]:
    """Eight batches each. The data are created once and stay on the device."""
    image_batch, text_batch = (4, 2) if smoke else (256, 16)
    return [
        replace(
            find_job("cifar10-resnet-bottleneck"),
            name="resnet50-224",
            title="synthetic images, 224 x 224",
            model_name="ResNet-50",
            load=functools.partial(images, 8 * image_batch),
            build=resnet50,
            batch=image_batch,
        ),
        replace(
            find_job("text-gpt"),
            name="gpt2-small",
            title="synthetic tokens, context 1024",
            model_name="GPT, 12 layers, width 768",
            load=functools.partial(tokens, 8 * text_batch),
            build=gpt2_small,
            batch=text_batch,
        ),
    ]


def measure(options: Options) -> list[Path]:
    if not torch.cuda.is_available():
        sys.exit("gpu: found no CUDA device, nothing was measured; run this on a machine with one.")
    single = [f"hand+{name}" for name in REGISTRY if name in ("less_bn", "gradient_centralization")]
    by_hand = ["hand", "hand+compile"] if options.compiled else ["hand"]
    levels = ["O1", "O2", "O1+compile", "O2+compile"] if options.compiled else ["O1", "O2"]
    paths = []
    for job in jobs(options.smoke):
        out = options.file("gpu", job.name)
        run_bench(
            job,
            contestants=["stock", *by_hand, *levels, *single],
            pairs=3 if options.smoke else 30,
            calls=1 if options.smoke else 5,
            epochs=0,
            device="cuda",
            out=out,
            resume=options.resume,
            progress=options.progress,
        )
        paths.append(out)
    return paths


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
