"""The named workloads of the command line: network, data, optimizer, schedule and metric of a training."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from torchboost.bench.factory import ACCURACY_DROPS, Factory, Metric, Parts
from torchboost.errors import nearest
from torchboost.workloads.data import Images, Labelled, Text, cifar10, digits, text, to_longest
from torchboost.workloads.docstrings import docstrings
from torchboost.workloads.models import GPT, VGG, BasicBlock, Bottleneck, ResNet, TextClassifier
from torchboost.workloads.pieces import pieces

Predict = Callable[[Tensor], Tensor]
Data = Labelled | Text


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training of a known network on known data. See :class:`~torchboost.bench.factory.Factory` for the other fields.

    Args:
        load: ``(path or None, train_limit or None) -> data``. The last tenth of the training data is for validation.
        build: ``data -> model``, drawing its weights from torch's global generator.
        optimizer: ``(parameters, **flags) -> optimizer`` with the rates of this workload.
        loss: ``(outputs, targets) -> scalar``.
        batch: Samples per step.
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
    drops: tuple[float, float] = ACCURACY_DROPS
    shorten: Callable[[Any], Any] | None = None

    def model(self, data: Data, seed: int) -> nn.Module:
        """Return the model with the weights of ``seed``. The global random state is not changed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build(data)

    def schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        """Return the learning-rate schedule of a run of ``steps`` steps. Step it after every update."""
        return LambdaLR(optimizer, functools.partial(one_cycle, total=steps))

    def evaluate(self, predict: Predict, data: Data) -> float:
        """Return the metric on the test set. Higher is better. ``predict`` maps inputs to outputs."""
        return -bits_per_character(predict, data) if isinstance(data, Text) else accuracy(predict, data)

    def validate(self, predict: Predict, data: Data) -> float:
        """Return the metric on the samples held out from training. Higher is better. Choices are made by it."""
        validation = data.held_out().validation
        assert validation is not None
        return self.evaluate(predict, validation)

    def factory(self, data: Data, device: torch.device | str = "cpu") -> Factory:
        """Return the workload as a factory of models on a device, which its data are on.

        If the data have no part for validation, the last tenth of the training data becomes it.

        Raises:
            ValueError: The data are fewer than a batch.
        """
        data = data.held_out()
        if data.samples < self.batch:
            raise ValueError(
                f"{self.name}: found {data.samples} training samples, and a batch has {self.batch}; raise "
                "--train-limit, or give more data."
            )

        def make(seed: int) -> Parts:
            model = self.model(data, seed).to(device)
            return Parts(
                model=model,
                optimizer=self.optimizer(model.parameters()),
                loss=self.loss,
                batches=Epochs(data, self.batch, seed),
                evaluate=functools.partial(self.evaluate, data=data),
                schedule=self.schedule,
                validate=functools.partial(self.validate, data=data),
            )

        return Factory(
            make=make,
            name=self.name,
            title=self.title,
            model_name=self.model_name,
            epochs=self.epochs,
            metric=self.metric,
            higher_is_better=self.metric == "accuracy",
            drops=self.drops,
            shorten=self.shorten,
        )


@dataclass(eq=False)
class Epochs:
    """The batches of a data set with a seed. Each iteration is the next epoch."""

    data: Data
    batch: int
    seed: int
    epoch: int = 0

    def __len__(self) -> int:
        return self.data.steps(self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.epoch += 1
        return iter(self.data.train(self.batch, seed=self.seed, epoch=self.epoch - 1))


def one_cycle(step: int, total: int, *, warmup: float = 0.2) -> float:
    """Return the factor on the peak learning rate: a linear warm-up over ``warmup``, then a cosine decay to 0."""
    rise = max(1, round(total * warmup))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rise) / max(1, total - rise))))


@torch.no_grad()
def accuracy(predict: Predict, data: Data, *, batch: int = 64) -> float:
    """Return the share of test samples whose highest score belongs to the correct label.

    Small batches fit the caches: on 2 CPU cores 64 took a third of the time of 500.
    """
    right, count = 0, 0
    for inputs, labels in data.test(batch):
        right += int((predict(inputs).argmax(1) == labels).sum())
        count += len(labels)
    return right / count


@torch.no_grad()
def bits_per_character(predict: Predict, data: Text, *, batch: int = 64) -> float:
    """Return the cross-entropy of the test text in bits per character, also of word pieces. Lower is better."""
    total, count = 0.0, 0
    lengths = torch.tensor([len(piece) for piece in data.characters], device=data.test_tokens.device)
    for inputs, targets in data.test(batch):
        scores = predict(inputs).float().flatten(0, 1)
        total += float(F.cross_entropy(scores, targets.flatten(), reduction="sum"))
        count += int(lengths[targets].sum())
    return total / count / math.log(2)


