"""Loss scaling by the reference's names: scales, skipped steps and weights of the reference, step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.parity.networks import assert_step, mlp, single
from torchboost import (
    BoostTrainOneStepWithLossScaleCell,
    DynamicLossScale,
    GroupLossScaleManager,
    WithLoss,
)


@pytest.mark.filterwarnings("ignore::torchboost.errors.ScaleCollapseWarning")
def test_scripted_overflows_move_the_scale_as_in_the_reference(oracle):
    meta, _ = oracle["loss_scale_update"]
    assert len(meta["expected"]) == 5
    for case in meta["expected"]:
        param = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([param], lr=1.0)
        manager = DynamicLossScale(case["loss_scale_value"], factor=case["scale_factor"], window=case["scale_window"])
        found = []
        for overflow in case["overflow"]:
            manager.scale(param.sum() * (np.inf if overflow else 0.0)).backward()
            manager.step(optimizer)
            manager.update()
            optimizer.zero_grad()
            found.append(manager.get_scale())
        assert found == case["scale_cell"] == case["scale_manager"]


def test_the_cell_trains_like_the_oracle(oracle):
    for name in ("loss_scale_train_dynamic", "loss_scale_train_fixed"):
        case = oracle[name]
        hyper, arrays = case.meta["hyper"], case.arrays
        layers, named = mlp(case)
        network = WithLoss(layers, F.cross_entropy)
        rate, momentum = single(hyper["learning_rate"]), single(hyper["momentum"])
        optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=momentum)
        sense = (
            torch.tensor(hyper["scale_sense"])
            if name == "loss_scale_train_fixed"
            else DynamicLossScale(hyper["loss_scale_value"], factor=hyper["scale_factor"], window=hyper["scale_window"])
        )
        cell = BoostTrainOneStepWithLossScaleCell(network, optimizer, sense)
        updates = 0
        for step in range(case.meta["steps"]):
            out = cell(torch.from_numpy(arrays["x"][step]), torch.from_numpy(arrays["y"][step]).long())
            updates += cell.updated
            assert bool(out.overflow) == bool(arrays["overflow"][step])
            assert float(out.loss_scale) == arrays["returned_scale"][step] == cell.sens == arrays["scale_after"][step]
            assert updates == arrays["global_step"][step]
            assert_step(case, step, out.loss, named)


def test_scales_of_groups_move_as_in_the_reference(oracle):
    meta, _ = oracle["group_loss_scale"]
    for case in meta["expected"]["manager"]:
        groups = [[nn.Parameter(torch.zeros(1))] for _ in range(case["loss_scale_number"])]
        manager = GroupLossScaleManager(case["init"], groups)
        assert manager.get_loss_scale() == case["initial_list"]
        for (layer, ratio), wanted in zip(case["updates"], case["after"], strict=True):
            returned = manager.update_loss_scale_status(layer, ratio)
            assert manager.get_loss_scale() == pytest.approx(wanted, rel=1e-6)
            assert returned == manager.get_loss_scale()[layer + 1]
        manager.set_loss_scale_status(case["loss_scale_number"], case["init"])
        assert manager.get_loss_scale() == case["initial_list"]


def test_a_step_shrinks_and_grows_by_the_ratios_of_the_reference(oracle):
    meta, _ = oracle["group_loss_scale"]
    for sizes in (case["group_sizes"] for case in meta["expected"]["grouping"]):
        groups = [[nn.Parameter(torch.zeros(1)) for _ in range(size)] for size in sizes]
        manager = GroupLossScaleManager(4096.0, groups)
        params = [param for group in groups for param in group]
        optimizer = torch.optim.SGD(params, lr=1.0)
        manager.scaler.scale(torch.ones(()))
        for param in params:
            param.grad = torch.ones(1)
        groups[0][-1].grad = torch.full((1,), torch.inf)
        manager.scaler.step(optimizer)
        manager.scaler.update()
        ratios = [meta["expected"]["shrink_ratio"]] + [meta["expected"]["grow_ratio"]] * (len(sizes) - 1)
        wanted = [1.0, *(4096.0 * ratio for ratio in ratios), 1.0]
        assert manager.get_loss_scale() == pytest.approx(wanted, rel=1e-6)
