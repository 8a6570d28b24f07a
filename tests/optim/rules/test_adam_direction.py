"""The direction from lists of tensors against the formulas in float64, with every variant, and for complex numbers."""

from __future__ import annotations

import pytest
import torch

from torchboost.optim.rules.adam_direction import adam_directions, as_real, rooted_directions
from torchboost.optim.rules.base import Batch


def batch(steps: int = 2) -> Batch:
    torch.manual_seed(0)
    shapes = [(3, 2), (4,)]
    states = [
        {
            "step": torch.tensor(float(steps)),
            "exp_avg": torch.randn(shape),
            "exp_avg_sq": torch.rand(shape),
            "max_exp_avg_sq": torch.rand(shape),
        }
        for shape in shapes
    ]
    return Batch([torch.randn(shape) for shape in shapes], [torch.randn(shape) for shape in shapes], states)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("eps_uncorrected", [False, True])
def test_the_formulas(nesterov, amsgrad, bias_correction, eps_uncorrected):
    group = {"betas": (0.8, 0.9), "eps": 0.01, "nesterov": nesterov, "amsgrad": amsgrad}
    group |= {"bias_correction": bias_correction, "eps_uncorrected": eps_uncorrected}
    given, wanted = batch(), []
    for grad, state in zip(given.grads, given.states, strict=True):
        grad, m, v = grad.double(), state["exp_avg"].double(), state["exp_avg_sq"].double()
        m, v = 0.8 * m + 0.2 * grad, 0.9 * v + 0.1 * grad**2
        if amsgrad:
            v = torch.maximum(v, state["max_exp_avg_sq"].double())
        ahead = 0.8 * m + 0.2 * grad if nesterov else m
        first, second = (1 - 0.8**3, 1 - 0.9**3) if bias_correction else (1.0, 1.0)
        root = (v.sqrt() + 0.01) / second**0.5 if eps_uncorrected else (v / second).sqrt() + 0.01
        wanted.append(ahead / first / root)
    for found, want in zip(adam_directions(group, given), wanted, strict=True):
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)
    assert all(state["step"] == 3 for state in given.states)


def test_epsilon_inside_the_root():
    given = batch(steps=4)
    for found, state in zip(rooted_directions({"betas": (0.8, 0.9), "eps": 0.01}, given), given.states, strict=True):
        m, v = state["exp_avg"].double() / (1 - 0.8**4), state["exp_avg_sq"].double() / (1 - 0.9**4)
        torch.testing.assert_close(found.double(), m / (v + 0.01).sqrt(), rtol=1e-5, atol=1e-6)


def test_complex_tensors_are_pairs_of_real_ones():
    one = torch.randn(3, dtype=torch.complex64)
    state = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(one)}
    real = as_real(Batch([one], [one.clone()], [state]), ("exp_avg",))
    assert real.params[0].shape == real.states[0]["exp_avg"].shape == (3, 2)
    real.params[0].zero_()
    assert not one.any()  # the same memory
    plain = batch()
    assert as_real(plain, ("exp_avg",)) is plain
