"""What centralisation changes follows from structure and groups, whoever asks for it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import batch_for, cnn
from torchboost import Target
from torchboost.algorithms.gradient_centralization import (
    GradientCentralization,
    centralizable,
    centralize_gradients,
    depthwise_and_normalized,
)
from torchboost.core import attach_all
from torchboost.errors import NoEffectWarning
from torchboost.graph.norms import NormalizedLinear
from torchboost.optim import SGD


class Zoo(nn.Module):
    """One of every kind of layer that matters here; the names mislead on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.bias_bn = nn.Conv2d(3, 8, 3)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2)
        self.pointwise = nn.Conv2d(8, 16, 1, bias=False)
        self.conv = nn.Conv2d(16, 16, 3, groups=16)
        self.wide = nn.Conv2d(4, 8, 3, groups=4)
        self.mono = nn.Conv2d(1, 8, 3)
        self.weight = nn.BatchNorm2d(16)
        self.linear = nn.LayerNorm((4, 4))
        self.gamma = nn.Linear(16, 8)
        self.tokens = nn.Embedding(5, 8)
        self.fc = NormalizedLinear(nn.Linear(8, 4))
        self.attention = nn.MultiheadAttention(8, 2)
        self.memory = nn.GRU(4, 4)
        self.scale = nn.Parameter(torch.zeros(1, 8, 1, 1))
        self.gate = nn.Parameter(torch.zeros(1, 8))
        self.positions = nn.Parameter(torch.zeros(1, 5, 8))
        self.table = nn.Parameter(torch.zeros(5, 8))
        self.again = self.gamma.weight


def test_what_is_left_alone_follows_from_structure():
    model = Zoo()
    skip = depthwise_and_normalized(model)
    centralised = {name for name, param in model.named_parameters() if param not in skip}
    assert centralised == {
        "bias_bn.weight", "grouped.weight", "pointwise.weight", "mono.weight", "again", "tokens.weight",
        "attention.in_proj_weight", "attention.out_proj.weight", "memory.weight_ih_l0", "memory.weight_hh_l0",
    }  # fmt: skip


def test_a_parameter_without_owner_is_judged_by_its_rows():
    shapes = {(2, 2): True, (2,): False, (1, 2): True, (2, 1, 1): False, (1, 2, 1, 1): False, (1, 2, 2): True}
    for shape, expected in shapes.items():
        assert centralizable(torch.ones(shape), None) is expected, shape


class Scaled(nn.Module):
    """Parameters with one entry per row, between such as have more."""

    def __init__(self) -> None:
        super().__init__()
        self.gray = nn.Conv2d(1, 4, 1)
        self.layer_scale = nn.Parameter(torch.full((4, 1, 1), 1e-6))
        self.time = nn.Linear(1, 4)
        self.place = nn.Parameter(torch.zeros(4, 1))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
        image = self.gray(x) * (1 + self.layer_scale) + self.time(when)[:, :, None, None]
        return self.head(image.mean((2, 3)) + self.place.t())


class Gated(nn.Module):
    """A gate per channel, and a filter of one output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 1, 3)
        self.gate = nn.Parameter(torch.ones(1, 4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x) * self.gate).mean((1, 2, 3))


def test_parameters_with_one_entry_per_row_and_scales_per_channel_train_as_without_centralisation():
    torch.manual_seed(0)
    scaled = (torch.randn(8, 1, 3, 3), torch.rand(8, 1))
    for by, (build, inputs, rows) in itertools.product(
        ("algorithm", "function", "groups"),
        ((Scaled, scaled, {"head.weight"}), (Gated, (torch.randn(2, 3, 7, 7),), {"conv.weight", "head.weight"})),
    ):
        model = build()
        groups = [{"params": list(model.parameters()), "grad_centralization": True}]
        optimizer = SGD(groups, lr=0.1) if by == "groups" else torch.optim.SGD(model.parameters(), lr=0.1)
        if by == "algorithm":
            GradientCentralization().attach(Target(model, optimizer))
        if by == "function":
            centralize_gradients(optimizer)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        model(*inputs).square().sum().backward()
        grads = {name: param.grad.clone() for name, param in model.named_parameters()}
        optimizer.step()
        for name, param in model.named_parameters():
            assert not torch.equal(param, before[name]), name
            assert torch.equal(param.grad, grads[name]) is (name not in rows), name
            if name in rows:
                sums = [each.detach().flatten(1).sum(1) for each in (param, before[name])]
                torch.testing.assert_close(*sums, atol=1e-4, rtol=1e-4)


def test_a_group_has_the_last_word_on_itself():
    for says in [True, False, None]:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        own = {} if says is None else {"grad_centralization": says}
        groups = [{"params": list(model[0].parameters()), **own}, {"params": list(model[1].parameters())}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        GradientCentralization().attach(Target(model, optimizer))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert bool(model[0].weight.grad.any()) is (says is False)
        assert not model[1].weight.grad.any()


def test_the_sum_of_each_filter_stays_where_it_started():
    model = cnn().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = {n: p.detach().flatten(1).sum(1) for n, p in model.named_parameters() if p.ndim > 1}
    with centralize_gradients(optimizer):
        for seed in range(3):
            optimizer.zero_grad()
            x, y = batch_for(model, torch.Generator().manual_seed(seed))
            F.cross_entropy(model(x.double()), y).backward()
            optimizer.step()
    for name, sums in before.items():
        torch.testing.assert_close(model.get_parameter(name).detach().flatten(1).sum(1), sums, atol=1e-12, rtol=0)


def test_attach_skips_by_structure_and_adds_nothing_to_checkpoints():
    model = Zoo()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    keys = optimizer.state_dict().keys()
    attached = attach_all(Target(model, optimizer), [GradientCentralization()])
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    moved = {n for (n, p), old in zip(model.named_parameters(), before, strict=True) if not torch.equal(p, old)}
    skip = depthwise_and_normalized(model)
    assert moved == {name for name, param in model.named_parameters() if param in skip}
    assert optimizer.state_dict().keys() == keys
    assert attached.state_dict() == {"gradient_centralization": {}}


def test_nothing_to_centralise_warns():
    refusing = [{"params": list(nn.Linear(4, 3).parameters()), "grad_centralization": False}]
    for groups in (refusing, nn.BatchNorm1d(3).parameters()):
        with pytest.warns(NoEffectWarning, match="no kernel or weight matrix among the 2 parameters .* but for groups"):
            GradientCentralization().attach(Target(nn.Linear(1, 1), torch.optim.SGD(groups, lr=0.1)))
