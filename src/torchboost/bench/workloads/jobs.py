"""Named training jobs: model, data, optimizer, schedule and metric, each built from a seed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from torchboost.bench.workloads.data import Data, cifar10, digits, text
from torchboost.bench.workloads.models import GPT, VGG, BasicBlock, Bottleneck, ResNet
from torchboost.errors import nearest

__all__ = ["JOBS", "Job", "accuracy", "bits_per_character", "find_job", "one_cycle"]

Predict = Callable[[Tensor], Tensor]
Metric = Literal["accuracy", "bits per character", "metric"]
"""``"metric"`` is a user's, in units of its own."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that defines a training run, except the seed and the contestant.

    Args:
        name: Name on the command line.
        title: Title in reports.
        model_name: Name of the model in reports.
        load: ``(path or None, train_limit or None) -> data``.
        build: ``data -> model``, drawing its weights from torch's global generator.
        optimizer: ``(parameters, **flags) -> optimizer`` with the rates of this job.
        loss: ``(outputs, targets) -> scalar``.
        batch: Samples per step.
        epochs: Passes over the training data.
        metric: The metric on the test set.
        margin: Drop of the metric that counts as unchanged, in units of the metric; None if these are not known.
        loose_margin: Drop that level O2 may cost; None likewise.
        source: Tells apart the versions of the user's file that defines the job.
    """

    name: str
    title: str
    model_name: str
    load: Callable[[str | Path | None, int | None], Data]
    build: Callable[[Any], nn.Module]
    optimizer: Callable[..., Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: int
    epochs: int
    metric: Metric = "accuracy"
    margin: float | None = 0.005
    loose_margin: float | None = 0.03
    source: str = ""

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher metric is better."""
        return self.metric != "bits per character"

    def model(self, data: Data, seed: int) -> nn.Module:
        """Return the model with the weights of ``seed``. The global random state is not changed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build(data)

    def loss_of_run(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss of the model that :meth:`model` returned last, also after it returns another."""
        return self.loss

    def schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        """Return the learning-rate schedule of a run of ``steps`` steps. Step it after every update."""
        return LambdaLR(optimizer, functools.partial(one_cycle, total=steps))

    def evaluate(self, predict: Predict, data: Data) -> float:
        """Return the metric on the test set. ``predict`` maps inputs to outputs in evaluation mode."""
        measure = accuracy if self.metric == "accuracy" else bits_per_character
        return measure(predict, data)


def one_cycle(step: int, total: int, *, warmup: float = 0.2) -> float:
    """Return the factor on the peak learning rate: a linear warm-up over ``warmup``, then a cosine decay to 0."""
    rise = max(1, round(total * warmup))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rise) / max(1, total - rise))))


@torch.no_grad()
def accuracy(predict: Predict, data: Data, *, batch: int = 64) -> float:
    """Return the share of test samples whose highest score is that of the correct label.

    Small batches stay in the caches: on 2 CPU cores 64 took a third of the time of 500.
    """
    right, count = 0, 0
    for inputs, labels in data.test(batch):
        right += int((predict(inputs).argmax(1) == labels).sum())
        count += len(labels)
    return right / count


@torch.no_grad()
def bits_per_character(predict: Predict, data: Data, *, batch: int = 64) -> float:
    """Return the mean cross-entropy of the test text in bits per character. Lower is better."""
    total, count = 0.0, 0
    for inputs, targets in data.test(batch):
        scores = predict(inputs).float().flatten(0, 1)
        total += float(F.cross_entropy(scores, targets.flatten(), reduction="sum"))
        count += targets.numel()
    return total / count / math.log(2)


def find_job(name: str) -> Job:
    """Return the job with this name, or the first job whose name starts with it.

    Raises:
        ValueError: There is none. The message lists all jobs.
    """
    for job in JOBS:
        if job.name == name:
            return job
    for job in JOBS:
        if name and job.name.startswith(name):
            return job
    names = [job.name for job in JOBS]
    raise ValueError(f"found no job '{name}'; there are {', '.join(names)}. {nearest(name, names)}".rstrip())


def _digits(path: str | Path | None, limit: int | None) -> Data:
    if path is not None:
        raise ValueError(f"found the path {path}; leave it out, since the digits come with scikit-learn.")
    return digits(16).limited(limit)


def _cifar10(path: str | Path | None, limit: int | None) -> Data:
    return cifar10(path, train_limit=limit)


def _text(path: str | Path | None, limit: int | None) -> Data:
    return text(path, context=128).limited(limit)


def _bottleneck(layers: tuple[int, ...], data: Any) -> nn.Module:
    return ResNet(Bottleneck, layers, width=16, classes=data.classes, in_channels=data.train_images.shape[1])


def _basic(layers: tuple[int, ...], data: Any) -> nn.Module:
    return ResNet(BasicBlock, layers, width=16, classes=data.classes, in_channels=data.train_images.shape[1])


def _vgg(data: Any) -> nn.Module:
    return VGG(width=16, classes=data.classes, in_channels=data.train_images.shape[1])


def _gpt(data: Any) -> nn.Module:
    return GPT(len(data.characters), context=data.context, layers=4, heads=4, width=128)


def _token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


_sgd = functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
_adamw = functools.partial(AdamW, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

_cifar_job = functools.partial(
    Job, load=_cifar10, optimizer=_sgd, loss=F.cross_entropy, batch=64, epochs=4, metric="accuracy"
)

JOBS: tuple[Job, ...] = (
    Job(
        name="digits-resnet",
        title="handwritten digits, 16 x 16",
        model_name="bottleneck ResNet [1, 1, 1], width 16",
        load=_digits,
        build=functools.partial(_bottleneck, (1, 1, 1)),
        optimizer=_sgd,
        loss=F.cross_entropy,
        batch=64,
        epochs=10,
    ),
    _cifar_job(
        name="cifar10-resnet-bottleneck",
        title="CIFAR-10",
        model_name="bottleneck ResNet [3, 4, 6, 3], width 16",
        build=functools.partial(_bottleneck, (3, 4, 6, 3)),
    ),
    _cifar_job(
        name="cifar10-resnet-bottleneck-small",
        title="CIFAR-10",
        model_name="bottleneck ResNet [2, 2, 2, 2], width 16",
        build=functools.partial(_bottleneck, (2, 2, 2, 2)),
    ),
    _cifar_job(
        name="cifar10-resnet-basic",
        title="CIFAR-10",
        model_name="basic ResNet [2, 2, 2, 2], width 16",
        build=functools.partial(_basic, (2, 2, 2, 2)),
    ),
    _cifar_job(
        name="cifar10-vgg",
        title="CIFAR-10",
        model_name="VGG with BatchNorm (1, 1, 2, 2, 2), width 16",
        build=_vgg,
    ),
    Job(
        name="text-gpt",
        title="English text, character by character",
        model_name="GPT, 4 layers, width 128, context 128",
        load=_text,
        build=_gpt,
        optimizer=_adamw,
        loss=_token_loss,
        batch=32,
        epochs=2,
        metric="bits per character",
        margin=0.02,
        loose_margin=0.1,
    ),
)
"""All jobs. A prefix of a name selects the first match."""
