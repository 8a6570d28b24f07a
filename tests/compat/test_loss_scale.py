"""The training cell with a loss scale, and the manager of scales per group."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import batch_for, mlp
from torchboost import (
    AutoBoost,
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
    DynamicLossScale,
    FixedLossScale,
    GroupGradScaler,
    GroupLossScaleManager,
    IncompatibleError,
    WithLoss,
)


def pair(make=mlp):
    torch.manual_seed(0)
    network = WithLoss(make(), F.cross_entropy)
    return network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)


def data(seed: int, model: nn.Module | None = None):
    return batch_for(mlp() if model is None else model, torch.Generator().manual_seed(seed), 6)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


MANAGERS = {
    "tensor": lambda network: torch.tensor(1024.0),
    "tensor (1,)": lambda network: torch.tensor([1024.0]),
    "fixed": lambda network: FixedLossScale(1024.0),
    "dynamic": lambda network: DynamicLossScale(1024.0),
    "GradScaler": lambda network: torch.amp.GradScaler("cpu", init_scale=1024.0),
    "group": lambda network: GroupGradScaler(network, 2, init_scale=1024.0),
}


def test_trains_like_the_cell_without_a_scale_and_skips_overflows():
    for kind in MANAGERS:
        network, optimizer = pair()
        plain, plain_optimizer = pair()
        cell = BoostTrainOneStepWithLossScaleCell(network, optimizer, MANAGERS[kind](network))
        plain_cell = BoostTrainOneStepCell(plain, plain_optimizer)
        for number in range(6):
            x, y = data(number)
            if number == 3:
                before, state = copy.deepcopy(network), copy.deepcopy(optimizer.state_dict())
                out = cell(x * math.inf, y)
                assert bool(out.overflow)
                assert not cell.updated
                assert equal(network, before)
                after = optimizer.state_dict()["state"]
                assert all(
                    torch.equal(after[k]["momentum_buffer"], v["momentum_buffer"]) for k, v in state["state"].items()
                )
                assert (
                    float(out.loss_scale) == 1024.0
                    if kind.startswith(("tensor", "fixed"))
                    else float(out.loss_scale) < 1024.0
                )
            out = cell(x, y)
            assert type(out).__name__ == "StepOutput"
            assert not out.overflow
            assert torch.equal(out.loss, plain_cell(x, y).loss)
            assert cell.updated
        assert equal(network, plain)


def test_the_scale_can_be_set():
    network, optimizer = pair()
    cell = BoostTrainOneStepWithLossScaleCell(network, optimizer, torch.tensor(2.0))
    cell.set_sense_scale(torch.tensor([8.0]))
    assert float(cell(*data(0)).loss_scale) == cell.sens == 8.0
    with pytest.raises(TypeError, match=r"sens must be a tensor of shape \(\) or \(1,\), found float 4.0"):
        cell.set_sense_scale(4.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"sens: found a tensor of shape \(2,\)"):
        cell.set_sense_scale(torch.ones(2))
    with pytest.raises(ValueError, match="scale: found nan"):
        cell.set_sense_scale(torch.tensor(math.nan))
    assert cell.sens == 8.0
    cell = BoostTrainOneStepWithLossScaleCell(network, optimizer, DynamicLossScale())
    with pytest.raises(TypeError, match="a DynamicLossScale sets the scale"):
        cell.set_sense_scale(torch.tensor(4.0))


def test_a_scale_that_is_neither_tensor_nor_manager():
    for sense in (1024.0, None, "8", [8.0], DynamicLossScale, lambda: 8.0, nn.Identity()):
        with pytest.raises(TypeError, match=r"scale_sense must be a tensor of shape \(\) or \(1,\), or a manager"):
            BoostTrainOneStepWithLossScaleCell(*pair(), sense)
    for sense in (torch.ones(2), torch.ones(1, 1), torch.ones(0)):
        with pytest.raises(ValueError, match="scale_sense: found a tensor of shape"):
            BoostTrainOneStepWithLossScaleCell(*pair(), sense)


class InPlace(nn.Module):
    """As MindSpore's update cells: the scale is assigned, the overflow handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def get_loss_scale(self) -> float:
        return 64.0

    def forward(self, loss_scale, overflow):
        assert loss_scale.shape == overflow.shape == ()
        self.calls += 1
        loss_scale.copy_(torch.where(overflow, loss_scale / 4, loss_scale + 1))
        return overflow


