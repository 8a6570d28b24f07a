"""Muon equals torch's and a plain form in float64; filters, stacks, exchange of checkpoints, errors."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.optim.rules.test_newton_schulz import plainly
from tests.support.optimizers import give_grads, parameters, same, train
from torchboost.optim.rules import muon
from torchboost.optim.rules.muon import Muon

OPTIONS = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 0.3),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.5]),
        "momentum": st.sampled_from([0.0, 0.5, 0.95]),
        "nesterov": st.booleans(),
        "ns_steps": st.sampled_from([1, 3, 5, 7]),
        "adjust_lr_fn": st.sampled_from([None, "original", "match_rms_adamw"]),
    }
)
SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5)


def by_hand(weights: list[Tensor], steps: int, options: dict[str, Any]) -> list[Tensor]:
    """Muon in float64, written from its definition."""
    weights = [weight.detach().double().clone() for weight in weights]
    averages = [torch.zeros_like(weight) for weight in weights]
    lr, beta = options["lr"], options["momentum"]
    for step in range(steps):
        grads = [nn.Parameter(torch.zeros(weight.shape)) for weight in weights]
        give_grads(grads, step)
        for weight, average, holder in zip(weights, averages, grads, strict=True):
            grad = holder.grad.double()
            average.mul_(beta).add_(grad, alpha=1 - beta)
            direction = (1 - beta) * grad + beta * average if options["nesterov"] else average
            rows, columns = weight.shape
            scale = math.sqrt(max(1, rows / columns))
            if options["adjust_lr_fn"] == "match_rms_adamw":
                scale = 0.2 * math.sqrt(max(rows, columns))
            weight.mul_(1 - lr * options["weight_decay"])
            weight.sub_(lr * scale * plainly(direction, options["ns_steps"]))
    return weights


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes=SHAPES, options=OPTIONS)
def test_equals_its_definition_in_float64(shapes, options):
    params = parameters(shapes)
    wanted = by_hand(params, 3, options)
    train(Muon(params, ns_dtype=torch.float32, **options), params, range(3))
    for ours, theirs in zip(params, wanted, strict=True):
        assert float((ours.detach().double() - theirs).norm()) < 1e-5 * (3 + float(theirs.norm()))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes=SHAPES, options=OPTIONS)
def test_equals_torchs_muon_up_to_the_rounding_of_bfloat16(shapes, options):
    """Each step of torch's form is off by up to a few percent, and of small singular values by more."""
    ours, theirs = parameters(shapes), parameters(shapes)
    start = [param.detach().clone() for param in ours]
    train(Muon(ours, ns_dtype=torch.bfloat16, **options), ours, range(2))
    train(torch.optim.Muon(theirs, **options), theirs, range(2))
    for mine, other, before in zip(ours, theirs, start, strict=True):
        moved = float((other - before).detach().norm())
        assert float((mine - other).detach().norm()) < 0.15 * moved + 1e-5


@pytest.mark.parametrize("back", [False, True], ids=["from torch", "to torch"])
def test_checkpoints_load_both_ways(back):
    ours, theirs = parameters([(6, 4), (4, 9)]), parameters([(6, 4), (4, 9)])
    pair: list[torch.optim.Optimizer] = [torch.optim.Muon(theirs, lr=0.02), Muon(ours, lr=0.5, ns_dtype=torch.bfloat16)]
    params = [theirs, ours]
    if back:
        pair, params = pair[::-1], params[::-1]
        pair[0].param_groups[0]["lr"], pair[1].param_groups[0]["lr"] = 0.02, 0.5
    train(pair[0], params[0], range(3))
    with torch.no_grad():
        for target, source in zip(params[1], params[0], strict=True):
            target.copy_(source)
    pair[1].load_state_dict(copy.deepcopy(pair[0].state_dict()))
    assert pair[1].param_groups[0]["lr"] == 0.02
    for first, second in zip(pair[0].state.values(), pair[1].state.values(), strict=True):
        assert torch.equal(first["momentum_buffer"], second["momentum_buffer"])
    for one, own in zip(pair, params, strict=True):
        train(one, own, [3])
    for one, other in zip(*params, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * 0.1)


