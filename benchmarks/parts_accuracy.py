"""Claim: what the parts of a level that change the training cost in accuracy, each by itself, on kinds of networks.

Every part is trained against the stock loop, paired by seed, with equal batches and the same number of steps. The
networks are no residual networks of two-dimensional convolutions, on which the parts were chosen: a VGG, a MobileNetV2,
a stack and a residual network of one-dimensional convolutions, and a residual perceptron. Each run is saved when it
ends, and the script continues where it stopped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import images
from figures import signed
from inference import MOBILENET, mobilenet
from options import Options, run_each
from saved_runs import Run, SavedRuns, results
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.bench.report.table import Table
from torchboost.measure.statistics import paired_difference
from torchboost.tuning.report import STOCK, Candidate
from torchboost.tuning.training import Training
from torchboost.workloads.named import Workload, find_workload, one_cycle

SEEDS = 6
PARTS: dict[str, dict[str, Any]] = {
    STOCK: {},
    "autocast": {"autocast": True},
    "gradient_centralization": {"gradient_centralization": True},
    "autocast and gradient_centralization": {"autocast": True, "gradient_centralization": True},
    "less_bn, O1": {"less_bn": {"keep": "narrowest"}},
    "less_bn, O2": {"less_bn": {"keep": "narrowest", "blocks_per_norm": 8}},
}


@dataclass(frozen=True)
class Case:
    """A training, as a factory, with the number of its updates."""

    title: str
    make: Callable[[int], Any]
    steps: int


def small_mobilenet() -> Workload:
    """Return a job with the first four stages of a MobileNetV2, which is enough for small images."""
    job, build = find_workload("cifar10-vgg"), lambda data: mobilenet(MOBILENET[:4])
    return replace(job, model_name="MobileNetV2 of four stages", build=build)


def _cifar(options: Options, job: Workload) -> Case:
    case = images(options, job)
    return Case(case.title, case.job.factory(case.data).make, case.job.epochs * case.data.steps(case.job.batch))


CLASSES, LENGTH = 6, 256


def sweeps(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return sine sweeps in noise of shape (count, 1, 256) and their classes: six kinds of pitch, rising or falling."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    time = torch.linspace(0, 1, LENGTH)
    pitch = 10 + 6 * labels + 4 * torch.randn(count, generator=draw)
    rise = torch.where(labels % 2 == 0, 12.0, -12.0) + 6 * torch.randn(count, generator=draw)
    phase = 2 * math.pi * torch.rand(count, generator=draw)
    turns = pitch[:, None] * time + rise[:, None] * time**2 / 2
    waves = torch.sin(2 * math.pi * turns + phase[:, None])
    return (waves + torch.randn(count, LENGTH, generator=draw))[:, None], labels


def friedman(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return 20 features of shape (count, 20), of which five matter, and Friedman's function of them with noise."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 20, generator=draw)
    y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, ((y + torch.randn(count, generator=draw) - 14.4) / 5)[:, None]


class Shuffled:
    """The batches of an epoch in an order that the seed and the epoch decide."""

    def __init__(self, inputs: Tensor, targets: Tensor, seed: int, batch: int = 64) -> None:
        self.inputs, self.targets, self.batch = inputs, targets, batch
        self.draw = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.inputs) // self.batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self.inputs), generator=self.draw).split(self.batch):
            yield self.inputs[chosen], self.targets[chosen]


def layer(inside: int, outside: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv1d(inside, outside, 9, stride, padding=4, bias=False), nn.BatchNorm1d(outside)]


class Residual(nn.Module):
    """Layers, and a shortcut around them that widens if they do."""

    def __init__(self, *layers: nn.Module, shortcut: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.shortcut = nn.Identity() if shortcut is None else shortcut
        self.after = nn.Identity() if after is None else after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layers(x) + self.shortcut(x))


def pooled(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(channels, CLASSES)]


def stack() -> nn.Module:
    """Five convolutions in a row."""
    shapes = [(1, 16, 2), (16, 32, 2), (32, 64, 2), (64, 64, 1), (64, 128, 2)]
    return nn.Sequential(*(part for shape in shapes for part in (*layer(*shape), nn.ReLU())), *pooled(128))


def residual_stack() -> nn.Module:
    """A convolution and four residual blocks of two."""
    blocks = []
    for inside, outside in itertools.pairwise((16, 32, 64, 64, 128)):
        stride = 1 if inside == outside else 2
        shortcut = None if inside == outside else nn.Sequential(nn.Conv1d(inside, outside, 1, stride, bias=False))
        both = [*layer(inside, outside, stride), nn.ReLU(), *layer(outside, outside)]
        blocks.append(Residual(*both, shortcut=shortcut, after=nn.ReLU()))
    return nn.Sequential(*layer(1, 16, 2), nn.ReLU(), *blocks, *pooled(128))


def perceptron() -> nn.Module:
    """A residual perceptron with two BatchNorms in a block."""
    blocks = []
    for _ in range(4):
        inner = [nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64)]
        blocks.append(Residual(*inner, nn.BatchNorm1d(64), after=nn.ReLU()))
    return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), *blocks, nn.Linear(64, 1))


def _drawn(
    title: str,
    build: Callable[[], nn.Module],
    data: Callable[[int, int], tuple[Tensor, Tensor]],
    options: Options,
) -> Case:
    count = 256 if options.smoke else 2_048
    train, test = data(count, 1), data(2_000 if options.smoke else 20_000, 2)
    loss = F.cross_entropy if train[1].ndim == 1 else F.mse_loss

    def evaluate(model: Callable[[Tensor], Tensor]) -> float:
        with torch.no_grad():
            found = torch.cat([model(part) for part in test[0].split(500)])
        if test[1].ndim == 1:
            return float((found.argmax(1) == test[1]).float().mean())
        return 1 - float(F.mse_loss(found, test[1]) / test[1].var())

    def schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: one_cycle(step, steps))

    def make(seed: int) -> Any:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        return model, optimizer, loss, Shuffled(*train, seed), evaluate, schedule

    return Case(title, make, 33 * (count // 64) if not options.smoke else 8)


CASES: dict[str, Callable[[Options], Case]] = {
    "vgg": lambda options: _cifar(options, find_workload("cifar10-vgg")),
    "mobilenet": lambda options: _cifar(options, small_mobilenet()),
    "stack-1d": lambda options: _drawn("five one-dimensional convolutions on sweeps", stack, sweeps, options),
    "residual-1d": lambda options: _drawn(
        "residual network of one-dimensional convolutions on sweeps", residual_stack, sweeps, options
    ),
    "perceptron": lambda options: _drawn("residual perceptron on Friedman's function", perceptron, friedman, options),
}


def measure(name: str, options: Options) -> Path:
    case = CASES[name](options)
    train = Training(make=case.make, steps=case.steps, device=torch.device("cpu"))
    runs = SavedRuns(options.file("parts_accuracy", name), {"title": case.title, "steps": case.steps})

    def trained(way: str, seed: int) -> Run:
        made = train(Candidate(name=way, extra=PARTS[way]), seed)
        return {"metric": made.metric, "seconds": made.setup_seconds + made.seconds, "failure": made.failure}

    for seed, way in itertools.product(range(2 if options.smoke else SEEDS), PARTS):
        runs.get({"way": way, "seed": seed}, partial(trained, way, seed))
    return runs.file


def table(folder: Path) -> tuple[Table, str]:
    """Return what every part costs on every network that was run to the end, and a note."""
    saved = results(folder, "parts_accuracy", CASES).values()
    whole = [result for result in saved if len(result["runs"]) == SEEDS * len(PARTS)]
    parts = [way for way in PARTS if way != STOCK]
    rows = [(f"{result['title']}, {result['steps']:,} steps", *_cells(result, parts)) for result in whole]
    machines = "; ".join(sorted({result["environment"]["processor"] for result in whole}))
    said = (
        f"Metric against stock in points, over {SEEDS} seeds: the share of right answers, or the share of the variance "
        f"that is explained. Each bound of a difference holds with 95 %. {machines}. "
        "All runs: `benchmarks/results/parts_accuracy-*.json`."
    )
    return Table(headings=("network", STOCK, *parts), rows=tuple(rows)), said


def _cells(result: dict[str, Any], parts: list[str]) -> Iterator[str]:
    metrics = {
        way: {one["seed"]: one["metric"] for one in result["runs"] if one["way"] == way} for way in (STOCK, *parts)
    }
    stock = metrics[STOCK]
    yield f"{100 * sum(stock.values()) / len(stock):.2f} %"
    for way in parts:
        seeds = sorted(metrics[way].keys() & stock.keys())
        found = paired_difference([stock[seed] for seed in seeds], [metrics[way][seed] for seed in seeds])
        yield signed(found)


if __name__ == "__main__":
    run_each(__doc__, "network", CASES, measure)
