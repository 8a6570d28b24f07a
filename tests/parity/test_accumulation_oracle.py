"""Accumulation by the reference's names: the buffers, counters and weights of the reference, call by call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from torchboost import AutoBoost, BoostTrainOneStepCell, GradientAccumulation, WithLoss

CASES = ["grad_accumulation_momentum", "grad_accumulation_adam"]


def single(value: float) -> float:
    return float(np.float32(value))


def optimizer_of(meta: dict[str, Any], params: list[nn.Parameter]) -> torch.optim.Optimizer:
    hyper = meta["hyper"]
    lr = single(hyper["learning_rate"])
    if hyper["optimizer"] == "Adam":
        return torch.optim.Adam(params, lr=lr)
    optimizer = torch.optim.SGD(params, lr=lr, momentum=single(hyper["momentum"]))
    # The reference exempts beta and gamma from decay, which here takes a group per parameter.
    plain = optimizer.param_groups.pop()
    for param, entry in zip(params, meta["params"], strict=True):
        decays = not entry["name"].endswith(("beta", "gamma"))
        decay = single(hyper["weight_decay"]) if decays else 0.0
        optimizer.add_param_group({**plain, "params": [param], "weight_decay": decay})
    return optimizer


def place_epsilon(optimizer: torch.optim.Optimizer, update: int) -> None:
    """The reference adds epsilon before the second moment is corrected for its start at zero, torch after."""
    if isinstance(optimizer, torch.optim.Adam):
        for group in optimizer.param_groups:
            group["eps"] = 1e-8 / (1 - group["betas"][1] ** update) ** 0.5


def test_buffers_counters_and_weights_equal_the_oracle(oracle):
    for name in CASES:
        meta, arrays = oracle[name]
        params = [nn.Parameter(torch.from_numpy(arrays[f"p{i}.init"].copy())) for i in range(len(meta["params"]))]
        optimizer = optimizer_of(meta, params)
        accumulate = GradientAccumulation(meta["hyper"]["max_accumulation_step"], optimizer)
        updates = 0
        for step in range(meta["steps"]):
            place_epsilon(optimizer, updates + 1)
            grads = [torch.from_numpy(arrays[f"p{i}.grad"][step]) for i in range(len(params))]
            loss = torch.tensor(float(step))
            assert accumulate(loss, grads) is loss
            updates += accumulate.updated
            state = accumulate.state_dict()
            assert updates == arrays["global_step"][step]
            assert state["calls"] == arrays["accumulation_step"][step]
            for i, (param, held) in enumerate(zip(params, state["held"], strict=True)):
                buffer = torch.zeros_like(param) if held is None else held
                torch.testing.assert_close(buffer, torch.from_numpy(arrays[f"p{i}.accum"][step]), **meta["tolerance"])
                wanted = torch.from_numpy(arrays[f"p{i}.param"][step])
                torch.testing.assert_close(param.detach(), wanted, **meta["tolerance"])


def test_the_cell_trains_like_the_oracle(oracle):
    for given in [False, True]:
        meta, arrays = oracle["grad_accumulation_cell"]
        hyper = meta["hyper"]
        width = hyper["net"]
        fc1, fc2, fc3 = (
            nn.Linear(i, o) for i, o in ((width["i"], width["h"]), (width["h"], width["h"]), (width["h"], width["o"]))
        )
        layers = {"fc1": fc1, "fc2": fc2, "fc3": fc3}
        for name, layer in layers.items():
            for kind, param in layer.named_parameters():
                param.data.copy_(torch.from_numpy(arrays[f"init/{name}.{kind}"]))
        network = WithLoss(nn.Sequential(fc1, nn.Tanh(), fc2, nn.Tanh(), fc3), F.cross_entropy)
        optimizer = torch.optim.SGD(
            network.parameters(), lr=single(hyper["learning_rate"]), momentum=single(hyper["momentum"])
        )
        booster = AutoBoost(
            "O0",
            {
                "boost": {"mode": "manual", "grad_accumulation": True},
                "grad_accumulation": {"grad_accumulation_step": hyper["grad_accumulation_step"]},
            },
        )
        cell = BoostTrainOneStepCell(*booster.network_auto_process_train(network, optimizer))
        for step in range(meta["steps"]):
            x, y = torch.from_numpy(arrays["x"][step]), torch.from_numpy(arrays["y"][step]).long()
            if given:
                loss = network(x, y)
                grads = torch.autograd.grad(loss, list(network.parameters()))
                loss = cell.gradient_accumulation_process(loss.detach(), grads, 1.0, x, y)
            else:
                loss = cell(x, y).loss
            torch.testing.assert_close(loss, torch.tensor(arrays["loss"][step]), **meta["tolerance"])
            for name, layer in layers.items():
                for kind, param in layer.named_parameters():
                    wanted = torch.from_numpy(arrays[f"param/{name}.{kind}"][step])
                    torch.testing.assert_close(param.detach(), wanted, **meta["tolerance"])


def test_the_list_of_tested_cases_is_complete(oracle):
    assert set(oracle.names("grad_accumulation")) == {*CASES, "grad_accumulation_cell"}
