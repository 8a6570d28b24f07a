from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.optimizers import SHAPES, give_grads, parameters, same, train
from torchboost.errors import IncompatibleError
from torchboost.optim import LARS, SGD, GradientPipeline, TrustRatio


def reference(params: list[nn.Parameter], steps: int, **options: Any) -> list[torch.Tensor]:
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


def test_the_formulas():
    for clip in [False, True]:
        for vectors in [False, True]:
            for maximize in [False, True]:
                params = parameters(SHAPES[:4])
                wanted = reference(params, 5, clip=clip, vectors=vectors, maximize=maximize)
                options = {"coefficient": 0.02, "eps": 0.001, "clip": clip, "vectors": vectors, "maximize": maximize}
                train(LARS(params, 0.05, 0.9, 0.1, **options), params, range(5))
                for param, want in zip(params, wanted, strict=True):
                    torch.testing.assert_close(param.detach().double(), want, rtol=2e-5, atol=2e-6)


def test_in_front_of_another_optimizer_it_is_the_same():
    for maximize in [False, True]:
        mine, other = parameters(), parameters()
        lars = LARS(mine, 0.1, 0.9, 0.1, coefficient=0.02, maximize=maximize)
        sgd = torch.optim.SGD(other, 0.1, momentum=0.9, maximize=maximize)
        GradientPipeline(TrustRatio(coefficient=0.02, weight_decay=0.1)).attach(sgd)
        assert same(train(lars, mine, range(4)), train(sgd, other, range(4)))


def test_groups_that_are_not_adapted_are_left_alone():
    mine, other = parameters(SHAPES[:1]), parameters(SHAPES[:1])
    lars = LARS([{"params": mine, "adapt": False}], lr=0.1, weight_decay=0.1)
    sgd = SGD(other, lr=0.1, momentum=0.9)
    assert same(train(lars, mine, range(3)), train(sgd, other, range(3)))


def test_weights_and_gradients_of_zero():
    for lr in [0.0, 0.1]:
        for clip in [False, True]:
            zero, still = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.ones(3, 2))
            zero.grad, still.grad = torch.ones(3, 2), torch.zeros(3, 2)
            LARS([zero, still], lr=lr, clip=clip, eps=0.0).step()
            torch.testing.assert_close(zero.detach(), torch.full((3, 2), -lr))
            assert torch.equal(still.detach(), torch.ones(3, 2))


def test_own_transforms_come_before_the_ratio():
    class Doubled:
        scale_free = True

        def __call__(self, gradients: Any) -> None:
            for grad in gradients.grads:
                grad.mul_(2)

    optimizer = LARS(parameters(), lr=0.1, transforms=(Doubled(),))
    assert [type(transform) for transform in optimizer.transforms] == [Doubled, TrustRatio]


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    optimizer = LARS(table.parameters(), lr=0.1)
    with pytest.raises(IncompatibleError, match="TrustRatio needs dense gradients"):
        optimizer.step()
    assert not optimizer.state


def test_bad_settings():
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


def test_settings_are_values():
    assert TrustRatio() == TrustRatio(coefficient=0.001)
    assert hash(TrustRatio(clip=True)) != hash(TrustRatio())
