"""Every optimizer with its state spread over two ranks: torch's ZeRO optimizer, and FSDP2."""

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
from torchboost.errors import IncompatibleError
from torchboost.optim import (
    LARS,
    SGD,
    Adam,
    AdamWeightDecay,
    Centralize,
    ClipNorm,
    Decay,
    GradientPipeline,
    Lamb,
    Momentum,
)

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
    "largest": (SGD, {"lr": 0.5, "transforms": (ClipNorm(0.1, math.inf),)}),
    "finite": (SGD, {"lr": 0.5, "transforms": (ClipNorm(0.1),), "nonfinite": "raise"}),
    "clipped, fused": (Adam, {"lr": 0.01, "fused": True, "eps": 0.1, "transforms": (ClipNorm(0.1),)}),
}
JOINT = ("adam, pipeline", "clipped, fused", "finite", "largest", "norm 1", "norm 2")
"""Rules that look at all gradients together, which a rank of the ZeRO optimizer does not have."""
LOCAL = set(RULES) - {"lars", "lamb", *JOINT}
"""Rules that look at one entry at a time, so that a shard can be updated without the rest."""


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


def _skipped() -> None:
    """A gradient that is not finite on one rank keeps both from updating."""
    model = mlp()
    fully_shard(model)
    params: list[Any] = list(model.parameters())
    optimizer = SGD(params, lr=0.1, nonfinite="skip")
    before = [_local(param.detach()).clone() for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    if dist.get_rank() == 1:
        _local(params[0].grad).fill_(math.inf)
    optimizer.step()
    assert all(torch.equal(old, _local(param.detach())) for old, param in zip(before, params, strict=True))


def _refused() -> None:
    """A rule that looks at all gradients is refused on each rank; a pipeline on the ZeRO optimizer sees them all."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for name in JOINT:
        rule, options = RULES[name]
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class=rule, **options)
        for param in params:
            param.grad = torch.ones(3)
        for _ in range(2):
            with pytest.raises(IncompatibleError, match=r"a part of the parameters, and (ClipNorm|nonf)"):
                optimizer.step()
        assert all(torch.equal(param, torch.ones(3)) for param in params)
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    outer = ZeroRedundancyOptimizer(params, optimizer_class=SGD, lr=0.1)
    GradientPipeline(ClipNorm(1.0)).attach(outer)
    for param in params:
        param.grad = torch.ones(3)
    outer.step()
    assert all(torch.allclose(param, torch.full((3,), 1 - 0.1 / 6**0.5)) for param in params)


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else torch.as_tensor(value)


def _everything() -> dict[str, Any]:
    _skipped()
    _refused()
    return {"zero": _zero(sorted(LOCAL)), "fsdp": _fsdp(sorted(RULES))}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_ranks(_everything, 2)


@pytest.mark.dist
def test_zero_redundancy_and_fsdp_equal_one_process_and_the_state_survives_a_checkpoint(trained):
    for how, names in (("zero", sorted(LOCAL)), ("fsdp", sorted(RULES))):
        for name, ours, theirs in zip(names, *(answer[how] for answer in trained), strict=True):
            assert ours == theirs, (how, name)
            assert ours == pytest.approx(_alone(name), abs=2e-6), (how, name)