def test_a_filter_is_the_matrix_of_its_joined_axes():
    filters, matrices = parameters([(6, 3, 2, 2), (4, 6, 3)]), parameters([(6, 12), (4, 18)])
    with torch.no_grad():
        for matrix, one in zip(matrices, filters, strict=True):
            matrix.copy_(one.flatten(1))
    first, second = Muon(filters, lr=0.1), Muon(matrices, lr=0.1)
    for step in range(3):
        give_grads(filters, step)
        for matrix, one in zip(matrices, filters, strict=True):
            matrix.grad = one.grad.flatten(1).clone()
        first.step()
        second.step()
    assert same([one.flatten(1) for one in filters], matrices)


def test_channels_last_filters_move_as_contiguous_ones():
    plain, last = parameters([(8, 4, 3, 3)]), parameters([(8, 4, 3, 3)])
    last[0].data = last[0].data.to(memory_format=torch.channels_last)
    train(Muon(plain, lr=0.1, ns_dtype=torch.float32), plain, range(3))
    optimizer = Muon(last, lr=0.1, ns_dtype=torch.float32)
    for step in range(3):
        give_grads(last, step)
        last[0].grad = last[0].grad.to(memory_format=torch.channels_last)
        optimizer.step()
    assert last[0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(plain[0], last[0])


def test_a_stack_is_its_matrices():
    stack = parameters([(5, 6, 4)])
    apart = [nn.Parameter(one.detach().clone()) for one in stack[0]]
    first = Muon(stack, lr=0.1, stacked=True, ns_dtype=torch.float32)
    second = Muon(apart, lr=0.1, ns_dtype=torch.float32)
    for step in range(3):
        give_grads(stack, step)
        for one, grad in zip(apart, stack[0].grad, strict=True):
            one.grad = grad.clone()
        first.step()
        second.step()
    torch.testing.assert_close(stack[0], torch.stack(apart), rtol=1e-6, atol=1e-6)


def test_matrices_of_one_shape_are_computed_together(monkeypatch):
    batches: list[tuple[int, ...]] = []
    orthogonalized = muon.orthogonalized

    def noted(matrices: Tensor, *args: Any, **options: Any) -> Tensor:
        batches.append(tuple(matrices.shape))
        return orthogonalized(matrices, *args, **options)

    monkeypatch.setattr(muon, "orthogonalized", noted)
    params = parameters([(4, 6), (6, 4), (4, 6), (4, 6), (2, 2, 3)])
    train(Muon(params), params, [0])
    assert sorted(batches) == [(1, 2, 6), (1, 6, 4), (3, 4, 6)]
    batches.clear()
    monkeypatch.setattr(muon, "PIECE", 50)
    train(Muon(params), params, [0])
    assert sorted(batches) == [(1, 2, 6), (1, 4, 6), (1, 6, 4), (2, 4, 6)]


def test_the_choice_of_precision_is_saved_with_the_state():
    params = parameters([(4, 6)])
    optimizer = Muon(params)
    assert optimizer.param_groups[0]["ns_dtype"] is None
    train(optimizer, params, [0])
    chosen = optimizer.param_groups[0]["ns_dtype"]
    assert chosen is muon.faster_dtype(torch.device("cpu"))
    other = Muon(parameters([(4, 6)]))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["ns_dtype"] is chosen


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"ns_steps": 0}, ValueError, "from 1 to 99"),
        ({"ns_steps": 2.0}, TypeError, "whole number"),
        ({"ns_coefficients": (1.0, 2.0)}, ValueError, "three finite numbers"),
        ({"ns_coefficients": [(1.0, 2.0, 3.0), (1.0, math.nan, 0.0)]}, ValueError, "three finite numbers"),
        ({"ns_coefficients": "quintic"}, TypeError, "three numbers"),
        ({"momentum": 1.0}, ValueError, "below 1"),
        ({"adjust_lr_fn": "rms"}, ValueError, "'match_rms_adamw'"),
        ({"ns_dtype": torch.float16}, ValueError, "torch.bfloat16"),
        ({"stacked": 1}, TypeError, "stacked"),
    ],
)
def test_options_that_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        Muon(parameters([(3, 2)]), **options)


def test_vectors_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"shape \(4,\).*muon_groups\(model\)"):
        Muon(nn.Linear(3, 4).parameters())
    with pytest.raises(ValueError, match="real matrices"):
        Muon([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])


def test_coefficients_per_iteration_decide_the_number_of_iterations():
    one, other = parameters([(4, 6)]), parameters([(4, 6)])
    train(Muon(one, ns_coefficients=[muon.QUINTIC] * 3, ns_dtype=torch.float32), one, range(2))
    train(Muon(other, ns_steps=3, ns_dtype=torch.float32), other, range(2))
    assert same(one, other)
