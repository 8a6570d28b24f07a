"""Files that were written once and are kept: every later version goes on from them with the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tests.fixtures.optimizers.write import FOLDER, NAMES, STEPS, go_on, rate
from tests.support.models import mlp
from tests.support.optimizers import CASES, RULES, SCHEDULED, rate_for
from tests.support.trajectories import snapshot
from torchboost.optim.transforms import Centralize, Decay

OPTIONS = ({}, {"lr": lambda update: 0.1}, {"transforms": (Decay(0.1), Centralize())})
FILES = sorted(FOLDER.glob("*.pt"))


def test_an_old_file_goes_on_to_the_same_numbers():
    for file in FILES:
        kept = torch.load(file, weights_only=True)
        params = [nn.Parameter(weight.clone()) for weight in kept["weights"]]
        build = CASES.get(file.stem, CASES["Adam-default"])  # "Adam-native" was a form of Adam, which is gone
        optimizer = build(params, lr=rate_for(file.stem, rate))
        optimizer.load_state_dict(kept["optimizer"])
        assert optimizer.param_groups[0].get("updates", STEPS) == STEPS
        for got, want in zip(go_on(optimizer, params, range(STEPS, 2 * STEPS)), kept["expected"], strict=True):
            # Another processor may round the last bits differently.
            loose = 100 if file.stem.startswith(("Muon", "Mixed")) else 1  # small singular values are enlarged
            torch.testing.assert_close(got, want, rtol=1e-6 * loose, atol=1e-7 * loose)


def test_every_rule_has_a_small_file():
    assert {file.stem for file in FILES} == {*NAMES, "Adam-native"}
    assert {file.stem.split("-")[0] for file in FILES} == set(RULES)
    assert all(file.stat().st_size < 8192 for file in FILES)


def without_biases() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))


def test_the_distributed_checkpoint_functions_leave_weights_alone():
    """They step an optimizer without state, at a rate of 0 and with gradients of 0, so that it has one."""
    for name in RULES:
        for options in OPTIONS:
            leave_weights_alone(name, options)


def leave_weights_alone(name: str, options: dict[str, Any]) -> None:
    if "lr" in options and name not in SCHEDULED:
        options = {"weight_decay": lambda update: 0.1}
    model, other = (without_biases() if name.startswith("Muon") else mlp() for _ in range(2))
    other.load_state_dict(model.state_dict())
    before = snapshot(model)
    optimizer = RULES[name](model.parameters(), **options)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    trained = RULES[name](other.parameters(), **options)
    for param in other.parameters():
        param.grad = torch.ones_like(param)
    trained.step()
    optimizer.zero_grad()
    template = get_optimizer_state_dict(model, optimizer)
    assert snapshot(model) == before
    saved = get_optimizer_state_dict(other, trained)
    assert template["state"].keys() == saved["state"].keys()
    fresh = RULES[name](model.parameters(), **options)
    set_optimizer_state_dict(model, fresh, copy.deepcopy(saved))
    assert snapshot(model) == before
    model.load_state_dict(other.state_dict())
    for both in (model, other):
        for param in both.parameters():
            param.grad = torch.full_like(param, 0.5)
    fresh.step()
    trained.step()
    assert snapshot(model) == snapshot(other)
