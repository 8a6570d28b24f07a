"""Masters in float32: a low-precision run equals a float32 one that is rounded at each step, and stays so."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.optimizers import (
    CASES,
    DISTINCT,
    RULES,
    frozen,
    give_grads,
    parameters,
    same,
    shapes_of,
    train,
    values,
)
from torchboost.errors import IncompatibleError
from torchboost.optim.transforms import Centralize, ClipNorm

LOW = [torch.bfloat16, torch.float16]


def reloaded(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_masters_equal_a_float32_run_that_is_rounded():
    for name in DISTINCT:
        for dtype in LOW:
            equal_a_float32_run(name, dtype)


def equal_a_float32_run(name: str, dtype: torch.dtype) -> None:
    low = parameters(shapes_of(name), dtype=dtype)
    wide = [nn.Parameter(param.detach().float()) for param in low]
    options = {"transforms": (Centralize(), ClipNorm(3.0))} if name in RULES else {}
    optimizer, other = CASES[name](low, master_weights=True, **options), CASES[name](wide, **options)
    for step in range(5):
        give_grads(low, step)
        for param, twin in zip(low, wide, strict=True):
            twin.grad = param.grad.float()
        optimizer.step()
        other.step()
        for param, twin in zip(low, wide, strict=True):
            state, plain = dict(optimizer.state[param]), other.state[twin]
            assert frozen(state.pop("master")) == frozen(twin)
            assert {key: frozen(value) for key, value in state.items()} == {k: frozen(v) for k, v in plain.items()}
            assert frozen(param) == frozen(twin.to(dtype))


def test_masters_resume_bit_identically_from_a_file():
    for name in DISTINCT:
        for dtype in LOW:
            resume_bit_identically(name, dtype)


def resume_bit_identically(name: str, dtype: torch.dtype) -> None:
    params = parameters(shapes_of(name), dtype=dtype)
    optimizer = CASES[name](params, master_weights=True)
    train(optimizer, params, range(3))
    resumed = [nn.Parameter(param.detach().clone()) for param in params]
    other = CASES[name](resumed, master_weights=True)
    other.load_state_dict(reloaded(optimizer.state_dict()))
    kept = [v for state in other.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    train(optimizer, params, range(3, 6))
    train(other, resumed, range(3, 6))
    assert values(other) == values(optimizer)


def test_masters_taken_up_from_a_run_without_them():
    """A checkpoint of torch, or of a run in low precision, has moments in the precision of the parameters."""
    for rule in ["Adam", "AdamWeightDecay", "SGD"]:
        for dtype in LOW:
            params = parameters(shapes_of(rule), dtype=dtype)
            options = {"momentum": 0.9} if rule == "SGD" else {}
            before = RULES[rule](params, lr=0.01, **options)
            train(before, params, range(2))
            state = reloaded(before.state_dict())
            for group in state["param_groups"]:
                del group["master_weights"]
            optimizer = RULES[rule](params, lr=0.01, master_weights=True, **options)
            optimizer.load_state_dict(state)
            train(optimizer, params, [2])
            for param in params:
                assert {v.dtype for v in optimizer.state[param].values()} == {torch.float32}
                assert frozen(param) == frozen(optimizer.state[param]["master"].to(dtype))


def test_turning_masters_off_is_refused():
    for rule in ["Adam", "Lamb", "MixedOptimizer"]:
        params = parameters(dtype=torch.bfloat16)
        optimizer = RULES[rule](params, master_weights=True)
        train(optimizer, params, [0])
        optimizer.param_groups[0]["master_weights"] = False
        before = values(optimizer)
        with pytest.raises(IncompatibleError, match="keep 'master_weights'"):
            train(optimizer, params, [1])
        assert values(optimizer) == before


def test_moments_of_another_precision_are_cast_to_that_of_the_parameter():
    for saved, now in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        params = parameters(dtype=saved)
        optimizer = RULES["Adam"](params)
        train(optimizer, params, [0])
        changed = [nn.Parameter(param.detach().to(now)) for param in params]
        other, theirs = RULES["Adam"](changed), torch.optim.Adam(parameters(dtype=now))
        other.load_state_dict(optimizer.state_dict())
        theirs.load_state_dict(optimizer.state_dict())
        for param, state in zip(changed, theirs.state.values(), strict=True):
            assert {k: frozen(v) for k, v in other.state[param].items()} == {k: frozen(v) for k, v in state.items()}
        train(other, changed, [1])


def test_mixed_precisions_in_one_group():
    for rule in RULES:
        mixed = [*parameters(shapes_of(rule)[:2]), *parameters(shapes_of(rule)[:2], dtype=torch.bfloat16)]
        optimizer = RULES[rule](mixed, lr=0.1, master_weights=True)
        train(optimizer, mixed, range(3))
        assert ["master" in optimizer.state[param] for param in mixed] == [False, False, True, True]
        apart = [*parameters(shapes_of(rule)[:2]), *parameters(shapes_of(rule)[:2], dtype=torch.bfloat16)]
        one, two = RULES[rule](apart[:2], lr=0.1), RULES[rule](apart[2:], lr=0.1, master_weights=True)
        for step in range(3):
            give_grads(apart, step)
            one.step()
            two.step()
        assert same(mixed, apart)


def test_fused_masters_under_grad_scaler():
    """The kernel unscales a float32 copy, so that float16 gradients of a scaled loss do not lose their small values."""
    for rule in ["Adam", "AdamWeightDecay", "SGD", "Momentum"]:
        scaled, plain = (parameters(shapes_of(rule)[:2], dtype=torch.float16) for _ in range(2))
        optimizer, other = (RULES[rule](p, lr=0.01, fused=True, master_weights=True) for p in (scaled, plain))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(4):
            give_grads(plain, step)
            for param, twin in zip(scaled, plain, strict=True):
                param.grad = twin.grad * scaler.get_scale()
            scaler.scale(torch.zeros(()))
            if step == 1:
                scaled[0].grad[0, 0] = float("inf")
            else:
                other.step()
            scaler.step(optimizer)
            scaler.update()
            assert values(optimizer) == values(other), step
