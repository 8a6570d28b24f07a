"""Dimension-reduced steps and principal components against the reference's vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.conftest import Case, Oracle
from torchboost.algorithms import DimReduceBasis, DimReduceOptimizer
from torchboost.algorithms.dim_reduce.basis import PrincipalComponents


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
    basis = DimReduceBasis(torch.from_numpy(arrays["pca_mat"]), orthonormal=False)
    settings = {key: hyper[key] for key in ("rho", "gamma", "sigma")}
    optimizer = DimReduceOptimizer(model.parameters(), basis, lr=hyper["alpha"], **settings)
    for step in range(case.meta["steps"]):
        x, y = torch.from_numpy(arrays["x"][step]), torch.from_numpy(arrays["y"][step]).long()
        loss = optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
        close(loss, arrays["loss"][step], case)
        assert optimizer.trial == arrays["trial"][step]
        for parameter, own in zip(model.parameters(), names, strict=True):
            close(parameter.detach(), arrays[f"param/{own}"][step], case)
        state = optimizer.state_dict()["subspace"]["inverse_hessian"]
        close(state["matrix"], arrays["bk"][step], case)
        close(state["gradient"], arrays["gk_last"][step, :, 0], case)
        close(state["step"], arrays["sk"][step, :, 0], case)


@pytest.mark.parametrize("name", ["pca_wide", "pca_tall"])
def test_principal_components(oracle: Oracle, name: str) -> None:
    case = oracle[name]
    data = torch.from_numpy(case.arrays["data"])
    k = case.meta["hyper"]["n_component"]
    components = PrincipalComponents([[row] for row in data], k)
    close(components.rows(range(k), torch.float64), case.arrays["full"], case)
