"""Steps in a subspace: the published formulas, what the closure may do, and checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.memory import live_tensors
from torchboost.algorithms.dim_reduce.basis import DimReduceBasis
from torchboost.algorithms.dim_reduce.optimizer import Subspace
from torchboost.errors import IncompatibleError


def basis(k: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> DimReduceBasis:
    a = torch.randn(n, k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return DimReduceBasis(torch.linalg.qr(a)[0].T.to(dtype).contiguous())


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def weights_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(16, 6, generator=g), torch.randint(0, 3, (16,), generator=g)


def start(dropout: float = 0.3) -> tuple[nn.Module, Subspace]:
    model = network(dropout)
    optimizer = Subspace(list(model.parameters()), basis(5, weights_of(model)), alpha=0.01, buffers=model.buffers())
    return model, optimizer


def train(model: nn.Module, optimizer: Subspace, numbers: range) -> None:
    for number in numbers:
        x, y = batch(number)
        torch.manual_seed(number)
        optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x), y))


def test_what_is_not_finite_moves_nothing() -> None:
    for where in ["gradient", "loss"]:
        model, optimizer = start()
        train(model, optimizer, range(2))
        before = copy.deepcopy((list(model.parameters()), optimizer.state_dict()))
        factor = torch.tensor(float("nan") if where == "loss" else float("inf"))
        x, y = batch(9)
        optimizer.step(lambda model=model, x=x, y=y, factor=factor: F.cross_entropy(model(x), y) * factor)
        assert optimizer.trial == 0
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before[0], strict=True))
        state, kept = optimizer.state_dict(), before[1]
        assert torch.equal(state["residual"], kept["residual"])
        assert torch.equal(state["inverse_hessian"]["matrix"], kept["inverse_hessian"]["matrix"])


def test_a_trial_that_overflows_is_not_accepted() -> None:
    w = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = Subspace([w], DimReduceBasis(torch.eye(1, 2)), alpha=0.1)
    optimizer.step(lambda: torch.log(w[0] * 1e-3) + w[0] * 2e3)  # the step leads to the logarithm of less than 0
    assert optimizer.trial == 0
    assert w.isfinite().all()


def test_nothing_grows_over_steps() -> None:
    model, optimizer = start()
    train(model, optimizer, range(2))
    before = live_tensors()
    train(model, optimizer, range(2, 12))
    assert live_tensors() <= before


def test_a_state_of_another_subspace_is_refused() -> None:
    model, optimizer = start()
    other = Subspace(list(model.parameters()), basis(3, weights_of(model)))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="subspace of 3 directions of 99 weights, and this one has 5 of 99"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="subspace of 5 directions of 7 weights"):
        optimizer.load_state_dict({**before, "residual": torch.zeros(7)})
    assert torch.equal(optimizer.state_dict()["residual"], before["residual"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("step", value) for value in (None, torch.zeros(4), torch.zeros(()), [0.0] * 5)),
        ("matrix", torch.zeros(5, 4)),
        ("gradient", torch.zeros(5, 1)),
        ("residual", torch.zeros(99, 2)),
    ],
)
def test_a_damaged_state_is_refused_and_nothing_changes(name: str, value: Any) -> None:
    (_, optimizer), (model, trained) = start(), start()
    train(model, trained, range(3))
    before, saved = copy.deepcopy(optimizer.state_dict()), trained.state_dict()
    if name == "residual":
        saved["residual"] = value
    else:
        saved["inverse_hessian"][name] = value
    with pytest.raises(ValueError, match=f"'{name}' of a subspace is damaged"):
        optimizer.load_state_dict(saved)
    assert repr(optimizer.state_dict()) == repr(before)


def test_a_trial_that_fails_leaves_everything_as_it_was() -> None:
    (model, optimizer), (other, undisturbed) = start(), start()
    for m, o in ((model, optimizer), (other, undisturbed)):
        train(m, o, range(3))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    calls = 0
    x, y = batch(99)

    def failing() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("in a trial")
        return F.cross_entropy(model(x), y)

    statistics = [b.clone() for b in model.buffers()]
    with pytest.raises(MemoryError):
        optimizer.step(failing)
    assert all(torch.equal(p, before[0][name]) for name, p in model.named_parameters())
    assert not all(torch.equal(a, b) for a, b in zip(model.buffers(), statistics, strict=True)), "of the first pass"
    model.load_state_dict(before[0])  # those of the first pass
    model.zero_grad()
    train(model, optimizer, range(3, 6))
    train(other, undisturbed, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_under_a_surrounding_autocast_trials_see_the_weights_they_try() -> None:
    model, optimizer = start(dropout=0.0)
    model.eval()
    x, y = batch(0)
    seen = []

    def closure() -> torch.Tensor:
        loss = F.cross_entropy(model(x).float(), y)
        seen.append((copy.deepcopy(model), float(loss.detach())))
        return loss

    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            optimizer.step(closure)
    assert len(seen) > 3
    for tried, loss in seen:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert float(F.cross_entropy(tried(x).float(), y)) == loss


def test_a_surrounding_autocast_leaves_the_products_in_their_precision() -> None:
    (ours, optimizer), (theirs, plain) = start(dropout=0.0), start(dropout=0.0)

    def closure(model: nn.Module, number: int) -> torch.Tensor:
        x, y = batch(number)
        with torch.autocast("cpu", enabled=False):
            return F.cross_entropy(model(x), y)

    for number in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            optimizer.step(lambda number=number: closure(ours, number))
        plain.step(lambda number=number: closure(theirs, number))
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_default_device_does_not_matter() -> None:
    (ours, optimizer), (theirs, plain) = start(), start()
    batches = [batch(number) for number in range(4)]
    for number, (x, y) in enumerate(batches):
        torch.manual_seed(number)
        with torch.device("meta"):
            optimizer.step(lambda x=x, y=y: F.cross_entropy(ours(x), y))
        torch.manual_seed(number)
        plain.step(lambda x=x, y=y: F.cross_entropy(theirs(x), y))
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_state_of_other_directions_is_refused() -> None:
    model, optimizer = start()
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    other = Subspace(list(model.parameters()), basis(5, weights_of(model), seed=1), alpha=0.01)
    with pytest.raises(ValueError, match="or other directions"):
        other.load_state_dict(state)
    assert other.accepted == 0
    rounded = optimizer.basis.rows.clone()
    rounded[0, 0] += 1e-7
    Subspace(list(model.parameters()), DimReduceBasis(rounded), alpha=0.01).load_state_dict(state)


def test_sparse_gradients_are_the_dense_ones() -> None:
    ends = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 3))
        optimizer = Subspace(list(model.parameters()), basis(3, weights_of(model)), alpha=0.1)
        words, labels = torch.tensor([[0, 1], [1, 4], [5, 5]]), torch.tensor([0, 1, 2])
        for _ in range(3):
            optimizer.step(lambda: F.cross_entropy(model(words), labels))  # noqa: B023
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_what_it_refuses() -> None:
    model = network()
    parameters, directions = list(model.parameters()), basis(2, weights_of(model))
    half = network()
    half[0].half()
    for params, settings, error, message in (
        (parameters, {"rho": 0.0}, ValueError, "rho"),
        (parameters, {"rho": 1.0}, ValueError, "rho: found 1.0; give a number below 1"),
        (parameters, {"sigma": 1}, ValueError, "sigma"),
        (parameters, {"gamma": -0.1}, ValueError, "gamma"),
        (parameters, {"alpha": float("nan")}, ValueError, "alpha"),
        (parameters[:1], {}, ValueError, f"spans {weights_of(model)} weights, the parameters have 48"),
        (list(half.parameters()), {}, IncompatibleError, r"torch\.float16 on cpu, torch\.float32 on cpu"),
    ):
        with pytest.raises(error, match=message):
            Subspace(params, directions, **settings)
