"""Offloaded Adam by the numbers of the reference: weights, moments and what it decays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.offload import Remote
from torchboost.optim.rules.offload import AdamOffload
from torchboost.optim.transforms import Decay

CASES = ["adam_offload", "adam_offload_class"]
DEFAULTS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


def single(value: float) -> float:
    return float(np.float32(value))


def optimizer_of(kind: type[AdamOffload], meta: dict[str, Any], params: list[nn.Parameter], *, by: str) -> AdamOffload:
    """Build the case's optimizer, with its decay ``by`` a transform or by the rule itself."""
    hyper = DEFAULTS | meta["hyper"]
    decay = single(hyper.get("weight_decay", 0.0))
    # Without groups the reference exempts beta and gamma from decay, here by a group of their own.
    exempt = [entry["name"].endswith(("beta", "gamma")) for entry in meta["params"]]
    key = "coupled_weight_decay" if by == "transform" else "weight_decay"
    groups = [
        {"params": [p for p, e in zip(params, exempt, strict=True) if not e], key: decay},
        {"params": [p for p, e in zip(params, exempt, strict=True) if e], key: 0.0},
    ]
    return kind(
        groups,
        lr=single(hyper["learning_rate"]),
        betas=(single(hyper["beta1"]), single(hyper["beta2"])),
        eps=single(hyper["eps"]),
        nesterov=hyper.get("use_nesterov", False),
        eps_uncorrected=True,
        transforms=(Decay(decay),) if by == "transform" else (),
    )


@pytest.mark.parametrize("kind", [AdamOffload, Remote])
@pytest.mark.parametrize("by", ["transform", "rule"])
@pytest.mark.parametrize("name", CASES)
def test_weights_and_moments_equal_the_oracle(oracle, name, by, kind):
    meta, arrays = oracle[name]
    params = [nn.Parameter(torch.from_numpy(arrays[f"p{i}.init"].copy())) for i in range(len(meta["params"]))]
    optimizer = optimizer_of(kind, meta, params, by=by)
    for step in range(meta["steps"]):
        for i, param in enumerate(params):
            param.grad = torch.from_numpy(arrays[f"p{i}.grad"][step].copy())
        optimizer.step()
        for i, param in enumerate(params):
            state = optimizer.state[param]
            got = {"param": param.detach(), "m": state["exp_avg"], "v": state["exp_avg_sq"]}
            for key, value in got.items():
                torch.testing.assert_close(value, torch.from_numpy(arrays[f"p{i}.{key}"][step]), **meta["tolerance"])