def test_an_update_cell_moves_the_scale_in_place():
    network, optimizer = pair()
    cell = BoostTrainOneStepWithLossScaleCell(network, optimizer, InPlace())
    assert cell.sens == 64.0
    assert float(cell(*data(0)).loss_scale) == 65.0
    before = copy.deepcopy(network)
    x, y = data(1)
    out = cell(x * math.inf, y)
    assert (bool(out.overflow), float(out.loss_scale)) == (True, 65.0 / 4)
    assert equal(network, before)
    other = BoostTrainOneStepWithLossScaleCell(*pair(), InPlace())
    other.load_state_dict(copy.deepcopy(cell.state_dict()))
    assert other.sens == 65.0 / 4
    assert other.scaler.state_dict()["cell"]["calls"] == 2
    with pytest.raises(TypeError, match="a _CellScale sets the scale"):
        cell.set_sense_scale(torch.tensor(4.0))


def test_an_update_cell_may_return_the_scale():
    for make in (lambda s: s * 2, lambda s: float(s) * 2, lambda s: (s * 2).reshape(1)):
        cell = BoostTrainOneStepWithLossScaleCell(*pair(), lambda loss_scale, overflow, make=make: make(loss_scale))
        assert cell.sens == 2.0**16
        assert float(cell(*data(0)).loss_scale) == 2.0**17
    for returned, message in ((-1.0, "found -1"), ("x", "found 'x'"), (math.nan, "found nan")):
        cell = BoostTrainOneStepWithLossScaleCell(*pair(), lambda scale, overflow, returned=returned: returned)
        with pytest.raises((TypeError, ValueError), match=f"loss_scale of the update cell, a function: {message}"):
            cell(*data(0))


def test_the_plain_cell_uses_the_scaler_of_the_switch_and_refuses_another():
    network, optimizer = pair()
    config = {"boost": {"mode": "manual", "loss_scale_group": True}}
    booster = AutoBoost("O0", config)
    network, optimizer = booster.network_auto_process_train(network, optimizer)
    assert isinstance(booster.scaler, GroupGradScaler)
    out = BoostTrainOneStepCell(network, optimizer)(*data(0))
    assert float(out.loss_scale) > 2.0**16
    with pytest.raises(IncompatibleError, match="AutoBoost added another scaler"):
        BoostTrainOneStepWithLossScaleCell(network, optimizer, torch.tensor(4.0))
    with pytest.raises(IncompatibleError, match="leave sens at 1"):
        BoostTrainOneStepCell(network, optimizer, sens=2.0)


def test_a_network_is_boosted_again_after_the_booster_is_gone():
    for given in ["the same optimizer", "another optimizer"]:
        network, optimizer = pair()
        x, y = data(0)
        network(x, y).backward()
        expected = [p.grad.clone() for p in network.parameters()]
        optimizer.zero_grad()
        config = {"boost": {"mode": "manual", "loss_scale_group": True}}
        used = [optimizer]
        for groups, count in ((2, 2), (3, 3)):
            config["extra"] = {"loss_scale_group": {"groups": groups, "init_scale": 512.0}}
            booster = AutoBoost("O0", config)
            network, optimizer = booster.network_auto_process_train(network, used[-1])
            assert len(booster.scaler.report) >= count
            booster.scaler.scale(network(x, y)).backward()
            booster.scaler.unscale_(optimizer)
            assert all(torch.equal(p.grad, e) for p, e in zip(network.parameters(), expected, strict=True))
            optimizer.zero_grad()
            scaler = booster.scaler
            hooks = sum(len(module._forward_hooks) for module in network.modules())
            assert hooks == sum(map(len, scaler._groups))
            del booster, scaler
            gc.collect()
            if given == "another optimizer":
                used.append(torch.optim.SGD(network.parameters(), lr=0.1))
        del used


class ByHand(nn.Module):
    """Borders as the reference sets them; the rest of the forward is the user's."""

    def __init__(self, scale) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 4)
        groups = [list(self.first.parameters()), list(self.second.parameters())]
        self.manager = GroupLossScaleManager(scale, groups)

    def forward(self, x, y):
        x = torch.tanh(self.first(self.manager(x, 0, 1)))
        x = self.second(self.manager(x, 1, 2))
        return F.cross_entropy(self.manager(x, 2, 3), y)


