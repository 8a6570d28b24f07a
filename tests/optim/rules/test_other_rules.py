"""Rules without a counterpart in torch: their formulas in float64, and what they refuse."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.optimizers import SHAPES, give_grads, parameters, same, train
from torchboost.errors import IncompatibleError
from torchboost.optim import FTRL, LARS, SGD, GradientPipeline, Lamb, RMSProp, TrustRatio


def test_ftrl_follows_its_formula():
    for power, l1, maximize in itertools.product([-0.5, -0.3, -1.0, 0.0], [0.0, 0.5], [False, True]):
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


def test_a_rate_of_zero_moves_nothing_in_ftrl():
    for zero in [0.0, torch.tensor(0.0)]:
        params = parameters()
        optimizer = FTRL(params, lr=0.1)
        train(optimizer, params, [0])
        before = [param.detach().clone() for param in params]
        optimizer.param_groups[0]["lr"] = zero
        assert same(train(optimizer, params, [1]), before)


def test_complex_weights_are_refused_by_ftrl():
    params = parameters(dtype=torch.complex64)
    give_grads(params, 0)
    with pytest.raises(IncompatibleError, match="real parameters"):
        FTRL(params).step()


def lamb_by_hand(params: list[nn.Parameter], steps: int, **options: Any) -> list[torch.Tensor]:
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


def test_lamb_follows_its_formulas():
    for eps_in_root, maximize, adapt, max_ratio in itertools.product(
        [False, True], [False, True], [False, True], [10.0, 0.7]
    ):
        options = {"eps_in_root": eps_in_root, "maximize": maximize, "max_ratio": max_ratio}
        params = parameters(SHAPES[:4])
        wanted = lamb_by_hand(params, 5, adapt=adapt, **options)
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


def lars_by_hand(params: list[nn.Parameter], steps: int, **options: Any) -> list[torch.Tensor]:
    """The formulas of the documentation in float64."""
    weights = [param.detach().double() for param in params]
    buffers = [torch.zeros_like(weight) for weight in weights]
    for step in range(steps):
        give_grads(params, step)
        for i, param in enumerate(params):
            grad, weight = (-1 if options["maximize"] else 1) * param.grad.double(), weights[i]
            if options["vectors"] or param.ndim > 1:
                ratio = 0.02 * weight.norm() / (grad.norm() + 0.1 * weight.norm() + 0.001)
                ratio = (ratio / 0.05).clamp(max=1.0) if options["clip"] else ratio
                grad = ratio * (grad + 0.1 * weight)
            buffers[i] = 0.9 * buffers[i] + grad
            weights[i] = weight - 0.05 * buffers[i]
    return weights


def test_lars_follows_its_formulas():
    for clip, vectors, maximize in itertools.product([False, True], [False, True], [False, True]):
        params = parameters(SHAPES[:4])
        wanted = lars_by_hand(params, 5, clip=clip, vectors=vectors, maximize=maximize)
        options = {"coefficient": 0.02, "eps": 0.001, "clip": clip, "vectors": vectors, "maximize": maximize}
        train(LARS(params, 0.05, 0.9, 0.1, **options), params, range(5))
        for param, want in zip(params, wanted, strict=True):
            torch.testing.assert_close(param.detach().double(), want, rtol=2e-5, atol=2e-6)


def test_lars_in_front_of_another_optimizer_is_the_same():
    for maximize in [False, True]:
        mine, other = parameters(), parameters()
        lars = LARS(mine, 0.1, 0.9, 0.1, coefficient=0.02, maximize=maximize)
        sgd = torch.optim.SGD(other, 0.1, momentum=0.9, maximize=maximize)
        GradientPipeline(TrustRatio(coefficient=0.02, weight_decay=0.1)).attach(sgd)
        assert same(train(lars, mine, range(4)), train(sgd, other, range(4)))


def test_groups_that_are_not_adapted_by_lars():
    mine, other = parameters(SHAPES[:1]), parameters(SHAPES[:1])
    lars = LARS([{"params": mine, "adapt": False}], lr=0.1, weight_decay=0.1)
    sgd = SGD(other, lr=0.1, momentum=0.9)
    assert same(train(lars, mine, range(3)), train(sgd, other, range(3)))


def test_weights_and_gradients_of_zero_under_lars():
    for lr, clip in itertools.product([0.0, 0.1], [False, True]):
        zero, still = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.ones(3, 2))
        zero.grad, still.grad = torch.ones(3, 2), torch.zeros(3, 2)
        LARS([zero, still], lr=lr, clip=clip, eps=0.0).step()
        torch.testing.assert_close(zero.detach(), torch.full((3, 2), -lr))
        assert torch.equal(still.detach(), torch.ones(3, 2))


def test_own_transforms_come_before_the_ratio_of_lars():
    class Doubled:
        scale_free = True

        def __call__(self, gradients: Any) -> None:
            for grad in gradients.grads:
                grad.mul_(2)

    optimizer = LARS(parameters(), lr=0.1, transforms=(Doubled(),))
    assert [type(transform) for transform in optimizer.transforms] == [Doubled, TrustRatio]


def test_bad_settings_of_lars():
    for options, error in [
        ({"coefficient": 0.0}, ValueError),
        ({"coefficient": "x"}, TypeError),
        ({"eps": -1.0}, ValueError),
        ({"weight_decay": math.nan}, ValueError),
        ({"clip": 1}, TypeError),
        ({"vectors": None}, TypeError),
    ]:
        with pytest.raises(error, match=next(iter(options))):
            TrustRatio(**options)
        with pytest.raises(error, match=next(iter(options))):
            LARS(parameters(), **options)


def test_rmsprop_follows_its_formula():
    for centered, momentum, maximize in itertools.product([False, True], [0.0, 0.9], [False, True]):
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
