"""Transforms between Adam's rule and the weights: their formulas, LAMB as two of them, resuming, errors."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.optimizers import parameters, same, train, values
from torchboost.optim import Adam, AdamW, AddDecay, Cautious, Lamb, ScaleByTrustRatio, Updates


def updates(**group: Any) -> Updates:
    torch.manual_seed(0)
    params = [torch.randn(4, 3), torch.zeros(5)]
    return Updates(params, [torch.randn(4, 3), torch.randn(5)], [torch.randn(4, 3), torch.randn(5)], group)


def test_cautious_keeps_entries_that_agree_with_the_gradient():
    given = updates()
    before = [update.clone() for update in given.updates]
    Cautious()(given)
    for found, update, grad in zip(given.updates, before, given.grads, strict=True):
        mask = (update * grad > 0).float()
        torch.testing.assert_close(found, update * mask / mask.mean())
    against = updates()
    against.grads = [-update for update in against.updates]
    Cautious(least=0.5)(against)
    assert not any(update.any() for update in against.updates)


def test_the_trust_ratio():
    given = updates()
    before = [update.clone() for update in given.updates]
    ScaleByTrustRatio(max_ratio=100.0)(given)
    torch.testing.assert_close(given.updates[0].norm(), given.params[0].norm())
    assert torch.equal(given.updates[1], before[1])  # weights of 0
    ScaleByTrustRatio(max_ratio=1e-3)(given)
    torch.testing.assert_close(given.updates[0].norm(), 1e-3 * given.params[0].norm())
    left = updates(adapt=False)
    ScaleByTrustRatio()(left)
    assert all(map(torch.equal, left.updates, before))


def test_decay_reaches_what_is_measured_too():
    given = updates(weight_decay=0.5)
    before, given.measured = [update.clone() for update in given.updates], [torch.ones(4, 3), torch.ones(5)]
    AddDecay()(given)
    AddDecay(0.25)(given)
    torch.testing.assert_close(given.updates[0], before[0] + 0.75 * given.params[0])
    torch.testing.assert_close(given.measured[0], 1 + 0.75 * given.params[0])


def test_a_transform_that_does_nothing_changes_nothing_but_rounding():
    for kind, options in itertools.product(
        (Adam, AdamW), ({}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.1})
    ):
        plain, other = parameters(), parameters()
        train(kind(plain, **options), plain, range(4))
        train(kind(other, update_transforms=(lambda inputs: None,), **options), other, range(4))
        torch.testing.assert_close(plain, other, rtol=1e-5, atol=1e-6)


def test_lamb_is_adam_with_two_transforms():
    ours, theirs = parameters(), parameters()
    train(Lamb(ours, lr=0.05, eps=1e-6, max_ratio=3.0), ours, range(4))
    chain = (AddDecay(0.0), ScaleByTrustRatio(max_ratio=3.0))
    train(Adam(theirs, lr=0.05, eps=1e-6, update_transforms=chain), theirs, range(4))
    assert same(ours, theirs)


def test_cautious_adamw_by_hand():
    param, weights = nn.Parameter(torch.tensor([1.0, -2.0, 3.0])), torch.tensor([1.0, -2.0, 3.0])
    optimizer = AdamW([param], lr=0.1, weight_decay=0.5, update_transforms=(Cautious(),))
    mean, square = torch.zeros(3), torch.zeros(3)
    for step, grad in enumerate(([1.0, -1.0, 0.5], [-3.0, -1.0, 0.1], [0.2, 2.0, -4.0]), 1):
        param.grad = torch.tensor(grad)
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * param.grad, 0.999 * square + 0.001 * param.grad**2
        update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        mask = (update * param.grad > 0).float()
        weights = weights * (1 - 0.1 * 0.5) - 0.1 * update * mask / mask.mean().clamp(min=1e-3)
        torch.testing.assert_close(param.detach(), weights, rtol=1e-5, atol=1e-6)


def test_it_resumes_and_copies_bit_for_bit():
    for dtype in [torch.float32, torch.bfloat16]:
        options = {"lr": 0.05, "update_transforms": (Cautious(),), "master_weights": True}
        params = parameters(dtype=dtype)
        optimizer = AdamW(params, **options)
        train(optimizer, params, range(3))
        state, weights = copy.deepcopy(optimizer.state_dict()), [nn.Parameter(p.detach().clone()) for p in params]
        twin = copy.deepcopy(optimizer)
        other = AdamW(weights, **options)
        other.load_state_dict(state)
        copied: list[Tensor] = [param for group in twin.param_groups for param in group["params"]]
        for one, own in ((optimizer, params), (other, weights), (twin, copied)):
            train(one, own, range(3, 6))
        assert values(other) == values(optimizer) == values(twin)


def test_what_is_refused():
    with pytest.raises(TypeError, match="give an instance: Cautious"):
        AdamW(parameters(), update_transforms=(Cautious,))
    with pytest.raises(TypeError, match="callable with Updates"):
        AdamW(parameters(), update_transforms=(3,))
    with pytest.raises(ValueError, match="update_transforms: torch has no kernel for it"):
        AdamW(parameters(), update_transforms=(Cautious(),), fused=True)
    for bad in (lambda: Cautious(0.0), lambda: ScaleByTrustRatio(max_ratio=-1.0), lambda: AddDecay(float("nan"))):
        with pytest.raises(ValueError, match=r"least|max_ratio|weight_decay"):
            bad()