def test_a_border_multiplies_by_the_ratio_of_the_scales():
    manager = GroupLossScaleManager([6.0, 24.0], [[nn.Parameter(torch.ones(1))], [nn.Parameter(torch.ones(1))]])
    for layers, wanted in {(0, 1): 1 / 6, (1, 2): 0.25, (2, 3): 24.0, (0, 3): 1.0, (2, 1): 4.0}.items():
        x = torch.ones(2, requires_grad=True)
        y = manager(x, *layers)
        assert torch.equal(x, y)
        y.sum().backward()
        assert x.grad.tolist() == pytest.approx([wanted] * 2)
    assert manager.get_update_cell() is manager


def test_borders_by_hand_train_like_no_scale():
    for scale in [2.0**12, [2.0**20, 2.0**-0.0]]:
        torch.manual_seed(0)
        network = ByHand(scale)
        plain = copy.deepcopy(network)
        cell = BoostTrainOneStepWithLossScaleCell(
            network, torch.optim.SGD(network.parameters(), lr=0.1), network.manager
        )
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for number in range(5):
            x, y = data(number)
            assert not cell(x, y).overflow
            out = plain.second(torch.tanh(plain.first(x)))
            F.cross_entropy(out, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        for a, b in zip(network.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        before = network.manager.get_loss_scale()
        handle = network.second.weight.register_hook(lambda grad: grad * math.nan)
        assert cell(*data(9)).overflow
        handle.remove()
        grown, shrunk = network.manager.get_loss_scale()[1:3]
        assert grown == pytest.approx(before[1] * 2 ** (1 / 1000))
        assert shrunk == pytest.approx(max(before[2] * 2**-0.5, 1.0))


def test_a_copy_of_the_network_has_the_groups_of_its_own_parameters():
    torch.manual_seed(0)
    network = ByHand([2.0**10, 2.0**4])
    twin = copy.deepcopy(network)
    for each in (network, twin):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        BoostTrainOneStepWithLossScaleCell(each, optimizer, each.manager)(*data(0))
    assert equal(network, twin)


def test_the_groups_may_come_after_the_network_that_holds_the_manager():
    """As the documented example has it: the network is built with the manager, the groups come from the network."""

    class Net(nn.Module):
        def __init__(self, enhanced_amp: nn.Module) -> None:
            super().__init__()
            self.enhanced_amp = enhanced_amp
            self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.enhanced_amp(self.first(self.enhanced_amp(x, 0, 1)), 1, 2)
            return self.enhanced_amp(self.second(x), 2, 3)

    manager = GroupLossScaleManager(4096, [])
    net = Net(manager)
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
    assert torch.equal(net(x), net.second(net.first(x)))
    for early in (manager.get_loss_scale, lambda: manager.set_loss_scale_status(2, 8.0)):
        with pytest.raises(ValueError, match="loss_scale_groups: found none yet"):
            early()
    with pytest.raises(ValueError, match="loss_scale_groups: found none yet"):
        BoostTrainOneStepWithLossScaleCell(net, torch.optim.SGD(net.parameters(), lr=0.1), manager)
    manager.loss_scale_groups = [list(net.first.parameters()), list(net.second.parameters())]
    with pytest.raises(ValueError, match="already has groups"):
        manager.loss_scale_groups = [list(net.parameters())]
    network = WithLoss(net, F.cross_entropy)
    cell = BoostTrainOneStepWithLossScaleCell(network, torch.optim.SGD(net.parameters(), lr=0.1), manager)
    assert not cell(x, y).overflow
    assert manager.get_loss_scale()[1] == pytest.approx(4096 * 2 ** (1 / 1000))
    with pytest.raises(ValueError, match="init_loss_scale"):
        GroupLossScaleManager(-1.0, [])


def test_what_the_manager_refuses():
    one, two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    for groups, error, text in [
        (None, ValueError, "one list of parameters per group"),
        (8, ValueError, "one list of parameters per group"),
        ([[torch.ones(1)]], TypeError, r"loss_scale_groups\[0\]: found a Tensor"),
        ([[one], [one]], ValueError, "is in the groups 0 and 1"),
    ]:
        with pytest.raises(error, match=text):
            GroupLossScaleManager(8.0, groups)
    with pytest.raises(ValueError, match="init_loss_scale: found 3 scales for 2 groups"):
        GroupLossScaleManager([1.0, 2.0, 4.0], [[one], [two]])
    manager = GroupLossScaleManager(8.0, [[one], [two]])
    for call, error, text in [
        (lambda: manager(one, 0, 4), ValueError, "layer2: found 4; the list of scales has the entries 0 to 3"),
        (lambda: manager.set_loss_scale_status(3, 8.0), ValueError, "loss_scale_number: found 3"),
        (lambda: manager.set_loss_scale_status(2, -1.0), ValueError, "init_loss_scale"),
        (lambda: manager.update_loss_scale_status(2, 2.0), ValueError, "layer: found 2; the groups are 0 to 1"),
        (lambda: manager.update_loss_scale_status(0, -2.0), ValueError, "update_ratio"),
        (lambda: manager.update_loss_scale_status(0, "2"), TypeError, "update_ratio"),
    ]:
        with pytest.raises(error, match=text):
            call()
    assert manager.get_loss_scale() == [1.0, 8.0, 8.0, 1.0]
    manager.set_loss_scale_status(2, [4.0, 2.0])
    assert manager.get_loss_scale() == [1.0, 4.0, 2.0, 1.0]


class Convolutions(nn.Module):
    """``less_bn`` takes a norm out of it, and gives the head a ``multiplier``."""

    def __init__(self, manager: nn.Module) -> None:
        super().__init__()
        self.manager = manager
        layers = [[nn.Conv2d(width, 8, 3), nn.BatchNorm2d(8), nn.ReLU()] for width in (3, 8)]
        self.body, self.head = nn.Sequential(*layers[0], *layers[1]), nn.Linear(128, 4)

    def forward(self, x):
        x = self.body(self.manager(x, 0, 1)).flatten(1)
        return self.manager(self.head(self.manager(x, 1, 2)), 2, 3)

    def group(self) -> None:
        self.manager.loss_scale_groups = [list(self.body.parameters()), list(self.head.parameters())]


def convolutions(*, early: bool):
    torch.manual_seed(0)
    net = Convolutions(GroupLossScaleManager(4096.0, []))
    if early:
        net.group()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    booster = AutoBoost("O1", {"boost": {"mode": "manual", "less_bn": True}, "less_bn": {"gc_flag": False}})
    network, optimizer = booster.network_auto_process_train(WithLoss(net, F.cross_entropy), optimizer)
    return net, network, optimizer


def test_parameters_that_boosting_adds_after_the_groups_are_refused():
    net, network, optimizer = convolutions(early=True)
    with pytest.raises(ValueError, match=r"'backbone.head.multiplier' is in no group.*after AutoBoost"):
        BoostTrainOneStepWithLossScaleCell(network, optimizer, net.manager)
    scaler = net.manager.scaler
    scaler.scale(network(torch.randn(4, 3, 8, 8), torch.arange(4))).backward()
    grads = [p.grad.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match=r"a parameter of shape \(1,\) is in no group"):
        scaler.step(optimizer)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), grads, strict=True)), "none is divided"


def test_groups_that_are_set_after_boosting_train_like_no_scale():
    net, network, optimizer = convolutions(early=False)
    assert hasattr(net.head, "multiplier")
    plain = copy.deepcopy(network)
    net.group()
    cell = BoostTrainOneStepWithLossScaleCell(network, optimizer, net.manager)
    plain_cell = BoostTrainOneStepCell(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for _ in range(3):
        x, y = torch.randn(4, 3, 8, 8), torch.arange(4)
        torch.testing.assert_close(cell(x, y).loss, plain_cell(x, y).loss, rtol=1e-4, atol=1e-6)


def test_a_parameter_that_was_forgotten_is_refused_when_it_trains():
    network = ByHand(8.0)
    network.extra = nn.Parameter(torch.ones(1))
    network.extra.requires_grad_(False)
    optimizer = torch.optim.SGD([*network.parameters()], lr=0.1)
    cell = BoostTrainOneStepWithLossScaleCell(network, optimizer, network.manager)
    assert not cell(*data(0)).overflow, "it does not train"
    network.extra.requires_grad_(True)
    before = copy.deepcopy(network)
    with pytest.raises(ValueError, match=r"a parameter of shape \(1,\) is in no group"):
        cell(*data(1))
    assert equal(network, before)
