"""The levers of a model that FSDP2 shards are on as the rules say: a pass of a trial would wait for other ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torchboost
from tests.support.ranks import run_ranks
from tests.support.wrapped import all_weights
from torchboost.errors import NoEffectWarning

CONFIG = {"compile": False, "grad_freeze": False, "less_bn": False, "gradient_centralization": False}


class Net(nn.Module):
    """Has a BatchNorm, dropout and a counter that a pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten())
        self.head = nn.Linear(8 * 36, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.body(x))


def too_early() -> str:
    model, said = Net(), list[str]()
    extra = {"extra": {**CONFIG, "channels_last": False}}
    boosted = torchboost.boost(model, torch.optim.AdamW(model.parameters()), total_steps=10_000, config=extra)
    fully_shard(model)
    model(torch.zeros(1, 3, 8, 8)).sum().backward()
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            boosted.optimizer.step()
        said += [str(warning.message) for warning in caught if warning.category is NoEffectWarning]
    return " | ".join(said)


@pytest.mark.dist
def test_an_optimizer_that_sharding_has_cut_off_is_said_once():
    (said,) = set(run_ranks(too_early, 2))
    assert said.startswith("none of the 6 parameters of the optimizer belongs to the model, a FSDPNet; build")
    assert said.endswith("after fully_shard if that shards it. This step trains nothing of it.")


def trained(part: bool, autocast: bool) -> tuple[list[float], list[float], str]:
    """Train with the root sharded, or with one of its parts alone inside a root that is not boosted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 256), nn.Linear(256, 256)), nn.Linear(256, 2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if autocast else None)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = {"extra": {**CONFIG, "autocast": {}} if autocast else CONFIG}  # whatever the speed of bfloat16 is here
    pair = model[0] if part else model
    boosted = torchboost.boost(pair, optimizer, total_steps=10_000, config=config, calibrate=1.0)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(3, 4)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, all_weights(model), boosted.explain()


def trained_each() -> list[tuple[list[float], list[float], str]]:
    return [trained(*case) for case in ((False, False), (True, False), (False, True))]


@pytest.mark.dist
def test_nothing_is_measured_and_the_run_goes_on() -> None:
    for whole, part, lowered in run_ranks(trained_each, 2):
        for losses, _, _ in (whole, part, lowered):
            assert losses[2] < losses[0]
        assert "not measured or checked: wrapped by fully_shard before boost" in whole[2]
        assert "fused_optimizer" in whole[2].partition("left out")[0]
        assert "not measured" in part[2] or "not checked" in part[2]
        assert "FSDP2 computes in bfloat16 itself, by its MixedPrecisionPolicy" in lowered[2]
