from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.optimizers import SHAPES, give_grads, parameters, same, train
from torchboost.errors import IncompatibleError
from torchboost.optim import FTRL


def test_the_formula_in_float64():
    for power in [-0.5, -0.3, -1.0, 0.0]:
        for l1 in [0.0, 0.5]:
            for maximize in [False, True]:
                params = parameters(SHAPES[:4])
                weights = [param.detach().double() for param in params]
                total = [torch.full_like(weight, 0.2) for weight in weights]
                linear = [torch.zeros_like(weight) for weight in weights]
                options = {"lr_power": power, "l1": l1, "l2": 0.02, "weight_decay": 0.03, "maximize": maximize}
                optimizer = FTRL(params, lr=[0.3, 0.2, 0.1, 0.1, 0.1], initial_accumulator_value=0.2, **options)
                for step, lr in enumerate([0.3, 0.2, 0.1, 0.1, 0.1]):
                    give_grads(params, step)
                    for i, param in enumerate(params):
                        grad = (-1 if maximize else 1) * param.grad.double() + 0.03 * weights[i]
                        after = total[i] + grad**2
                        linear[i] = linear[i] + grad - (after**-power - total[i] ** -power) / lr * weights[i]
                        total[i] = after
                        moved = (linear[i].sign() * l1 - linear[i]) / (after**-power / lr + 2 * 0.02)
                        weights[i] = torch.where(linear[i].abs() <= l1, 0.0, moved)
                    optimizer.step()
                for param, weight in zip(params, weights, strict=True):
                    torch.testing.assert_close(param.detach().double(), weight, rtol=1e-4, atol=1e-5)


def test_l1_makes_most_weights_of_useless_inputs_exactly_zero():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 20, generator=generator)
    targets = inputs[:, :3] @ torch.tensor([1.0, -2.0, 3.0]) + 0.1 * torch.randn(200, generator=generator)
    weight = nn.Parameter(torch.zeros(20))
    optimizer = FTRL([weight], lr=0.5, l1=2.0)
    for _ in range(200):
        optimizer.zero_grad()
        ((inputs @ weight - targets) ** 2).mean().backward()
        optimizer.step()
    assert (weight[:3].abs() > 0.5).all()
    assert (weight[3:] == 0).sum() >= 10
    assert weight[3:].abs().max() < 0.05


def test_a_rate_of_zero_moves_nothing():
    for zero in [0.0, torch.tensor(0.0)]:
        params = parameters()
        optimizer = FTRL(params, lr=0.1)
        train(optimizer, params, [0])
        before = [param.detach().clone() for param in params]
        optimizer.param_groups[0]["lr"] = zero
        assert same(train(optimizer, params, [1]), before)


def test_complex_weights_are_refused():
    params = parameters(dtype=torch.complex64)
    give_grads(params, 0)
    with pytest.raises(IncompatibleError, match="real parameters"):
        FTRL(params).step()
