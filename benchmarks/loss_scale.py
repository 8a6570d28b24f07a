"""Claim: dynamic loss scaling adds at most 3 percent to a ResNet step, scales per group at most 5 percent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from options import Options, parser, run
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.algorithms.loss_scale import GroupGradScaler
from torchboost.core.algorithm import Scaler, Target
from torchboost.core.loss_scale import DynamicLossScale, FixedLossScale
from torchboost.core.step import TrainStep
from torchboost.tuner.evidence import AlgorithmRow, BenchReport, Contestant
from torchboost.tuner.statistics import bootstrap_median
from torchboost.tuner.stopwatch import Comparison, compare, environment
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
    found = compare(
        steps,
        baselines=["no scaling"],
        pairs=3 if options.smoke else 300,
        calls=1,
        progress=options.progress,
    )
    report = BenchReport(
        title="Cost of loss scaling: a ResNet step",
        workload="loss-scale-resnet",
        model="resnet",
        parameters=sum(p.numel() for p in resnet().parameters()),
        batch=shape[0],
        metric_name="none",
        environment=environment(),
        contestants=[contestant(way, found) for way in WAYS],
        notes=["ratio below 1: slower than without scaling"],
    )
    return [report.save(options.file("loss_scale", "resnet"))]


def contestant(way: str, found: Comparison) -> Contestant:
    bare = way == "no scaling"
    differences = zip(found.samples[way], found.samples["no scaling"], strict=True)
    extra = bootstrap_median([1e6 * (own - base) for own, base in differences])
    note = f"{extra.mid:.1f} microseconds per step more than without (95 %: {extra.low:.1f} to {extra.high:.1f})"
    return Contestant(
        name=way,
        kind="stock" if bare else "level",
        algorithms=[] if bare else [AlgorithmRow(name="loss scale", settings=WAYS[way][1])],
        step_seconds=found.step_seconds(way),
        samples=found.samples[way],
        ratios=found.ratios(way),
        warmup_seconds=found.warmup_seconds[way],
        notes=[] if bare else [note],
    )


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
