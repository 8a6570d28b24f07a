"""Dimension-reduced steps and principal components against the reference's vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.conftest import Case, Oracle
from tests.parity.networks import assert_step, mlp
from torchboost.algorithms.dim_reduce.basis import DimReduceBasis, principal_components
from torchboost.algorithms.dim_reduce.optimizer import Subspace


def close(got: torch.Tensor, want: np.ndarray | np.float32, case: Case) -> None:
    tolerance = case.meta["tolerance"]
    torch.testing.assert_close(got, torch.as_tensor(want).to(got), rtol=tolerance["rtol"], atol=tolerance["atol"])


@pytest.mark.parametrize("name", ["dim_reduce", "dim_reduce_linesearch", "dim_reduce_batches"])
def test_weights_estimate_and_trials_of_every_step(oracle: Oracle, name: str) -> None:
    case = oracle[name]
    hyper, arrays = case.meta["hyper"], case.arrays
    model, named = mlp(case)
    assert list(named) == [entry["name"] for entry in case.meta["params"]]
    # The cases of long steps use rows that are not orthonormal, of which the reference takes no notice.
    basis = DimReduceBasis(torch.from_numpy(arrays["pca_mat"]))
    settings = {key: hyper[key] for key in ("rho", "gamma", "alpha", "sigma")}
    subspace = Subspace(list(model.parameters()), basis, **settings)
    for step in range(case.meta["steps"]):
        x, y = torch.from_numpy(arrays["x"][step]), torch.from_numpy(arrays["y"][step]).long()
        loss = subspace.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
        assert_step(case, step, loss, named)
        assert subspace.trial == arrays["trial"][step]
        state = subspace.state_dict()["inverse_hessian"]
        close(state["matrix"], arrays["bk"][step], case)
        close(state["gradient"], arrays["gk_last"][step, :, 0], case)
        close(state["step"], arrays["sk"][step, :, 0], case)


@pytest.mark.parametrize("name", ["pca_wide", "pca_tall"])
def test_principal_components(oracle: Oracle, name: str) -> None:
    case = oracle[name]
    data = torch.from_numpy(case.arrays["data"])
    k = case.meta["hyper"]["n_component"]
    rows = principal_components([[row] for row in data], k)
    close(rows, case.arrays["full"], case)
