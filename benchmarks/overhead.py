"""Claim: level O0 costs under one percent of a step. The raw loop against the same loop through torchboost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from options import Options, added_cost, parameters_of, parser, run, save_steps
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.core.algorithm import Target
from torchboost.front import boost
from torchboost.measure.evidence import AlgorithmRow
from torchboost.measure.stopwatch import compare
from torchboost.plan import Plan
from torchboost.workloads.models import Bottleneck, ResNet

Step = Callable[[], object]


def raw(model: nn.Module, inputs: Tensor, labels: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def attached(model: nn.Module, inputs: Tensor, labels: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    Plan.of("O0").attach(Target(model, optimizer))

    def step() -> None:
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train_step(model: nn.Module, inputs: Tensor, labels: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    step = boost(model, optimizer, level="O0").step(F.cross_entropy)
    return lambda: step(inputs, labels)


def resnet() -> nn.Module:
    return ResNet(Bottleneck, [3, 4, 6, 3], width=16)


def toy() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


# Name -> model, shape of a batch, calls per sample, rounds. The overhead of a step does not depend on the batch. A
# small batch gives a shorter, steadier step, so the overhead shows most.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "resnet": (resnet, (8, 3, 32, 32), 1, 600),
    "toy": (toy, (16, 32), 200, 60),
}
WAYS = {"stock": raw, "O0 attached": attached, "O0 TrainStep": train_step}


def measure(options: Options) -> list[Path]:
    return [measure_case(name, options) for name in CASES]


def measure_case(name: str, options: Options) -> Path:
    make, shape, calls, pairs = CASES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(shape, generator=generator)
    labels = torch.randint(10, (shape[0],), generator=generator)
    steps = {}
    for way, build in WAYS.items():
        torch.manual_seed(0)
        steps[way] = build(make(), inputs, labels)
    found = compare(
        steps,
        baselines=["stock"],
        pairs=3 if options.smoke else pairs,
        calls=5 if options.smoke and calls > 1 else calls,
        progress=options.progress,
    )
    nothing = AlgorithmRow(name="O0", settings="nothing attached")
    return save_steps(
        options.file("overhead", name),
        [added_cost(found, way, "stock", nothing) for way in WAYS],
        title=f"Cost of doing nothing: {name}",
        model=name,
        parameters=parameters_of(make()),
        batch=shape[0],
        notes=["ratio below 1: slower than the raw loop"],
    )


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
