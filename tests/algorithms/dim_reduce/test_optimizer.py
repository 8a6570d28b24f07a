from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.memory import live_tensors
from torchboost.algorithms.dim_reduce import SubspaceBasis, SubspaceOptimizer
from torchboost.core.closure import Replay
from torchboost.errors import IncompatibleError


def basis(k: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> SubspaceBasis:
    a = torch.randn(n, k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return SubspaceBasis.of(torch.linalg.qr(a)[0].T.to(dtype).contiguous())


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def weights_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(16, 6, generator=g), torch.randint(0, 3, (16,), generator=g)


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_a_quadratic_inside_the_subspace_is_solved_in_k_plus_one_accepted_steps(k: int) -> None:
    n = 40
    g = torch.Generator().manual_seed(k)
    rows = basis(k, n, dtype=torch.float64).rows[0]
    a = torch.randn(k, k, dtype=torch.float64, generator=g)
    hessian, lowest = a @ a.T + 0.1 * torch.eye(k), torch.randn(k, dtype=torch.float64, generator=g)
    w = nn.Parameter(torch.zeros(n, dtype=torch.float64))

    def loss() -> torch.Tensor:
        away = rows @ w - lowest
        return 0.5 * away @ hessian @ away

    optimizer = SubspaceOptimizer([w], SubspaceBasis.of(rows), lr=0.1, line_search="parabola", sigma=1e-4)
    first = loss().item()
    while loss().item() > 1e-18 * first:
        optimizer.step(loss)
        assert optimizer.accepted <= k + 1, f"loss {loss().item()} of {first}"


def by_hand(model: nn.Module, rows: torch.Tensor, steps: int, *, alpha: float, gamma: float, rho: float, sigma: float):
    """The published step, written out in float64 without any of our parts."""
    parameters = list(model.parameters())
    k, n = rows.shape
    inverse, residual = torch.eye(k, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    before, step = None, torch.zeros(k, dtype=torch.float64)
    trials = []
    for number in range(steps):
        x, y = batch(number)
        loss = F.cross_entropy(model(x.double()), y)
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])
        g = rows @ gradient
        kept = inverse, before
        if before is not None and (g - before) @ step > 1e-20:
            change = g - before
            e = torch.eye(k, dtype=torch.float64) - torch.outer(change, step) / (change @ step)
            inverse = e.T @ inverse @ e + torch.outer(step, step) / (change @ step)
        before = g
        d = -inverse @ g
        start = torch.nn.utils.parameters_to_vector(parameters).detach()
        accepted, move = 0, torch.zeros(n, dtype=torch.float64)
        for trial, length in ((1, 1.0), (2, rho)):
            torch.nn.utils.vector_to_parameters(start + length * rows.T @ d, parameters)
            with torch.no_grad():
                new = F.cross_entropy(model(x.double()), y)
            if new < loss + sigma * length * (g @ d):
                accepted, step, move = trial, length * d, length * rows.T @ d
                break
        if not accepted:
            inverse, before = kept
        residual = gamma * residual + gradient - rows.T @ g
        torch.nn.utils.vector_to_parameters(start + move - alpha * residual, parameters)
        trials.append(accepted)
    return trials


def test_weights_are_those_of_the_formulas() -> None:
    ours, theirs = network().double(), network().double()
    for model in (ours, theirs):
        model[1] = nn.Identity()  # its statistics would move in the trials by hand
    rows = 3 * basis(4, weights_of(ours), dtype=torch.float64).rows[0]  # long steps, so that some are refused
    optimizer = SubspaceOptimizer(
        ours.parameters(), SubspaceBasis.of(rows, orthonormal=False), lr=0.05, gamma=0.8, rho=0.5, sigma=0.4
    )
    trials = []
    for number in range(12):
        x, y = batch(number)
        optimizer.step(lambda x=x, y=y: F.cross_entropy(ours(x.double()), y))
        trials.append(optimizer.trial)
    assert trials == by_hand(theirs, rows, 12, alpha=0.05, gamma=0.8, rho=0.5, sigma=0.4)
    assert {0, 1, 2} <= set(trials)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


def start(dropout: float = 0.3, **settings: Any) -> tuple[nn.Module, SubspaceOptimizer]:
    model = network(dropout)
    optimizer = SubspaceOptimizer(
        model.parameters(), basis(5, weights_of(model)), lr=0.01, buffers=model.buffers(), **settings
    )
    return model, optimizer


def train(model: nn.Module, optimizer: SubspaceOptimizer, numbers: range) -> None:
    for number in numbers:
        x, y = batch(number)
        torch.manual_seed(number)
        optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x), y))


@pytest.mark.parametrize("settings", [{"line_search": "backtracking"}, {"line_search": "parabola"}])
def test_resumes_bit_for_bit_after_every_step(settings: dict[str, Any]) -> None:
    model, optimizer = start(**settings)
    saved = []
    for number in range(6):
        saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        train(model, optimizer, range(number, number + 1))
    for number, (weights, state) in enumerate(saved):
        again, resumed = start(**settings)
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
        train(again, resumed, range(number, 6))
        for name, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), f"{name} after resuming at {number}"


