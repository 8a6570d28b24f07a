from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import mlp
from tests.support.ranks import run_ranks
from tests.support.wrapped import all_weights, train_share
from torchboost.core.algorithm import Target
from torchboost.errors import IncompatibleError, RankDisagreementError
from torchboost.optim import SGD, Adam, ClipNorm, Decay
from torchboost.optim.tensors import all_finite, share_of, stand_in, total_norm

RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "norm 2": (SGD, {"lr": 0.5, "transforms": (Decay(0.01), ClipNorm(0.1))}),
    "norm 1": (SGD, {"lr": 0.5, "transforms": (ClipNorm(0.1, 1.0),)}),
    "largest": (SGD, {"lr": 0.5, "transforms": (ClipNorm(0.1, math.inf, error_if_nonfinite=True),)}),
    "finite": (SGD, {"lr": 0.5, "transforms": (ClipNorm(0.1),), "nonfinite": "raise"}),
    "fused": (Adam, {"lr": 0.01, "fused": True, "eps": 0.1, "transforms": (ClipNorm(0.1),)}),
}


def test_one_process_shares_with_nobody():
    assert share_of(SGD(mlp().parameters(), lr=0.1)) is None


def test_norms_and_checks_of_nothing_of_empty_and_of_sparse_gradients():
    empty, table = torch.ones(0, 3), nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    assert total_norm([], 2.0, None) is None
    assert total_norm([empty], math.inf, None) is None
    assert total_norm([empty, torch.tensor([3.0, 4.0])], 2.0, None) == 5
    assert all_finite([], None)
    assert all_finite([empty, table.weight.grad], None)
    assert not all_finite([torch.ones(2), torch.tensor(math.nan)], None)


def test_a_stand_in_takes_no_memory():
    found = stand_in(torch.ones(1000, 1000), torch.bfloat16)
    assert found.shape == (1000, 1000)
    assert found.untyped_storage().nbytes() == 2


def _alone(name: str) -> list[float]:
    torch.manual_seed(0)
    model = mlp()
    rule, options = RULES[name]
    train_share(Target(model, rule(model.parameters(), **options)), model, steps=4)
    return all_weights(model)


def _zero() -> dict[str, list[float]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns about parts of itself

    found = {}
    for name, (rule, options) in RULES.items():
        torch.manual_seed(0)
        model = mlp()
        wrapped = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=rule, **options)
        train_share(Target(wrapped, optimizer), model, steps=4)
        found[name] = all_weights(model)
    found["skipped"] = _skipped(ZeroRedundancyOptimizer)
    return found


def _skipped(kind: Any) -> list[float]:
    """One parameter per rank, and a gradient of the second that is not finite."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer = kind(params, optimizer_class=SGD, lr=0.1, nonfinite="skip")
    for param, grad in zip(params, (1.0, math.inf), strict=True):
        param.grad = torch.full((3,), grad)
    optimizer.step()
    return [float(param.detach().sum()) for param in params]


def _fsdp() -> dict[str, list[float]]:
    found = {}
    for name, (rule, options) in RULES.items():
        torch.manual_seed(0)
        model = mlp()
        fully_shard(model)
        train_share(Target(model, rule(model.parameters(), **options)), model, steps=4)
        found[name] = all_weights(model)
    params = list(model.parameters())
    optimizer = SGD(params, lr=0.1, nonfinite="skip")
    before = all_weights(model)
    for param in params:
        param.grad = torch.ones_like(param)
    if dist.get_rank() == 1:
        local: Any = params[0].grad
        local.to_local().fill_(math.inf)
    optimizer.step()
    assert all_weights(model) == before, "all ranks leave the update out, if one has seen the inf"
    return found


REFUSING: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "before the norm": (SGD, {"lr": 0.1, "transforms": (Decay(0.01), ClipNorm(0.1))}),
    "after the first look": (SGD, {"lr": 0.1, "transforms": (ClipNorm(0.1, error_if_nonfinite=True), Decay(0.01))}),
    "without transforms": (Adam, {"lr": 0.1, "nonfinite": "raise"}),
}


def _refusing() -> dict[str, list[str]]:
    """One parameter per rank; the gradient of the second is one that its rank refuses, at first."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found: dict[str, list[str]] = {}
    for name, (rule, options) in REFUSING.items():
        params = [nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(3, 2))]
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class=rule, **options)
        said = found[name] = []
        for sparse, number in ((True, 1.0), (False, 1.0), (False, math.inf), (False, 1.0)):
            params[0].grad = torch.full((4, 2), number)
            params[1].grad = torch.ones(3, 2).to_sparse(1) if sparse else torch.ones(3, 2)
            before = [param.detach().clone() for param in params]
            try:
                optimizer.step()
                said.append("updated")
            except (IncompatibleError, RankDisagreementError, RuntimeError, FloatingPointError) as error:
                said.append(f"{type(error).__name__}: {error}")
                assert all(torch.equal(old, new) for old, new in zip(before, params, strict=True))
    return found


@pytest.mark.dist
def test_a_rank_that_refuses_its_gradients_keeps_no_other_waiting():
    first, second = run_ranks(_refusing, 2, timeout=60.0)
    for name in REFUSING:
        assert second[name][0].startswith("IncompatibleError"), name
        assert first[name][0].startswith("RankDisagreementError: rank 1 raised an error"), name
        assert first[name][1] == second[name][1] == "updated", name
        assert first[name][2] == second[name][2], name
        assert first[name][3] == second[name][3] == "updated", name
    assert "FloatingPointError" in first["without transforms"][2]
    assert "RuntimeError" in first["after the first look"][2]


@pytest.mark.dist
@pytest.mark.parametrize("kind", [_zero, _fsdp], ids=["ZeRO", "FSDP2"])
def test_clipping_looks_at_all_ranks(kind):
    first, second = run_ranks(kind, 2)
    assert first.pop("skipped", [3.0, 3.0]) == second.pop("skipped", [3.0, 3.0]) == [3.0, 3.0]
    for name, weights in first.items():
        assert weights == second[name]
        assert weights == pytest.approx(_alone(name), abs=2e-6), name
