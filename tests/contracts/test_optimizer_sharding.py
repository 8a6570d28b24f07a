"""Every optimizer with its state spread over two ranks, and norms over both: torch's ZeRO optimizer, and FSDP2."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import mlp
from tests.support.ranks import run_ranks
from tests.support.wrapped import all_weights, train_share
from torchboost.core.algorithm import Target
from torchboost.errors import IncompatibleError, RankDisagreementError
from torchboost.optim import LARS, SGD, Adam, AdamWeightDecay, Centralize, ClipNorm, Decay, Lamb, Momentum

RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "adam, fused": (Adam, {"lr": 0.01, "fused": True}),
    "adam, nesterov": (Adam, {"lr": 0.01, "nesterov": True, "amsgrad": True}),
    "adam, rates in a list": (Adam, {"lr": [0.01, 0.02, 0.005, 0.01, 0.02, 0.03]}),
    "adam weight decay": (AdamWeightDecay, {"lr": 0.01, "weight_decay": 0.1}),
    "sgd": (SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "momentum": (Momentum, {"lr": 0.05}),
    "lars": (LARS, {"lr": 1.0, "coefficient": 0.02, "weight_decay": 0.01}),
    "lamb": (Lamb, {"lr": 0.01, "weight_decay": 0.01}),
    "adam, pipeline": (Adam, {"lr": 0.01, "transforms": (Decay(0.01), Centralize(), ClipNorm(0.1))}),
    "norm 2": (SGD, {"lr": 0.5, "transforms": (Decay(0.01), ClipNorm(0.1))}),
    "norm 1": (SGD, {"lr": 0.5, "transforms": (ClipNorm(0.1, 1.0),)}),
    "largest": (SGD, {"lr": 0.5, "transforms": (ClipNorm(0.1, math.inf, error_if_nonfinite=True),)}),
    "finite": (SGD, {"lr": 0.5, "transforms": (ClipNorm(0.1),), "nonfinite": "raise"}),
    "clipped, fused": (Adam, {"lr": 0.01, "fused": True, "eps": 0.1, "transforms": (ClipNorm(0.1),)}),
}
LOCAL = set(RULES) - {"lars", "lamb", "adam, pipeline"}
"""Rules that look at one entry at a time, so that a shard can be updated without the rest. Norms are asked for."""
REFUSING: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "before the norm": (SGD, {"lr": 0.1, "transforms": (Decay(0.01), ClipNorm(0.1))}),
    "after the first look": (SGD, {"lr": 0.1, "transforms": (ClipNorm(0.1, error_if_nonfinite=True), Decay(0.01))}),
    "without transforms": (Adam, {"lr": 0.1, "nonfinite": "raise"}),
}


def _built(name: str, params: Any) -> torch.optim.Optimizer:
    rule, options = RULES[name]
    return rule(params, **options)


def _alone(name: str) -> list[float]:
    torch.manual_seed(0)
    model = mlp()
    train_share(Target(model, _built(name, model.parameters())), model, steps=6)
    return all_weights(model)


def _zero(names: list[str]) -> list[list[float]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns about parts of itself

    found = []
    for name in names:
        torch.manual_seed(0)
        model = mlp()
        rule, options = RULES[name]
        wrapped = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=rule, **options)
        train_share(Target(wrapped, optimizer), model, steps=6)
        found.append(all_weights(model))
    return found


def _fsdp(names: list[str]) -> list[list[float]]:
    """Train, and move the state into another optimizer by way of a checkpoint."""
    found = []
    for name in names:
        torch.manual_seed(0)
        model = mlp()
        fully_shard(model)
        optimizer = _built(name, model.parameters())
        train_share(Target(model, optimizer), model, steps=6)
        state = get_optimizer_state_dict(model, optimizer)
        again = _built(name, model.parameters())
        set_optimizer_state_dict(model, again, state)
        for first, second in zip(optimizer.state.values(), again.state.values(), strict=True):
            assert first.keys() == second.keys()
            for key in first:
                assert torch.equal(_local(first[key]), _local(second[key])), (name, key)
        found.append(all_weights(model))
    return found


def _skipped(how: str) -> None:
    """A gradient that is not finite on one rank keeps both from updating."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if how == "zero":
        params: list[Any] = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]  # one per rank
        optimizer: Any = ZeroRedundancyOptimizer(params, optimizer_class=SGD, lr=0.1, nonfinite="skip")
    else:
        model = mlp()
        fully_shard(model)
        params = list(model.parameters())
        optimizer = SGD(params, lr=0.1, nonfinite="skip")
    before = [_local(param.detach()).clone() for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    if how == "zero":
        params[1].grad.fill_(math.inf)
    elif dist.get_rank() == 1:
        _local(params[0].grad).fill_(math.inf)
    optimizer.step()
    assert all(torch.equal(old, _local(param.detach())) for old, param in zip(before, params, strict=True)), how


def _refusing() -> dict[str, list[str]]:
    """One parameter per rank; the gradient of the second is one that its rank refuses, at first."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found: dict[str, list[str]] = {}
    for name, (rule, options) in REFUSING.items():
        params = [nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(3, 2))]
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class=rule, **options)
        answers = found[name] = []
        for sparse, number in ((True, 1.0), (False, 1.0), (False, math.inf), (False, 1.0)):
            params[0].grad = torch.full((4, 2), number)
            params[1].grad = torch.ones(3, 2).to_sparse(1) if sparse else torch.ones(3, 2)
            before = [param.detach().clone() for param in params]
            try:
                optimizer.step()
                answers.append("updated")
            except (IncompatibleError, RankDisagreementError, RuntimeError, FloatingPointError) as error:
                answers.append(f"{type(error).__name__}: {error}")
                assert all(torch.equal(old, new) for old, new in zip(before, params, strict=True))
    return found


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else torch.as_tensor(value)


def _rounded(wrapping: str) -> tuple[list[float], list[float]]:
    """Return the weights of a run with stochastic rounding, and those of the same run with masters."""
    found = []
    for masters in ("stochastic", True):
        torch.manual_seed(0)
        model = mlp().bfloat16()
        wrapped: torch.nn.Module = model
        if wrapping == "fsdp":
            fully_shard(model)
        else:
            wrapped = DistributedDataParallel(model)
        torch.manual_seed(dist.get_rank())  # ranks draw other numbers elsewhere, in dropout for instance
        optimizer = Adam(model.parameters(), lr=0.01, master_weights=masters)
        for step in range(6):
            inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
            wrapped(inputs).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(all_weights(model))
    return found[0], found[1]


def _everything() -> dict[str, Any]:
    rounded = {wrapping: _rounded(wrapping) for wrapping in ("ddp", "fsdp")}
    _skipped("zero")
    _skipped("fsdp")
    return {"rounded": rounded, "zero": _zero(sorted(LOCAL)), "fsdp": _fsdp(sorted(RULES)), "refused": _refusing()}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_ranks(_everything, 2)


@pytest.mark.dist
def test_stochastic_rounding_gives_all_ranks_the_same_weights(trained):
    for wrapping in ("ddp", "fsdp"):
        (first, exact), (second, _) = (answer["rounded"][wrapping] for answer in trained)
        assert first == second, wrapping
        assert first == pytest.approx(exact, abs=0.02), wrapping


@pytest.mark.dist
def test_zero_redundancy_and_fsdp_equal_one_process_and_the_state_survives_a_checkpoint(trained):
    for how, names in (("zero", sorted(LOCAL)), ("fsdp", sorted(RULES))):
        for name, ours, theirs in zip(names, *(answer[how] for answer in trained), strict=True):
            assert ours == theirs, (how, name)
            assert ours == pytest.approx(_alone(name), abs=2e-6), (how, name)


@pytest.mark.dist
def test_a_rank_that_refuses_its_gradients_keeps_no_other_waiting(trained):
    first, second = (answer["refused"] for answer in trained)
    for name in REFUSING:
        assert second[name][0].startswith("IncompatibleError"), name
        assert first[name][0].startswith("RankDisagreementError: rank 1 raised an error"), name
        assert first[name][1] == second[name][1] == first[name][3] == second[name][3] == "updated", name
        assert first[name][2] == second[name][2], name
    assert "FloatingPointError" in first["without transforms"][2]
    assert "RuntimeError" in first["after the first look"][2]
