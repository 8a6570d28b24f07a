"""The published recursion in float64, both modes, BatchNorm, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from tests.support.optimizers import give_grads, parameters, same, train, values
from torchboost.errors import IncompatibleError
from torchboost.optim import ScheduleFreeAdamW, ScheduleFreeSGD

RULES = [ScheduleFreeAdamW, ScheduleFreeSGD]
OPTIONS = [{}, {"weight_decay": 0.1}, {"warmup_steps": 4, "weight_decay": 0.1}, {"maximize": True}]


def by_hand(rule: type, weights: list[Tensor], steps: int, lr: float, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return ``y`` and ``x`` after some steps, from the paper's three sequences in float64."""
    start = [weight.detach().double().clone() for weight in weights]
    x, y, z = ([one.clone() for one in start] for _ in range(3))
    squares, total, beta = [torch.zeros_like(one) for one in start], 0.0, 0.9
    for step in range(steps):
        holders = [nn.Parameter(torch.zeros(one.shape)) for one in start]
        give_grads(holders, step)
        rate = lr * min(1.0, (step + 1) / max(1, options.get("warmup_steps", 0)))
        total += max(rate, 0.0) ** 2
        share = rate**2 / total
        for i, holder in enumerate(holders):
            grad = holder.grad.double() * (-1 if options.get("maximize") else 1)
            if rule is ScheduleFreeAdamW:
                squares[i] = 0.999 * squares[i] + 0.001 * grad**2
                grad = grad / ((squares[i] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
            z[i] = z[i] - rate * (grad + options.get("weight_decay", 0.0) * y[i])
            x[i] = (1 - share) * x[i] + share * z[i]
            y[i] = beta * x[i] + (1 - beta) * z[i]
    return y, x


def test_equals_the_three_sequences_of_the_paper():
    for options, rule in itertools.product(OPTIONS, RULES):
        params = parameters()
        y, x = by_hand(rule, params, 8, 0.05, options)
        optimizer = rule(params, lr=0.05, **options)
        train(optimizer, params, range(8))
        for found, wanted in zip(params, y, strict=True):
            torch.testing.assert_close(found.detach().double(), wanted, rtol=1e-5, atol=1e-5)
        optimizer.eval()
        for found, wanted in zip(params, x, strict=True):
            torch.testing.assert_close(found.detach().double(), wanted, rtol=1e-5, atol=1e-5)


def test_modes_are_explicit_and_reversible():
    for rule in RULES:
        params = parameters()
        optimizer = rule(params, lr=0.05)
        optimizer.eval()  # before the first step the three sequences are one
        assert same(params, parameters())
        optimizer.train()
        train(optimizer, params, range(3))
        training = [param.detach().clone() for param in params]
        optimizer.eval()
        averaged = [param.detach().clone() for param in params]
        assert not same(training[:1], averaged[:1])
        give_grads(params, 3)
        before = values(optimizer)
        with pytest.raises(RuntimeError, match=r"evaluation mode.*optimizer.train\(\)"):
            optimizer.step()
        assert values(optimizer) == before
        optimizer.eval()
        assert same(params, averaged)
        optimizer.train()
        optimizer.train()
        for param, wanted in zip(params, training, strict=True):
            torch.testing.assert_close(param.detach(), wanted, rtol=1e-6, atol=1e-6)


def test_a_file_saved_in_evaluation_mode_continues():
    for rule in RULES:
        params = parameters()
        optimizer = rule(params, lr=0.05)
        train(optimizer, params, range(3))
        optimizer.eval()
        state, weights = copy.deepcopy(optimizer.state_dict()), [nn.Parameter(p.detach().clone()) for p in params]
        other = rule(weights, lr=0.05)
        other.load_state_dict(state)
        with pytest.raises(RuntimeError, match="evaluation mode"):
            other.step()
        for one in (optimizer, other):
            one.train()
        assert same(train(optimizer, params, range(3, 6)), train(other, weights, range(3, 6)))


def test_schedules_are_refused_with_the_way_out():
    for rule, rate in itertools.product(RULES, [[0.1, 0.2], lambda update: 0.1]):
        with pytest.raises(ValueError, match=r"found a schedule.*set warmup_steps"):
            rule(parameters(), lr=rate)
        params = parameters()
        optimizer = rule(params[:1], lr=0.1)
        with pytest.raises(ValueError, match="found a schedule"):
            optimizer.add_param_group({"params": params[1:], "lr": rate})
        assert len(optimizer.param_groups) == 1


def test_a_scheduler_is_refused_at_the_step():
    for rule in RULES:
        params = parameters()
        optimizer = rule(params, lr=0.1)
        StepLR(optimizer, 2)
        give_grads(params, 0)
        before = values(optimizer)
        with pytest.raises(RuntimeError, match=r"scheduler is attached to ScheduleFree.*leave the scheduler out"):
            optimizer.step()
        assert values(optimizer) == before


def test_a_parameter_that_starts_late_has_its_own_average():
    for rule in RULES:
        first, late = parameters([(3, 2)]), parameters([(4,)], seed=1)
        alone = parameters([(4,)], seed=1)
        optimizer, other = rule([*first, *late], lr=0.1), rule(alone, lr=0.1)
        for step in range(6):
            train(optimizer, first if step < 3 else [*first, *late], [step])
            if step < 3:
                late[0].grad = None
                continue
            alone[0].grad = late[0].grad.clone()
            other.step()
        assert same(late, alone)


def test_parameters_with_as_many_updates_at_other_rates_have_their_own_averages():
    for rule in RULES:
        first, late = parameters([(3, 2)]), parameters([(4,)], seed=1)
        alone = parameters([(4,)], seed=1)
        optimizer, other = rule([*first, *late], lr=0.1), rule(alone, lr=0.4)
        for step in range(8):
            optimizer.param_groups[0]["lr"] = 0.1 if step < 3 else 0.4
            for param in (*first, *late):
                param.grad = None
            with pytest.warns(UserWarning, match="changed by hand") if step == 3 else contextlib.nullcontext():
                train(optimizer, first if step < 3 else late if step < 6 else [*first, *late], [step])
            if step >= 3:
                alone[0].grad = late[0].grad.clone()
                other.step()
        assert optimizer.state[first[0]]["step"] == 5
        assert same(late, alone)


def test_a_rate_that_is_changed_by_hand_warns_once():
    for rule in RULES:
        params = parameters()
        optimizer = rule(params, lr=0.1, warmup_steps=3)
        train(optimizer, params, range(4))
        optimizer.param_groups[0]["lr"] = 0.2
        with pytest.warns(UserWarning, match=rf"{rule.__name__}: .* from 0.1 to 0.2.*warmup_steps") as said:
            train(optimizer, params, range(4, 6))
        optimizer.param_groups[0]["lr"] = 0.3
        train(optimizer, params, [6])
        assert len(said) == 1


def test_a_rate_of_zero_and_one_of_a_checkpoint_are_not_changed_by_hand():
    for rule in RULES:
        params = parameters()
        optimizer = rule(params, lr=0.1)
        for rate in (0.0, 0.1, 0.0, 0.1):
            optimizer.param_groups[0]["lr"] = rate
            train(optimizer, params, [0])
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = 0.3
        optimizer.load_state_dict(saved)
        train(optimizer, params, [1])
        assert optimizer.state[params[0]]["largest_lr"] == pytest.approx(0.3)


def test_options_that_are_refused():
    with pytest.raises(ValueError, match="above 0 and below 1"):
        ScheduleFreeSGD(parameters(), momentum=0.0)
    with pytest.raises(ValueError, match="above 0 and below 1"):
        ScheduleFreeAdamW(parameters(), betas=(0.0, 0.99))
    with pytest.raises(ValueError, match="warmup_steps"):
        ScheduleFreeAdamW(parameters(), warmup_steps=-1)
    with pytest.raises(TypeError, match="warmup_steps"):
        ScheduleFreeAdamW(parameters(), warmup_steps=0.5)


def test_masters_hold_both_modes():
    for dtype in [torch.bfloat16, torch.float16]:
        params = parameters(dtype=dtype)
        optimizer = ScheduleFreeAdamW(params, lr=0.01, master_weights=True)
        train(optimizer, params, range(3))
        masters = [optimizer.state[param]["master"].clone() for param in params]
        optimizer.eval()
        for param in params:
            assert torch.equal(param, optimizer.state[param]["master"].to(dtype))
        optimizer.train()
        for param, master in zip(params, masters, strict=True):
            torch.testing.assert_close(optimizer.state[param]["master"], master, rtol=1e-6, atol=1e-6)
            assert torch.equal(param, optimizer.state[param]["master"].to(dtype))


def test_weights_that_were_loaded_are_taken_by_the_master():
    for rule, training in itertools.product(RULES, [True, False]):
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            weight = nn.Parameter(torch.ones(2, dtype=dtype))
            optimizer = rule([weight], lr=0.1, master_weights=True)
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            if not training:
                optimizer.eval()
            with torch.no_grad():
                weight.fill_(5.0)
            optimizer.eval() if training else optimizer.train()
            found.append(weight.detach().float())
        torch.testing.assert_close(*found, rtol=1e-2, atol=0.0)


def test_complex_parameters_are_refused():
    for rule in RULES:
        weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        weight.grad = torch.ones_like(weight)
        with pytest.raises(IncompatibleError, match="needs real parameters"):
            rule([weight], lr=0.1).step()
        assert torch.equal(weight.detach(), torch.ones(2, dtype=torch.complex64))
