"""Claim: apart from the forward passes of its line search, a step in a subspace of 32 directions costs little.

Two contestants: the step in the subspace, and SGD with as many more forward passes as the line search just made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from options import Options, added_cost, parser, run
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.algorithms.dim_reduce.basis import DimReduceBasis
from torchboost.algorithms.dim_reduce.optimizer import Subspace
from torchboost.measure.evidence import AlgorithmRow, BenchReport, Contestant
from torchboost.measure.stopwatch import compare, environment
from torchboost.workloads.models import Bottleneck, ResNet

DIRECTIONS, BATCH = 32, 64


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return ResNet(Bottleneck, [3, 4, 6, 3], width=16)


def weights_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def orthonormal(k: int, n: int) -> Tensor:
    rows = torch.randn(k, n, generator=torch.Generator().manual_seed(0))
    factor = torch.linalg.cholesky(rows.double() @ rows.double().T).float()
    return torch.linalg.solve_triangular(factor, rows, upper=False).contiguous()


def steps(inputs: Tensor, labels: Tensor) -> dict[str, Callable[[], object]]:
    plain, reduced = resnet(), resnet()
    sgd = torch.optim.SGD(plain.parameters(), lr=1e-4, momentum=0.9)
    basis = DimReduceBasis(orthonormal(DIRECTIONS, weights_of(reduced)))
    subspace = Subspace(list(reduced.parameters()), basis, alpha=1e-4, buffers=reduced.buffers())
    passes = {"forward": 0}

    def loss() -> Tensor:
        passes["forward"] += 1
        return F.cross_entropy(reduced(inputs), labels)

    def in_subspace() -> None:
        passes["forward"] = 0
        subspace.step(loss)

    def by_sgd() -> None:
        F.cross_entropy(plain(inputs), labels).backward()
        sgd.step()
        sgd.zero_grad()
        with torch.no_grad():
            for _ in range(passes["forward"] - 1):
                F.cross_entropy(plain(inputs), labels)

    in_subspace()
    return {"SGD and the same passes": by_sgd, "subspace": in_subspace}


def measure(options: Options) -> list[Path]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    step = compare(
        steps(inputs, labels),
        baselines=["SGD and the same passes"],
        pairs=3 if options.smoke else 40,
        calls=1,
        progress=options.progress,
    )
    row = AlgorithmRow(name="dim_reduce", settings=f"k={DIRECTIONS}")
    contestants: list[Contestant] = [
        added_cost(step, way, "SGD and the same passes", row) for way in ("SGD and the same passes", "subspace")
    ]
    report = BenchReport(
        title="Cost of a step in a subspace: a ResNet",
        workload="dim-reduce-resnet",
        model="resnet",
        parameters=weights_of(resnet()),
        batch=BATCH,
        metric_name="none",
        environment=environment(),
        contestants=contestants,
        notes=["ratio below 1: slower"],
    )
    return [report.save(options.file("dim_reduce", "resnet"))]


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
