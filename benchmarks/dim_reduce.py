"""Claim: apart from the forward passes of its line search, a step in a subspace of 32 directions costs little.

Two contestants: the step in the subspace, and SGD with as many more forward passes as the line search just made. It
also times the two products with the basis against reading the basis twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from options import Options, added_cost, parser, run
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.algorithms.dim_reduce import SubspaceBasis, SubspaceOptimizer
from torchboost.measure.evidence import AlgorithmRow, BenchReport, Contestant
from torchboost.measure.stopwatch import compare, environment
from torchboost.workloads.models import Bottleneck, ResNet

DIRECTIONS, BATCH = 32, 64
LONG = 2_000_000
"""Weights of the basis that is read: 256 MB, far beyond the caches."""


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
    basis = SubspaceBasis.of(orthonormal(DIRECTIONS, weights_of(reduced)))
    subspace = SubspaceOptimizer(reduced.parameters(), basis, lr=1e-4, buffers=reduced.buffers())
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


def products() -> dict[str, Callable[[], object]]:
    rows = orthonormal(DIRECTIONS, LONG)
    basis = SubspaceBasis.of(rows)
    native = basis.to(rows.device, rows.dtype, native=True)
    vector, coordinates = torch.randn(LONG), torch.randn(2, DIRECTIONS, dtype=torch.float64)
    one = coordinates[:1]
    torch.testing.assert_close(native.project(vector), basis.project(vector), rtol=0, atol=1e-3)
    torch.testing.assert_close(native.lift(coordinates), basis.lift(coordinates), rtol=0, atol=1e-5)

    def read() -> None:
        rows.sum()
        rows.sum()

    def both(basis: SubspaceBasis, coordinates: Tensor) -> Callable[[], object]:
        out = torch.empty(len(coordinates), LONG)

        def call() -> None:
            basis.project(vector)
            basis.lift(coordinates, out)

        return call

    return {
        "reading twice": read,
        "project and lift one": both(basis, one),
        "project and lift two": both(basis, coordinates),
        "native, project and lift one": both(native, one),
        "native, project and lift two": both(native, coordinates),
    }


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
    product = compare(
        products(), baselines=["reading twice"], pairs=3 if options.smoke else 60, calls=1, progress=options.progress
    )
    row = AlgorithmRow(name="dim_reduce", settings=f"k={DIRECTIONS}")
    contestants: list[Contestant] = [
        added_cost(step, way, "SGD and the same passes", row) for way in ("SGD and the same passes", "subspace")
    ]
    reports = []
    for part, title, weights, found in (
        (
            "resnet",
            "Cost of a step in a subspace: a ResNet",
            sum(p.numel() for p in resnet().parameters()),
            contestants,
        ),
        (
            "products",
            "Projecting and lifting, against reading the basis twice",
            LONG,
            [added_cost(product, way, "reading twice", row) for way in products()],
        ),
    ):
        reports.append(
            BenchReport(
                title=title,
                workload=f"dim-reduce-{part}",
                model="resnet" if part == "resnet" else f"basis of {DIRECTIONS} directions",
                parameters=weights,
                batch=BATCH,
                metric_name="none",
                environment=environment(),
                contestants=found,
                notes=["ratio below 1: slower"],
            ).save(options.file("dim_reduce", part))
        )
    return reports


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
