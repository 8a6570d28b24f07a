from __future__ import annotations

import pytest
import torch

from tests.support.optimizers import SHAPES, give_grads, parameters
from torchboost.errors import IncompatibleError
from torchboost.optim import RMSProp, RMSprop


def test_the_formula_in_float64():
    for centered in [False, True]:
        for momentum in [0.0, 0.9]:
            for maximize in [False, True]:
                options = {"alpha": 0.8, "eps": 0.01, "momentum": momentum, "centered": centered, "maximize": maximize}
                params = parameters(SHAPES[:4])
                weights = [param.detach().double() for param in params]
                square = [torch.ones_like(weight) for weight in weights]
                mean, buffer = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
                optimizer = RMSProp(params, lr=lambda step: 0.1 / (1 + step), weight_decay=0.05, **options)
                for step in range(6):
                    give_grads(params, step)
                    for i, param in enumerate(params):
                        grad = (-1 if maximize else 1) * param.grad.double() + 0.05 * weights[i]
                        square[i] = 0.8 * square[i] + 0.2 * grad**2
                        mean[i] = 0.8 * mean[i] + 0.2 * grad
                        spread = square[i] - (mean[i] ** 2 if centered else 0)
                        buffer[i] = momentum * buffer[i] + 0.1 / (1 + step) * grad / (spread + 0.01).sqrt()
                        weights[i] = weights[i] - buffer[i]
                    optimizer.step()
                for param, weight in zip(params, weights, strict=True):
                    torch.testing.assert_close(param.detach().double(), weight, rtol=1e-5, atol=1e-6)


def test_constant_gradients_keep_the_centered_root_real():
    param = parameters([(100,)])[0]
    optimizer = RMSProp([param], lr=1e-6, alpha=0.5, centered=True, eps=1e-20)
    grad = torch.randn(100)
    for _ in range(200):
        param.grad = grad.clone()
        optimizer.step()
        assert param.isfinite().all()


def test_rmsprop_refuses_before_it_changes_anything():
    params = parameters()
    optimizer = RMSprop(params, capturable=True)
    give_grads(params, 0)
    with pytest.raises(IncompatibleError, match="capturable=True needs parameters on one of"):
        optimizer.step()
    assert not optimizer.state
