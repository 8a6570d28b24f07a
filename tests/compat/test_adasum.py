"""The reference's AdaSum, and AdaSum in the training cells."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.support.models import batch_for, mlp
from tests.support.nodes import batch_of, formula, simulated, tensors
from tests.support.ranks import run_ranks
from torchboost import (
    AdaSum,
    AutoBoost,
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
    DynamicLossScale,
    IncompatibleError,
    ParameterProcess,
    WithLoss,
)

CONFIG = {"boost": {"mode": "manual", "adasum": True}, "common": {"device_number": 1, "gradient_split_groups": [2]}}
SHAPES = [(4, 3), (7,), (1,), (2, 2)]


def deltas_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def summed(per_node: int) -> tuple[list[list[float]], list[list[float]], bool]:
    nodes = dist.get_world_size() // per_node
    parameters = [nn.Parameter(torch.full(shape, 5.0)) for shape in SHAPES]
    old = [torch.ones(shape) for shape in SHAPES]
    deltas = deltas_of(dist.get_rank())
    combined = AdaSum(dist.get_rank(), per_node, nodes, tuple(parameters))(deltas, parameters, old)
    untouched = all(map(torch.equal, deltas, deltas_of(dist.get_rank())))
    return [c.flatten().tolist() for c in combined], [p.flatten().tolist() for p in parameters], untouched


def check_deltas(ranks: int, layouts: dict[int, Any]) -> None:
    """Deltas are averaged inside a node and combined across."""
    for per_node, (combined, parameters, untouched) in layouts.items():
        assert untouched
        for i, (delta, param) in enumerate(zip(combined, parameters, strict=True)):
            by_rank = [deltas_of(rank)[i].double().flatten() for rank in range(ranks)]
            nodes = [torch.stack(by_rank[at : at + per_node]).mean(0) for at in range(0, ranks, per_node)]
            assert torch.allclose(torch.tensor(delta).double(), formula(nodes), atol=1e-6)
            assert torch.allclose(torch.tensor(param), 1 - torch.tensor(delta))


def deltas() -> dict[int, Any]:
    return {per_node: summed(per_node) for per_node in (1, 2)}


def packed() -> list[int]:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    process = ParameterProcess()
    process.assign_parameter_group(parameters)
    three = ParameterProcess()
    three.assign_parameter_group(parameters, [1, 3])
    counts = []
    for fusion in (None, process, three):
        adasum = AdaSum(dist.get_rank(), 1, 2, parameters, fusion=fusion)
        with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as exchange:
            adasum(deltas_of(dist.get_rank()), parameters, [torch.zeros(shape) for shape in SHAPES])
        counts.append(exchange.call_count)
    return counts


def wrong() -> list[str]:
    parameters = [nn.Parameter(torch.zeros(2))]
    said = []
    rank = dist.get_rank()
    for arguments in ((rank, 1, 3, parameters), (rank, 3, 1, parameters), (1 - rank, 1, 2, parameters)):
        try:
            AdaSum(*arguments)
        except ValueError as error:
            said.append(str(error))
    adasum = AdaSum(rank, 1, 2, parameters)
    for given in (([], parameters, parameters), ([torch.zeros(3)], parameters, parameters)):
        try:
            adasum(*given)
        except ValueError as error:
            said.append(str(error))
    return said


def test_without_a_process_group():
    weight = nn.Parameter(torch.zeros(2))
    for numbers in ((0, 8, 2), (1, 1, 1), (0, 0, 1), (0, 1, 0)):
        with pytest.raises(ValueError, match=r"in rank 0 of 1; give .* after torch\.distributed\.init_process_group"):
            AdaSum(*numbers, [weight])
    with pytest.raises(ValueError, match="no index"):
        AdaSum(0, 1, 1, [weight], fusion=ParameterProcess())


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    network = WithLoss(mlp(), F.cross_entropy)
    return network, torch.optim.SGD(network.parameters(), lr=0.2)


def cells(scaled: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in ("called", "process"):
        booster = AutoBoost("O0", CONFIG)
        network, optimizer = booster.network_auto_process_train(*pair())
        cell = (
            BoostTrainOneStepWithLossScaleCell(network, optimizer, DynamicLossScale(1024.0))
            if scaled
            else BoostTrainOneStepCell(network, optimizer)
        )
        assert cell.check_adasum_enable()
        for number in range(3):
            x, y = batch_of(dist.get_rank(), number)
            if way == "called":
                cell(x, y)
            else:
                loss = network(x, y)
                grads = torch.autograd.grad(loss, list(network.parameters()))
                assert cell.adasum_process(loss, grads) is loss
                assert cell.updated
        found[way] = tensors(network)
        found["explain"] = booster.explain()
        booster.attached.remove()
        assert not cell.check_adasum_enable()
    return found


def deaf_scaler_in_a_cell() -> str:
    network, optimizer = AutoBoost("O0", CONFIG).network_auto_process_train(*pair())
    try:
        BoostTrainOneStepWithLossScaleCell(network, optimizer, torch.amp.GradScaler("cpu"))
    except IncompatibleError as error:
        return str(error)
    return "built"


def on_two_nodes() -> dict[str, Any]:
    parts = (deltas, packed, deaf_scaler_in_a_cell, wrong)
    return {"cell": cells(False), "scaled": cells(True)} | {part.__name__: part() for part in parts}


@pytest.mark.dist
def test_ranks():
    """The cells combine the updates, the indices decide the number of collectives, a deaf scaler is refused."""
    first, second = run_ranks(on_two_nodes, 2)
    for rank, messages in enumerate((first.pop("wrong"), second.pop("wrong"))):
        assert len(messages) == 5
        for numbers, message in zip(((rank, 1, 3), (rank, 3, 1), (1 - rank, 1, 2)), messages, strict=False):
            assert f"found {numbers} in rank {rank} of 2; give this rank" in message
        assert "delta_weights: found tensors of shapes []" in messages[3]
        assert "delta_weights: found tensors of shapes [(3,)]" in messages[4]
    assert first == second
    expected = simulated(2, 1, 3, lambda params: torch.optim.SGD(params, lr=0.2))
    for result in (first["cell"], first["scaled"]):
        assert result["called"] == result["process"]
        for ours, theirs in zip(result["called"], expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
        assert "split_groups=(2,), devices_per_node=1" in result["explain"]
    assert first["packed"] == [2, 4, 6]
    assert "may skip the step on one node while" in first["deaf_scaler_in_a_cell"]
    check_deltas(2, first["deltas"])
    four = run_ranks(deltas, 4)
    assert all(other == four[0] for other in four)
    check_deltas(4, four[0])


def test_one_node_has_no_adasum_and_says_why():
    booster = AutoBoost("O0", CONFIG)
    cell = BoostTrainOneStepCell(*booster.network_auto_process_train(*pair()))
    assert "there is one rank, and no other" in booster.explain()
    assert cell.check_adasum_enable() is False
    with pytest.raises(IncompatibleError, match="start at least two nodes"):
        cell.adasum_process(torch.zeros(()), ())
    cell(*batch_for(mlp(), torch.Generator(), 6))
