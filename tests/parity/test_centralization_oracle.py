"""Gradient centralisation and the group helpers against vectors of the reference implementation.

Expressible with torch's own rules, and tested here: all cases of the family ``grad_centralization`` and the case
``optimizer_process``. One point of the latter has no counterpart: the reference leaves an optimizer that was built
from a plain list as it is, while a torch optimizer always has groups, so there the list is given to the group helper.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchboost import OptimizerProcess, ParameterProcess
from torchboost.graph.norms import NormalizedLinear


class Network(nn.Module):
    """The layers of the case, under the reference's parameter names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.dw = nn.Conv2d(4, 4, 3, groups=4, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 4)
        self.head = NormalizedLinear(nn.Linear(4, 2, bias=False))


def named() -> tuple[Network, dict[str, nn.Parameter]]:
    network = Network()
    names = {"bn.weight": "bn.gamma", "bn.bias": "bn.beta"}
    return network, {names.get(name, name): param for name, param in network.named_parameters()}


def to_params(entries: list[Any], params: dict[str, nn.Parameter]) -> list[Any]:
    if all(isinstance(entry, str) for entry in entries):
        return [params[name] for name in entries]
    lists = ("params", "order_params")
    return [{k: [params[n] for n in v] if k in lists else v for k, v in entry.items()} for entry in entries]


def to_names(entries: list[Any], params: dict[str, nn.Parameter]) -> list[Any]:
    names = {id(param): name for name, param in params.items()}
    if all(isinstance(entry, torch.Tensor) for entry in entries):
        return [names[id(param)] for param in entries]
    lists = ("params", "order_params")
    return [{k: [names[id(p)] for p in v] if k in lists else v for k, v in entry.items()} for entry in entries]


def test_groups_split_as_in_the_oracle(oracle):
    cases = oracle["optimizer_process"].meta["expected"]["optimizer_process"]
    for case in cases:
        network, params = named()
        process = OptimizerProcess(torch.optim.SGD(network.parameters(), lr=0.1))
        before = to_params(case["before"], params)
        after = process.build_gc_params_group(process.build_params_dict(network), before)
        assert to_names(after, params) == case["after"], case["case"]


def test_a_rebuilt_optimizer_centralises_what_the_oracle_does(oracle):
    for case in oracle["optimizer_process"].meta["expected"]["optimizer_process"]:
        if case["case"] == "list":
            continue
        network, params = named()
        before = [group for group in to_params(case["before"], params) if "params" in group]
        process = OptimizerProcess(torch.optim.SGD(before, lr=0.1, momentum=0.9))
        process.add_grad_centralization(network)
        optimizer = process.generate_new_optimizer()
        flagged = [p for g in optimizer.param_groups if g.get("grad_centralization") for p in g["params"]]
        expected = [n for n, on in zip(case["parameter_order"], case["gc_flags"], strict=True) if on]
        assert sorted(to_names(flagged, params)) == sorted(expected)


def test_groups_are_rebuilt_as_in_the_oracle(oracle):
    for case in oracle["optimizer_process"].meta["expected"]["generate_group_params"]:
        _, params = named()
        result = ParameterProcess().generate_group_params(
            to_params(case["new"], params), to_params(case["origin"], params)
        )
        assert to_names(result, params) == case["result"]


def test_fusion_indices_count_on_as_in_the_oracle(oracle):
    process = ParameterProcess()
    for case in oracle["optimizer_process"].meta["expected"]["assign_parameter_group"]:
        parameters = [nn.Parameter(torch.ones(1)) for _ in range(case["n"])]
        process.assign_parameter_group(parameters, case["split_point"])
        assert list(process.fusion_index(parameters)) == case["comm_fusion"]
