from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.support.ranks import run_ranks
from torchboost import AutoBoost, BoostTrainOneStepCell, DimReduce, WithLoss
from torchboost.algorithms.dim_reduce.basis import DimReduceBasis, rows_of
from torchboost.algorithms.dim_reduce.optimizer import Subspace
from torchboost.errors import IncompatibleError

SETTINGS: dict[str, Any] = {"rho": 0.55, "gamma": 0.9, "alpha": 0.01, "sigma": 0.4}


def network() -> nn.Module:
    torch.manual_seed(0)
    return WithLoss(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), F.cross_entropy)


def length(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def rows(k: int, n: int) -> torch.Tensor:
    a = torch.randn(n, k, generator=torch.Generator().manual_seed(1))
    return torch.linalg.qr(a)[0].T.contiguous()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=g), torch.randint(0, 3, (8,), generator=g)


def build(model: nn.Module, local: torch.Tensor | np.ndarray, k: int, rank: int = 0, ranks: int = 1) -> DimReduce:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weights = list(model.parameters())
    return DimReduce(model, optimizer, weights, local, k, *SETTINGS.values(), rank, ranks)


def call(step: DimReduce, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weights = list(model.parameters())
    loss = model(x, y)
    gradients = torch.autograd.grad(loss, weights)
    return step(loss, gradients, weights, [w.detach().clone() for w in weights], x, y)


def test_equals_the_optimizer_of_the_subspace() -> None:
    """The rows may be a tensor or an array."""
    matrix = rows(3, length(network()))
    for given in (matrix, matrix.numpy(), matrix.numpy().astype(np.float64)):
        one, two = network(), network()
        step = build(one, given, 3)
        own = Subspace(list(two.parameters()), DimReduceBasis(matrix), **SETTINGS)
        for number in range(5):
            x, y = batch(number)
            loss = call(step, one, x, y)
            assert torch.equal(loss, own.step(lambda x=x, y=y, model=two: model(x, y)))
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
        assert all(p.grad is None for p in one.parameters())


def test_something_else_than_a_matrix() -> None:
    for given in [
        "basis.npy",
        None,
        [[1.0, 0.0]],
        np.array(["a", "b"]),
        np.ones(3),
        torch.ones(3),
        np.eye(2, dtype=int),
    ]:
        with pytest.raises(TypeError, match=r"pca_mat_local: found .*; give a floating point matrix"):
            build(network(), given, 2)


def test_begins_at_the_clones() -> None:
    model, other = network(), network()
    x, y = batch(0)
    step = build(model, rows(2, length(model)), 2)
    weights = list(model.parameters())
    clones = [w.detach().clone() for w in weights]
    loss = model(x, y)
    gradients = torch.autograd.grad(loss, weights)
    with torch.no_grad():
        weights[0].add_(5.0)
    step(loss, gradients, weights, clones, x, y)
    call(build(other, rows(2, length(other)), 2), other, x, y)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_bad_arguments_change_nothing() -> None:
    model = network()
    n = length(model)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        DimReduce(model, model, [], rows(2, n), 2, *SETTINGS.values(), 0, 1)  # pyright: ignore
    with pytest.raises(ValueError, match="has 2 rows; rank 0 of 1 holds rows 0 to 3"):
        build(model, rows(2, n), 3)
    with pytest.raises(ValueError, match="spans 42 weights, the parameters have 43"):
        build(model, rows(2, n - 1), 2)
    with pytest.raises(IncompatibleError, match="rank=1 of rank_size=2, this process is rank 0 of 1"):
        build(model, rows(2, n)[:1], 2, 1, 2)
    step = build(model, rows(2, n), 2)
    before = [p.detach().clone() for p in model.parameters()]
    weights = list(model.parameters())
    loss = model(*batch(0))
    with pytest.raises(ValueError, match="other parameters"):
        step(loss, weights, before, before, *batch(0))
    with pytest.raises(ValueError, match="old_grad"):
        step(loss, weights[:1], weights, before, *batch(0))
    with pytest.raises(ValueError, match="weight_clone"):
        step(loss, weights, weights, before[::-1], *batch(0))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def _on_ranks(k: int) -> tuple[list[float], str]:
    model = network()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mine = rows_of(k, rank, ranks)
    step = build(model, rows(k, length(model))[mine.start : mine.stop], k, rank, ranks)
    for number in range(4):
        call(step, model, *batch(number))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    with pytest.raises(IncompatibleError) as error:
        build(model, rows(2, length(model)), 2, 0, 1)
    return weights, str(error.value)


@pytest.mark.dist
def test_ranks_may_hold_different_numbers_of_rows_and_check_the_numbers_of_the_job() -> None:
    model = network()
    step = build(model, rows(5, length(model)), 5)
    for number in range(4):
        call(step, model, *batch(number))
    alone = torch.cat([p.detach().flatten() for p in model.parameters()])
    for rank, (weights, refusal) in enumerate(run_ranks(_on_ranks, 2, 5)):
        torch.testing.assert_close(torch.tensor(weights), alone, rtol=1e-5, atol=1e-6)
        assert f"rank=0 of rank_size=1, this process is rank {rank} of 2" in refusal


def test_auto_boost_and_the_cell(tmp_path: Path) -> None:
    model = network()
    np.save(tmp_path / "basis.npy", rows(4, length(model)).numpy())
    section = {"n_components": 4, "pca_mat_path": str(tmp_path / "basis.npy"), "alpha": 0.05}
    booster = AutoBoost("O0", {"boost": {"mode": "manual", "dim_reduce": True, "less_bn": True}, "dim_reduce": section})
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = booster.network_auto_process_train(model, given)
    assert optimizer is not given
    assert "dim_reduce is on, and it cannot be combined" in booster.explain()
    x, y = batch(0)
    losses = []
    for either in (given, optimizer):
        cell = BoostTrainOneStepCell(model, either)
        assert cell.check_dim_reduce_enable() is True
        losses += [float(cell(x, y).loss) for _ in range(10)]
    assert losses[-1] < 0.9 * losses[0]
    again = booster.network_auto_process_train(model, optimizer)[1]
    assert again.opt is given  # pyright: ignore[reportAttributeAccessIssue]


def test_trials_do_not_move_the_statistics_of_a_network() -> None:
    torch.manual_seed(0)
    model = WithLoss(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), F.cross_entropy)
    step = build(model, rows(3, length(model)), 3)
    x, y = batch(0)
    weights = list(model.parameters())
    loss = model(x, y)
    gradients = torch.autograd.grad(loss, weights)
    statistics = [b.clone() for b in model.buffers()]
    step(loss, gradients, weights, [w.detach().clone() for w in weights], x, y)
    assert step.subspace.trial
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), statistics, strict=True))