def find_workload(name: str) -> Workload:
    """Return the workload with this name, or the first one whose name starts with it.

    Raises:
        ValueError: There is none. The message lists all of them.
    """
    known = {workload.name: workload for workload in WORKLOADS}
    matches = [workload for full, workload in known.items() if name and full.startswith(name)]
    if not matches:
        raise ValueError(f"found no workload '{name}'; there are {', '.join(known)}. {nearest(name, known)}".rstrip())
    return known.get(name, matches[0])


def _without_path(data: Callable[[], Labelled], why: str) -> Callable[[str | Path | None, int | None], Labelled]:
    def load(path: str | Path | None, limit: int | None) -> Labelled:
        if path is not None:
            raise ValueError(f"found the path {path}; leave it out, since {why}.")
        return data().held_out().limited(limit)

    return load


def _resnet(block: type[BasicBlock | Bottleneck], layers: tuple[int, ...], data: Images) -> nn.Module:
    return ResNet(block, layers, width=16, classes=data.classes, in_channels=data.train_inputs.shape[1])


def _gpt(width: int, data: Text) -> nn.Module:
    return GPT(len(data.characters), context=data.context, layers=4, heads=4, width=width)


def _of_tokens(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


_images = functools.partial(
    Workload,
    title="CIFAR-10",
    load=lambda path, limit: cifar10(path).held_out().limited(limit),
    optimizer=functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
    loss=F.cross_entropy,
    batch=64,
    epochs=4,
)

WORKLOADS: tuple[Workload, ...] = (
    _images(
        name="digits-resnet",
        title="handwritten digits, 16 x 16",
        model_name="bottleneck ResNet [1, 1, 1], width 16",
        load=_without_path(digits, "the digits come with scikit-learn"),
        build=functools.partial(_resnet, Bottleneck, (1, 1, 1)),
        epochs=10,
    ),
    _images(
        name="cifar10-resnet-bottleneck",
        model_name="bottleneck ResNet [3, 4, 6, 3], width 16",
        build=functools.partial(_resnet, Bottleneck, (3, 4, 6, 3)),
    ),
    _images(
        name="cifar10-resnet-bottleneck-small",
        model_name="bottleneck ResNet [2, 2, 2, 2], width 16",
        build=functools.partial(_resnet, Bottleneck, (2, 2, 2, 2)),
    ),
    _images(
        name="cifar10-resnet-basic",
        model_name="basic ResNet [2, 2, 2, 2], width 16",
        build=functools.partial(_resnet, BasicBlock, (2, 2, 2, 2)),
    ),
    _images(
        name="cifar10-vgg",
        model_name="VGG with BatchNorm (1, 1, 2, 2, 2), width 16",
        build=lambda data: VGG(width=16, classes=data.classes, in_channels=data.train_inputs.shape[1]),
    ),
    Workload(
        name="text-gpt",
        title="English text, character by character",
        model_name="GPT, 4 layers, width 128, context 128",
        load=lambda path, limit: text(path, context=128).held_out().limited(limit),
        build=functools.partial(_gpt, 128),
        optimizer=functools.partial(AdamW, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
        loss=_of_tokens,
        batch=32,
        epochs=2,
        metric="bits per character",
        drops=(0.02, 0.1),
    ),
    Workload(
        name="docstrings-transformer",
        title="docstrings of installed packages, padded to 128 words",
        model_name="transformer encoder, 2 layers, width 128",
        load=_without_path(docstrings, "the texts are those of installed packages"),
        build=lambda data: TextClassifier(len(data.words), len(data.classes), context=data.train_inputs.shape[1]),
        optimizer=functools.partial(AdamW, lr=1e-3, weight_decay=0.01),
        loss=F.cross_entropy,
        batch=15,
        epochs=1,
        shorten=to_longest,
    ),
    Workload(
        name="pieces-gpt",
        title="English text by word pieces",
        model_name="GPT, 4 layers, width 192, context 128",
        load=lambda path, limit: pieces(path, context=128).held_out().limited(limit),
        build=functools.partial(_gpt, 192),
        optimizer=functools.partial(AdamW, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1),
        loss=_of_tokens,
        batch=8,
        epochs=3,
        metric="bits per character",
        drops=(0.02, 0.1),
    ),
)
"""All workloads. A prefix of a name selects the first match."""
