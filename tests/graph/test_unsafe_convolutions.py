"""What oneDNN crashes on is found by its shape, and never trained channels-last or compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchboost
from torchboost.algorithms import ChannelsLast, Compile, to_channels_last
from torchboost.core import Target, attach_all
from torchboost.errors import IncompatibleError
from torchboost.graph.unsafe_convolutions import unsafe_channels_last


def network(channels: int = 8, stride: int = 2, kernel: int = 1, groups: int = 1) -> nn.Sequential:
    shortcut = nn.Conv2d(channels, 16, kernel, stride=stride, groups=groups)
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), shortcut)


@pytest.mark.parametrize(
    "changes", [{}, {"channels": 4}, {"channels": 32, "groups": 4}], ids=["8 channels", "4 channels", "groups"]
)
def test_small_strided_convolutions_are_unsafe(changes):
    model = network(**changes)
    assert "2 is a 1x1 convolution" in (unsafe_channels_last(model) or "")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for settings in (ChannelsLast(), Compile()):
        assert "oneDNN" in (settings.idle(model, optimizer) or "")
        with pytest.raises(IncompatibleError, match=r"1x1 convolution .* leave .* out"):
            attach_all(Target(model, optimizer), [settings])
    with pytest.raises(IncompatibleError, match="1x1 convolution"):
        to_channels_last(model)
    assert model[0].weight.is_contiguous()


@pytest.mark.parametrize(
    "model",
    [network(stride=1), network(channels=16), network(kernel=3), network().to("meta"), nn.Linear(2, 2)],
    ids=["stride 1", "16 channels", "3x3", "another device", "no convolution"],
)
def test_others_are_safe(model):
    assert unsafe_channels_last(model) is None


def test_a_transposed_convolution_exchanges_its_channels():
    assert unsafe_channels_last(nn.Sequential(nn.ConvTranspose2d(32, 4, 1, stride=2))) is not None


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_level_trains_such_a_network(level):
    torch.manual_seed(0)
    model = nn.Sequential(network(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))
    model, optimizer = torchboost.boost(
        model, torch.optim.SGD(model.parameters(), lr=0.1), level=level, total_steps=10_000
    )
    for _ in range(3):
        model(torch.randn(2, 3, 64, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
