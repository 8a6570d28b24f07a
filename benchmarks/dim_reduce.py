"""Claim: apart from the forward passes of its line search, a step in a subspace of 32 directions costs little.

Two contestants: the step in the subspace, and SGD with as many more forward passes as the line search just made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from options import Options, added_cost, parameters_of, parser, run, save_steps
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.algorithms.dim_reduce.basis import DimReduceBasis
from torchboost.algorithms.dim_reduce.optimizer import Subspace
from torchboost.measure.evidence import AlgorithmRow
from torchboost.measure.stopwatch import compare
from torchboost.workloads.models import Bottleneck, ResNet

DIRECTIONS, BATCH = 32, 64
BY_SGD = "SGD and the same passes"


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return ResNet(Bottleneck, [3, 4, 6, 3], width=16)


def orthonormal(k: int, n: int) -> Tensor:
    rows = torch.randn(k, n, generator=torch.Generator().manual_seed(0))
    factor = torch.linalg.cholesky(rows.double() @ rows.double().T).float()
    return torch.linalg.solve_triangular(factor, rows, upper=False).contiguous()


def steps(inputs: Tensor, labels: Tensor) -> dict[str, Callable[[], object]]:
    plain, reduced = resnet(), resnet()
    sgd = torch.optim.SGD(plain.parameters(), lr=1e-4, momentum=0.9)
    basis = DimReduceBasis(orthonormal(DIRECTIONS, parameters_of(reduced)))
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
    return {BY_SGD: by_sgd, "subspace": in_subspace}


def measure(options: Options) -> list[Path]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    pairs = 3 if options.smoke else 40
    found = compare(steps(inputs, labels), baselines=[BY_SGD], pairs=pairs, progress=options.progress)
    row = AlgorithmRow(name="dim_reduce", settings=f"k={DIRECTIONS}")
    path = save_steps(
        options.file("dim_reduce", "resnet"),
        [added_cost(found, way, BY_SGD, row) for way in found.samples],
        title="Cost of a step in a subspace: a ResNet",
        model="resnet",
        parameters=parameters_of(resnet()),
        batch=BATCH,
        notes=["ratio below 1: slower"],
    )
    return [path]


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
