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
from torchboost.optim.adam import Adam
from torchboost.optim.sgd import SGD
from torchboost.optim.shares import all_finite, share_of, stand_in, total_norm
from torchboost.optim.transforms import ClipNorm, Decay

RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "norm 2": (SGD, {"lr": 0.5, "transforms": (Decay(0.01), ClipNorm(0.1))}),
    "norm 1": (SGD, {"lr": 0.5, "transforms": (ClipNorm(0.1, 1.0),)}),
    "largest": (SGD, {"lr": 0.5, "transforms": (ClipNorm(0.1, math.inf, error_if_nonfinite=True),)}),
    "finite": (SGD, {"lr": 0.5, "transforms": (ClipNorm(0.1),), "nonfinite": "raise"}),
    "fused": (Adam, {"lr": 0.01, "fused": True, "eps": 0.1, "transforms": (ClipNorm(0.1),)}),
}
NATIVE = {"native": (Adam, {"lr": 0.01, "native": True, "eps": 0.1, "transforms": (ClipNorm(0.1),)})}


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
    rule, options = (RULES | NATIVE)[name]
    train_share(Target(model, rule(model.parameters(), **options)), model, steps=4)
    return all_weights(model)


def _zero() -> dict[str, list[float]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns about parts of itself

    found = {}
    for name, (rule, options) in (RULES | NATIVE).items():
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


@pytest.mark.dist
@pytest.mark.parametrize("kind", [_zero, _fsdp], ids=["ZeRO", "FSDP2"])
def test_clipping_looks_at_all_ranks(kind):
    first, second = run_ranks(kind, 2)
    assert first.pop("skipped", [3.0, 3.0]) == second.pop("skipped", [3.0, 3.0]) == [3.0, 3.0]
    for name, weights in first.items():
        assert weights == second[name]
        assert weights == pytest.approx(_alone(name), abs=2e-6), name
