"""What oneDNN crashes on is found by its shape, and never trained channels-last or compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchboost
from torchboost.algorithms import ChannelsLast, Compile, to_channels_last
from torchboost.algorithms.autocast import autocast_forward
from torchboost.core import Target, attach_all
from torchboost.core.hardware import unsafe_channels_last
from torchboost.errors import IncompatibleError


def network(channels: int = 8, stride: int = 2, kernel: int = 1, groups: int = 1) -> nn.Sequential:
    shortcut = nn.Conv2d(channels, 16, kernel, stride=stride, groups=groups)
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), shortcut)


def test_small_strided_convolutions_are_unsafe():
    for changes in [{}, {"channels": 4}, {"channels": 32, "groups": 4}]:
        model = network(**changes)
        assert "2 is a convolution with a kernel of (1, 1)" in (unsafe_channels_last(model) or "")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for settings in (ChannelsLast(), Compile()):
            assert "oneDNN" in (settings.idle(model, optimizer) or "")
            with pytest.raises(IncompatibleError, match=r"kernel of \(1, 1\), stride \(2, 2\).* leave .* out"):
                attach_all(Target(model, optimizer), [settings])
        with pytest.raises(IncompatibleError, match="issue 6035"):
            to_channels_last(model)
        assert model[0].weight.is_contiguous()


def test_others_are_safe():
    for model in [network(stride=1), network(channels=16), network(kernel=3), network().to("meta"), nn.Linear(2, 2)]:
        assert unsafe_channels_last(model) is None


def test_a_transposed_convolution_exchanges_its_channels():
    assert unsafe_channels_last(nn.Sequential(nn.ConvTranspose2d(32, 4, 1, stride=2))) is not None


def test_what_goes_wrong_on_narrow_images():
    for layer, unsafe in [
        (nn.Conv2d(1, 8, 3, stride=(1, 2)), True),
        (nn.Conv3d(1, 8, 3, stride=(2, 1, 2)), True),
        (nn.ConvTranspose2d(8, 1, 3, stride=(1, 2)), True),
        (nn.Conv2d(16, 8, (3, 1), stride=2, dilation=2), True),
        (nn.Conv2d(16, 8, (3, 1), stride=2), False),
        (nn.Conv2d(1, 8, 3, stride=2), False),
        (nn.Conv2d(1, 8, (3, 1), stride=(1, 2)), False),
        (nn.Conv2d(4, 8, 3, stride=(1, 2), groups=4), False),
        (nn.Conv1d(1, 8, 3, stride=2), False),
    ]:
        assert (unsafe_channels_last(layer) is not None) is unsafe


def test_a_level_trains_such_a_network():
    for level in ["O1", "O2"]:
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


def narrow(kind: type[nn.Module], dims: int, **settings) -> tuple[nn.Module, torch.Tensor]:
    """A strided convolution whose outputs (transposed: inputs) are one entry wide."""
    ones, zeros = (1,) * (dims - 1), (0,) * (dims - 1)
    torch.manual_seed(0)
    layer = kind(32, 32, (*ones, 3), stride=(*ones, 2), padding=(*zeros, 1), **settings)
    return layer, torch.randn(8, 32, *ones, 1)


def wide(kind: type[nn.Module], size: tuple[int, ...], *, padding_is: int = 1, **settings) -> Any:
    """A convolution whose kernel is wider than its inputs (transposed: outputs)."""
    torch.manual_seed(0)
    return kind(32, 32, 3, padding=padding_is, **settings), torch.randn(8, 32, *size)


NARROW = {
    "1d": lambda: narrow(nn.Conv1d, 1),
    "2d": lambda: narrow(nn.Conv2d, 2),
    "3d": lambda: narrow(nn.Conv3d, 3),
    "groups": lambda: narrow(nn.Conv2d, 2, groups=2),
    "transposed": lambda: narrow(nn.ConvTranspose2d, 2),
    "flat": lambda: wide(nn.Conv3d, (2, 8, 8)),
    "flat and grouped": lambda: wide(nn.Conv3d, (8, 1, 8), groups=2),
    "small": lambda: wide(nn.Conv2d, (8, 2), padding_is=2),
    "short": lambda: wide(nn.Conv1d, (1,), padding_is=2),
    "flat outputs": lambda: wide(nn.ConvTranspose3d, (3, 8, 8), padding_is=2),
}


def test_narrow_convolutions_are_computed_in_float32_under_autocast():
    """In bfloat16 oneDNN reads memory that was never written, so memory is filled with large numbers first."""
    for name in NARROW:
        layer, inputs = NARROW[name]()
        layer(inputs).sum().backward()
        expected = layer.weight.grad.clone()
        effect = autocast_forward(layer)
        for _ in range(3):
            junk = [
                torch.full((size,), 1e30, dtype=torch.bfloat16) for size in 3 * (layer.weight.numel(), 8 * 32, 16 * 32)
            ]
            del junk
            layer.weight.grad = None
            layer(inputs).sum().backward()
            torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-2, atol=1e-2)
        effect.remove()
        assert "forward" not in vars(layer)


def test_only_narrow_outputs_are_computed_in_float32():
    layer = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 1))
    seen = []
    layer[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    effect = autocast_forward(layer)
    for width in (1, 2, 3, 4, 16):
        layer(torch.randn(2, 8, 16, width))
    effect.remove()
    assert seen == [torch.float32, torch.float32, *3 * [torch.bfloat16]]
