from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.optimizers import SHAPES, frozen, give_grads, parameters, train
from torchboost.optim.rules.adam import Adam
from torchboost.optim.rules.lamb import Lamb


def reference(params: list[nn.Parameter], steps: int, **options: Any) -> list[torch.Tensor]:
    """The formulas of the documentation in float64."""
    beta1, beta2, eps = 0.8, 0.9, 0.01
    weights = [param.detach().double() for param in params]
    mean, square = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for step in range(steps):
        give_grads(params, step)
        for i, param in enumerate(params):
            grad, weight = (-1 if options["maximize"] else 1) * param.grad.double(), weights[i]
            mean[i] = beta1 * mean[i] + (1 - beta1) * grad
            square[i] = beta2 * square[i] + (1 - beta2) * grad**2
            first, second = mean[i] / (1 - beta1 ** (step + 1)), square[i] / (1 - beta2 ** (step + 1))
            direction = first / (second.sqrt() + eps) + 0.1 * weight
            measured = first / (second + eps).sqrt() + 0.1 * weight if options["eps_in_root"] else direction
            ratio = (weight.norm() / measured.norm()).clamp(max=options["max_ratio"]) if options["adapt"] else 1.0
            weights[i] = weight - 0.05 * ratio * direction
    return weights


@pytest.mark.parametrize("eps_in_root", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("adapt", [False, True])
@pytest.mark.parametrize("max_ratio", [10.0, 0.7])
def test_the_formulas(eps_in_root, maximize, adapt, max_ratio):
    options = {"eps_in_root": eps_in_root, "maximize": maximize, "max_ratio": max_ratio}
    params = parameters(SHAPES[:4])
    wanted = reference(params, 5, adapt=adapt, **options)
    groups = [{"params": params, "adapt": adapt}]
    train(Lamb(groups, 0.05, (0.8, 0.9), 0.01, 0.1, **options), params, range(5))
    for param, want in zip(params, wanted, strict=True):
        torch.testing.assert_close(param.detach().double(), want, rtol=2e-5, atol=2e-6)


def test_without_adaptation_it_is_adam():
    mine, other = parameters(), parameters()
    train(Lamb([{"params": mine, "adapt": False}], lr=0.01, eps=1e-8), mine, range(5))
    train(Adam(other, lr=0.01), other, range(5))
    for ours, theirs in zip(mine, other, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_ratio_is_one_for_weights_or_steps_of_zero():
    zero, still = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    zero.grad, still.grad = torch.ones(3), torch.zeros(3)
    Lamb([zero, still], lr=0.1).step()
    torch.testing.assert_close(zero.detach(), torch.full((3,), -0.1))
    assert torch.equal(still.detach(), torch.ones(3))


def test_a_complex_weight_is_two_weights():
    both = parameters([(4,)], dtype=torch.complex64)
    real = [nn.Parameter(torch.view_as_real(both[0].detach()).clone())]
    left, right = (Lamb(p, lr=0.1, weight_decay=0.1) for p in (both, real))
    for step in range(3):
        give_grads(both, step)
        real[0].grad = torch.view_as_real(both[0].grad).clone()
        left.step()
        right.step()
    assert frozen(torch.view_as_real(both[0].detach())) == frozen(real[0])


@pytest.mark.parametrize("bad", [-1.0, "x", None, float("nan")])
def test_bad_ratios(bad):
    with pytest.raises((TypeError, ValueError), match="max_ratio"):
        Lamb(parameters(), max_ratio=bad)