def test_gradients_that_are_there_are_used() -> None:
    (one, ours), (two, given) = start(), start()
    x, y = batch(0)
    torch.manual_seed(0)
    ours.step(lambda: F.cross_entropy(one(x), y))
    assert all(p.grad is None for p in one.parameters())
    torch.manual_seed(0)
    replay = Replay(lambda: F.cross_entropy(two(x), y), torch.device("cpu"))
    replay.first().backward()
    given.step(replay)
    assert all(p.grad is not None for p in two.parameters())
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


def test_trials_do_not_move_statistics() -> None:
    model, optimizer = start(0.0)
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    train(model, optimizer, range(3))
    assert norm.num_batches_tracked == 3


def test_a_scheduler_moves_the_residual_step() -> None:
    model, optimizer = start()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    train(model, optimizer, range(1))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_what_is_not_finite_moves_nothing(where: str) -> None:
    model, optimizer = start()
    train(model, optimizer, range(2))
    before = copy.deepcopy((list(model.parameters()), optimizer.state_dict()))
    factor = torch.tensor(float("nan") if where == "loss" else float("inf"))
    x, y = batch(9)
    optimizer.step(lambda: F.cross_entropy(model(x), y) * factor)
    assert optimizer.trial == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before[0], strict=True))
    state, kept = optimizer.state_dict()["subspace"], before[1]["subspace"]
    assert torch.equal(state["residual"], kept["residual"])
    assert torch.equal(state["inverse_hessian"]["matrix"], kept["inverse_hessian"]["matrix"])


def test_a_trial_that_overflows_is_not_accepted() -> None:
    w = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = SubspaceOptimizer([w], SubspaceBasis.of(torch.eye(1, 2)), lr=0.1)
    optimizer.step(lambda: torch.log(w[0] * 1e-3) + w[0] * 2e3)  # the step leads to the logarithm of less than 0
    assert optimizer.trial == 0
    assert w.isfinite().all()


def test_nothing_grows_over_steps() -> None:
    model, optimizer = start()
    train(model, optimizer, range(2))
    before = live_tensors()
    train(model, optimizer, range(2, 12))
    assert live_tensors() <= before


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"rho": 0.0}, ValueError, "rho"),
        ({"rho": 1.0}, ValueError, "rho: found 1.0; give a number below 1"),
        ({"sigma": 1}, ValueError, "sigma"),
        ({"gamma": -0.1}, ValueError, "gamma"),
        ({"lr": float("nan")}, ValueError, "lr"),
        ({"trials": 0}, ValueError, "trials: found 0"),
        ({"trials": True}, ValueError, "trials: found True"),
        ({"line_search": "wolfe"}, ValueError, "'backtracking' and 'parabola'"),
    ],
)
def test_bad_settings(settings: dict[str, Any], error: type[Exception], said: str) -> None:
    model = network()
    with pytest.raises(error, match=said):
        SubspaceOptimizer(model.parameters(), basis(2, weights_of(model)), **settings)


def test_a_basis_of_another_model() -> None:
    model = network()
    with pytest.raises(ValueError, match=rf"spans 9 weights, the parameters have {weights_of(model)}"):
        SubspaceOptimizer(model.parameters(), basis(2, 9))


def test_mixed_precisions_and_several_groups() -> None:
    model = network()
    model[0].half()
    with pytest.raises(IncompatibleError, match=r"torch\.float16 on cpu, torch\.float32 on cpu"):
        SubspaceOptimizer(model.parameters(), basis(2, weights_of(model)))
    groups: Any = [{"params": [p]} for p in network().parameters()]
    with pytest.raises(IncompatibleError, match="several param groups"):
        SubspaceOptimizer(groups, basis(2, weights_of(model)))


def test_a_step_needs_a_closure() -> None:
    _, optimizer = start()
    with pytest.raises(TypeError, match=r"optimizer\.step\(lambda"):
        optimizer.step()


def test_a_state_of_another_subspace_is_refused() -> None:
    model, optimizer = start()
    other = SubspaceOptimizer(model.parameters(), basis(3, weights_of(model)))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="subspace of 3 dimensions, but this one has 5"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="found none"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    assert torch.equal(optimizer.state_dict()["subspace"]["residual"], before["subspace"]["residual"])


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
    optimizer.zero_grad()
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
    other = SubspaceOptimizer(model.parameters(), basis(5, weights_of(model), seed=1), lr=0.01)
    with pytest.raises(ValueError, match="of another basis"):
        other.load_state_dict(state)
    assert other.accepted == 0
    rounded = optimizer.basis.rows[0].clone()
    rounded[0, 0] += 1e-7
    SubspaceOptimizer(model.parameters(), SubspaceBasis.of(rounded), lr=0.01).load_state_dict(state)


def test_sparse_gradients_are_the_dense_ones() -> None:
    ends = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 3))
        optimizer = SubspaceOptimizer(model.parameters(), basis(3, weights_of(model)), lr=0.1)
        words, labels = torch.tensor([[0, 1], [1, 4], [5, 5]]), torch.tensor([0, 1, 2])
        for _ in range(3):
            optimizer.step(lambda: F.cross_entropy(model(words), labels))  # noqa: B023
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
