"""A model is changed before it is wrapped, and the plan attached later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchboost import Target, prepare
from torchboost.errors import IncompatibleError
from torchboost.workloads.models import Bottleneck, ResNet


def test_a_prepared_model_is_attached_later():
    model = ResNet(Bottleneck, [1, 1], width=8)
    norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    plan = prepare(model, total_steps=1000)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) < norms
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = plan.attach(Target(torch.compile(model, backend="eager"), optimizer))  # pyright: ignore
    assert "less_bn" in attached


def test_a_wrapped_model_is_refused():
    model = ResNet(Bottleneck, [1, 1], width=8)
    with pytest.raises(IncompatibleError, match="already wrapped"):
        prepare(torch.compile(model, backend="eager"), total_steps=1000)  # pyright: ignore


def test_what_has_nothing_to_change_is_left_out_and_nothing_is_said_to_be_measured():
    text = prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), total_steps=10_000).explain()
    assert "less_bn" in text.partition("left out:")[2]
    assert "measured times decide" not in text


def test_what_has_transformed_the_model_before_stays_on():
    model = ResNet(Bottleneck, [1, 1], width=8)
    assert prepare(model, total_steps=1000).algorithms == prepare(model, total_steps=1000).algorithms
