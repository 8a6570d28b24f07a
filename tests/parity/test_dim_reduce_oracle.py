"""Dimension-reduced steps and principal components against the reference's vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.conftest import Case, Oracle
from torchboost.algorithms.dim_reduce.basis import SubspaceBasis, blocks_within
from torchboost.algorithms.dim_reduce.optimizer import SubspaceOptimizer
from torchboost.algorithms.dim_reduce.principal_components import PrincipalComponents
from torchboost.algorithms.dim_reduce.snapshots import Layout


def close(got: torch.Tensor, want: np.ndarray | np.float32, case: Case) -> None:
    tolerance = case.meta["tolerance"]
    torch.testing.assert_close(got, torch.as_tensor(want).to(got), rtol=tolerance["rtol"], atol=tolerance["atol"])


@pytest.mark.parametrize("name", ["dim_reduce", "dim_reduce_linesearch", "dim_reduce_batches"])
def test_weights_estimate_and_trials_of_every_step(oracle: Oracle, name: str) -> None:
    case = oracle[name]
    hyper, arrays = case.meta["hyper"], case.arrays
    sizes = hyper["net"]
    model = nn.Sequential(
        nn.Linear(sizes["i"], sizes["h"]),
        nn.Tanh(),
        nn.Linear(sizes["h"], sizes["h"]),
        nn.Tanh(),
        nn.Linear(sizes["h"], sizes["o"]),
    )
    names = [entry["name"] for entry in case.meta["params"]]
    with torch.no_grad():
        for parameter, own in zip(model.parameters(), names, strict=True):
            parameter.copy_(torch.from_numpy(arrays[f"init/{own}"]))
    # The cases of long steps use rows that are not orthonormal, of which the reference takes no notice.
    basis = SubspaceBasis.of(torch.from_numpy(arrays["pca_mat"]), orthonormal=False)
    settings = {key: hyper[key] for key in ("rho", "gamma", "sigma")}
    optimizer = SubspaceOptimizer(model.parameters(), basis, lr=hyper["alpha"], **settings)
    for step in range(case.meta["steps"]):
        x, y = torch.from_numpy(arrays["x"][step]), torch.from_numpy(arrays["y"][step]).long()
        loss = optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
        close(loss, arrays["loss"][step], case)
        assert optimizer.trial == arrays["trial"][step]
        for parameter, own in zip(model.parameters(), names, strict=True):
            close(parameter.detach(), arrays[f"param/{own}"][step], case)
        state = optimizer.inverse_hessian.state_dict()
        close(state["matrix"], arrays["bk"][step], case)
        close(state["gradient"], arrays["gk_last"][step, :, 0], case)
        close(state["step"], arrays["sk"][step, :, 0], case)


@pytest.mark.parametrize("name", ["pca_wide", "pca_tall"])
def test_principal_components(oracle: Oracle, name: str) -> None:
    case = oracle[name]
    data = torch.from_numpy(case.arrays["data"])

    class Rows:
        layout = Layout(("w",), ((data.shape[1],),))

        def __len__(self) -> int:
            return len(data)

        def part(self, snapshot: int, parameter: int, where: tuple[slice, ...]) -> torch.Tensor:
            return data[snapshot][where]

    k = case.meta["hyper"]["n_component"]
    found = PrincipalComponents(Rows(), blocks_within(data.shape[1], k))
    close(found.rows(0, range(k), torch.float64), case.arrays["full"], case)
