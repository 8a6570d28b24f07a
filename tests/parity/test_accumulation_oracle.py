"""Accumulation by the reference's names: the buffers, counters and weights of the reference, call by call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.parity.networks import adam_eps, assert_step, mlp, parameters_of, single
from torchboost import AutoBoost, BoostTrainOneStepCell, GradientAccumulation, WithLoss

CASES = ["grad_accumulation_momentum", "grad_accumulation_adam"]


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


def test_buffers_counters_and_weights_equal_the_oracle(oracle):
    for name in CASES:
        meta, arrays = oracle[name]
        params = parameters_of(oracle[name])
        optimizer = optimizer_of(meta, params)
        accumulate = GradientAccumulation(meta["hyper"]["max_accumulation_step"], optimizer)
        updates = 0
        for step in range(meta["steps"]):
            adam_eps(optimizer, updates + 1)
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
    case = oracle["grad_accumulation_cell"]
    hyper = case.meta["hyper"]
    steps = {"grad_accumulation_step": hyper["grad_accumulation_step"]}
    config = {"boost": {"mode": "manual", "grad_accumulation": True}, "grad_accumulation": steps}
    for given in (False, True):
        layers, named = mlp(case)
        network = WithLoss(layers, F.cross_entropy)
        rate, momentum = single(hyper["learning_rate"]), single(hyper["momentum"])
        optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=momentum)
        cell = BoostTrainOneStepCell(*AutoBoost("O0", config).network_auto_process_train(network, optimizer))
        for step in range(case.meta["steps"]):
            x, y = torch.from_numpy(case.arrays["x"][step]), torch.from_numpy(case.arrays["y"][step]).long()
            if given:
                loss = network(x, y)
                grads = torch.autograd.grad(loss, list(network.parameters()))
                loss = cell.gradient_accumulation_process(loss.detach(), grads, 1.0, x, y)
            else:
                loss = cell(x, y).loss
            assert_step(case, step, loss, named)
