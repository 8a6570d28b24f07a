from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchboost.algorithms.dim_reduce.quasi_newton import InverseHessian


def positive(k: int, seed: int) -> torch.Tensor:
    a = torch.randn(k, k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return a @ a.T + 0.1 * torch.eye(k, dtype=torch.float64)


@given(st.integers(1, 6), st.integers(0, 1000))
def test_an_update_makes_the_estimate_map_the_change_to_the_step(k: int, seed: int) -> None:
    hessian, g = positive(k, seed), torch.randn(k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    estimate = InverseHessian(k)
    step = 0.3 * estimate.direction(g)
    estimate.accept(step)
    change = hessian @ step
    estimate.direction(g + change)
    torch.testing.assert_close(estimate.matrix @ change, step)
    torch.testing.assert_close(estimate.matrix, estimate.matrix.T)
    assert torch.linalg.eigvalsh(estimate.matrix).min() > 0


def test_exact_steps_on_a_quadratic_find_the_inverse_hessian() -> None:
    k = 5
    hessian = positive(k, 3)
    x = torch.ones(k, dtype=torch.float64)
    estimate = InverseHessian(k)
    for _ in range(k + 1):
        g = hessian @ x
        d = estimate.direction(g)
        step = d * (-(g @ d) / (d @ hessian @ d))
        estimate.accept(step)
        x = x + step
    estimate.direction(hessian @ x)
    torch.testing.assert_close(x, torch.zeros_like(x), rtol=0, atol=1e-9)
    torch.testing.assert_close(estimate.matrix @ hessian, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-5)


def test_a_step_that_changes_nothing_teaches_nothing() -> None:
    estimate = InverseHessian(2)
    g = torch.tensor([1.0, 2.0], dtype=torch.float64)
    estimate.accept(estimate.direction(g))
    estimate.direction(g)
    assert torch.equal(estimate.matrix, torch.eye(2, dtype=torch.float64))


def test_rejecting_restores_estimate_and_gradient_but_not_the_last_step() -> None:
    estimate = InverseHessian(2)
    first, second, third = torch.tensor([[3.0, 1.0], [1.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    estimate.accept(estimate.direction(first))
    before = estimate.state_dict()
    estimate.direction(second)
    assert not torch.equal(estimate.matrix, before["matrix"])
    estimate.reject()
    after = estimate.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)
    direct = InverseHessian(2)
    direct.load_state_dict(before)
    assert torch.equal(estimate.direction(third), direct.direction(third))


def test_the_very_first_direction_may_be_rejected() -> None:
    estimate = InverseHessian(1)
    g = torch.ones(1, dtype=torch.float64)
    estimate.direction(g)
    estimate.reject()
    assert torch.equal(estimate.direction(3 * g), -3 * g)


def test_state_of_another_size_is_refused() -> None:
    estimate = InverseHessian(3)
    with pytest.raises(ValueError, match=r"subspace of 2 dimensions, but this one has 3"):
        estimate.load_state_dict(InverseHessian(2).state_dict())
    assert estimate.matrix.shape == (3, 3)
