"""Freezing against the reference: index sequences, nested groups, and training.

The reference keeps one optimizer with its own momentum per group, and torchboost one in all, so their weights agree
up to the first update at which that matters; from there on a loop by hand in ``tests/compat`` is the judge.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost import BoostTrainOneStepCell, FreezeOpt, GradientFreeze, NoEffectWarning, WithLoss

TORCH_NAMES = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}
TRAINED = ["freeze_train", "freezeopt_lr_list"]
FAULT = "freeze_train_decay_quirk"  # of the reference, which switches decay on silently


def test_index_sequences_equal_the_oracle(oracle):
    cases = oracle["freeze_index_sequence"].meta["expected"]
    for case in cases:
        settings = (case["parameter_groups_number"], case["freeze_strategy"], case["freeze_p"], case["total_steps"])
        freeze = GradientFreeze(*settings, seed=case["numpy_seed"])
        assert freeze.generate_freeze_index_sequence(*settings) == case["sequence"]
    assert {case["freeze_strategy"] for case in cases} == {0, 1}


class Named(nn.Module):
    """Holds parameters of the oracle's names: those that the reference treats as vectors are vectors."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = {}
        for position, name in enumerate(names):
            vector = "bn" in name or "bias" in name
            parameter = nn.Parameter(torch.zeros(2) if vector else torch.zeros(2, 2))
            self.register_parameter(f"p{position}", parameter)
            self.names[parameter] = name


def test_groups_equal_the_oracle_and_more_groups_than_units_become_units(oracle):
    more = 0
    for case in oracle["freeze_split_groups"].meta["expected"]:
        net = Named(case["names"])
        freeze = GradientFreeze(1, 0, 0.5, 10)
        if (
            len(case["groups"]) > 1 and case["groups"][0] == case["groups"][1]
        ):  # stride 0: the reference freezes nothing
            more += 1
            with pytest.warns(NoEffectWarning, match="groups were requested"):
                groups = freeze.split_parameters_groups(net, case["groups_number"])
            assert 1 < len(groups) < case["groups_number"]
            assert all(len(after) < len(before) for before, after in pairwise(groups))
            continue
        groups = freeze.split_parameters_groups(net, case["groups_number"])
        assert [[net.names[p] for p in group] for group in groups] == case["groups"]
    assert more == 4


class Net(nn.Module):
    """The network of the training cases."""

    def __init__(self, net: dict[str, int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(net["in_channels"], net["c1"], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(net["c1"])
        self.conv2 = nn.Conv2d(net["c1"], net["c2"], 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(net["c2"])
        self.fc = nn.Linear(net["c2"] * (net["hw"] // 2) ** 2, net["classes"])

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(F.max_pool2d(x, 2))))
        return self.fc(x.flatten(1))


def renamed(name: str) -> str:
    stem, _, last = name.rpartition(".")
    return f"{stem}.{TORCH_NAMES.get(last, last)}"


def build(meta: dict[str, Any], arrays: Any) -> tuple[Net, torch.optim.SGD, list[list[nn.Parameter]]]:
    net = Net(meta["hyper"]["net"])
    state = {renamed(k.removeprefix("init/")): torch.from_numpy(v) for k, v in arrays.items() if k.startswith("init/")}
    assert all(key.endswith("num_batches_tracked") for key in net.load_state_dict(state, strict=False).missing_keys)
    rate = meta["hyper"]["learning_rate"]
    first = rate[0] if isinstance(rate, list) else rate
    optimizer = torch.optim.SGD(net.parameters(), lr=float(np.float32(first)), momentum=meta["hyper"]["momentum"])
    groups = [[net.get_parameter(renamed(name)) for name in group] for group in meta["hyper"]["groups"]]
    return net, optimizer, groups


def rate_at(meta: dict[str, Any], step: int) -> float:
    rate = meta["hyper"]["learning_rate"]
    return float(np.float32(rate[step] if isinstance(rate, list) else rate))


def test_training_equals_the_oracle_until_moments_differ(oracle):
    for name in TRAINED:
        meta, arrays = oracle[name]
        net, optimizer, groups = build(meta, arrays)
        strategy = meta["hyper"]["train_strategy"]
        frozen_opt = FreezeOpt(optimizer, groups, strategy)
        cell = BoostTrainOneStepCell(WithLoss(net, F.cross_entropy), frozen_opt)
        change = next(i for i in range(1, len(strategy)) if strategy[i] != strategy[i - 1])
        for step in range(change):
            frozen_opt.param_groups[0]["lr"] = rate_at(meta, step)
            loss = cell(torch.from_numpy(arrays["x"][step]), torch.from_numpy(arrays["y"][step]).long()).loss
            torch.testing.assert_close(loss, torch.tensor(arrays["loss"][step]), **meta["tolerance"])
            for parameter, value in net.named_parameters():
                key = next(k for k in arrays if k.startswith("param/") and renamed(k[6:]) == parameter)
                torch.testing.assert_close(value.detach(), torch.from_numpy(arrays[key][step]), **meta["tolerance"])
