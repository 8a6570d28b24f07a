from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.optimizers import SHAPES, give_grads, parameters, train
from torchboost.optim import Lamb


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


def test_the_formulas():
    for eps_in_root in [False, True]:
        for maximize in [False, True]:
            for adapt in [False, True]:
                for max_ratio in [10.0, 0.7]:
                    options = {"eps_in_root": eps_in_root, "maximize": maximize, "max_ratio": max_ratio}
                    params = parameters(SHAPES[:4])
                    wanted = reference(params, 5, adapt=adapt, **options)
                    groups = [{"params": params, "adapt": adapt}]
                    train(Lamb(groups, 0.05, (0.8, 0.9), 0.01, 0.1, **options), params, range(5))
                    for param, want in zip(params, wanted, strict=True):
                        torch.testing.assert_close(param.detach().double(), want, rtol=2e-5, atol=2e-6)


def test_the_ratio_is_one_for_weights_or_steps_of_zero():
    zero, still = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    zero.grad, still.grad = torch.ones(3), torch.zeros(3)
    Lamb([zero, still], lr=0.1).step()
    torch.testing.assert_close(zero.detach(), torch.full((3,), -0.1))
    assert torch.equal(still.detach(), torch.ones(3))
