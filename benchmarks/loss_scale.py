"""Claim: dynamic loss scaling adds at most 3 percent to a ResNet step, scales per group at most 5 percent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from options import Options, added_cost, parameters_of, parser, run, save_steps
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.algorithms.loss_scale_group.algorithm import GroupGradScaler
from torchboost.algorithms.loss_scale_group.scalers import DynamicLossScale, FixedLossScale
from torchboost.core.algorithm import Scaler, Target
from torchboost.core.step import TrainStep
from torchboost.measure.evidence import AlgorithmRow
from torchboost.measure.stopwatch import compare
from torchboost.workloads.models import Bottleneck, ResNet

STAGES = [f"stages.{index}" for index in range(4)]

# Way -> what scales, and what it is called in the report.
WAYS: dict[str, tuple[Callable[[nn.Module], Scaler | None], str]] = {
    "no scaling": (lambda model: None, "TrainStep alone"),
    "fixed": (lambda model: FixedLossScale(1024.0), "FixedLossScale"),
    "dynamic": (lambda model: DynamicLossScale(1024.0), "DynamicLossScale"),
    "GradScaler": (lambda model: torch.amp.GradScaler("cpu", init_scale=1024.0), "torch.amp.GradScaler"),
    "group": (lambda model: GroupGradScaler(model, STAGES, init_scale=1024.0), "one group per stage"),
}


def resnet() -> nn.Module:
    return ResNet(Bottleneck, [3, 4, 6, 3], width=16)


def train_step(way: str, model: nn.Module, inputs: Tensor, labels: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = WAYS[way][0](model)
    step = TrainStep(Target(model, optimizer, scaler), lambda x, y: F.cross_entropy(model(x), y))
    return lambda: step(inputs, labels)


def measure(options: Options) -> list[Path]:
    generator = torch.Generator().manual_seed(0)
    shape = (8, 3, 32, 32)
    inputs = torch.randn(shape, generator=generator)
    labels = torch.randint(10, (shape[0],), generator=generator)
    steps = {}
    for way in WAYS:
        torch.manual_seed(0)
        steps[way] = train_step(way, resnet(), inputs, labels)
    pairs = 3 if options.smoke else 300
    found = compare(steps, baselines=["no scaling"], pairs=pairs, progress=options.progress)
    rows = {way: AlgorithmRow(name="loss scale", settings=called) for way, (_, called) in WAYS.items()}
    path = save_steps(
        options.file("loss_scale", "resnet"),
        [added_cost(found, way, "no scaling", row) for way, row in rows.items()],
        title="Cost of loss scaling: a ResNet step",
        model="resnet",
        parameters=parameters_of(resnet()),
        batch=shape[0],
        notes=["ratio below 1: slower than without scaling"],
    )
    return [path]


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
