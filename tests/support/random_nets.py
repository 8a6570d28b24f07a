"""Small random networks with BatchNorm: every seed another structure, with inputs of several shapes."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["random_net"]

Inputs = list[tuple[Tensor, ...]]


def random_net(seed: int) -> tuple[nn.Module, Inputs]:
    """Return a network in training mode whose norms have seen data, and inputs of several shapes for it."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    network = _Net(draw)
    inputs = [network.sample(draw, count, side) for count, side in ((2, 8), (3, 9), (1, 12))]
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        for args in (network.sample(draw, 6, 8), network.sample(draw, 6, 10)):
            network(*args)
    return network, inputs


class _Net(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.sides = draw.choice((1, 2, 2, 2, 3))
        width = 4
        self.stem = _conv(self.sides, 2, width, draw)
        kinds = draw.choices(_BLOCKS, k=draw.randint(1, 3))
        self.blocks = nn.ModuleList(kind(width, self.sides, draw) for kind in kinds)
        self.pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[self.sides - 1](1)
        hidden = [nn.Linear(width, 6), nn.BatchNorm1d(6), nn.ReLU()] if draw.random() < 0.5 else [nn.Linear(width, 6)]
        self.head = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(6, 3))
        self.second = draw.random() < 0.3

    def sample(self, draw: random.Random, count: int, side: int) -> tuple[Tensor, ...]:
        x = torch.randn(count, 2, *[side] * self.sides) * 2 + 0.5
        if not self.second:
            return (x,)
        return (x, torch.randn(count, 4, *[1] * self.sides))[: 1 + (draw.random() < 0.5)]

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            if shift is not None:
                x = x + shift
        return self.head(self.pool(x))


def _norm(sides: int, width: int) -> nn.Module:
    return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[sides - 1](width)


def _conv(sides: int, inside: int, outside: int, draw: random.Random) -> nn.Module:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[sides - 1]
    mode = draw.choice(("zeros", "zeros", "replicate"))
    return kind(inside, outside, 3, padding=1, bias=draw.random() < 0.5, padding_mode=mode)


class _Block(nn.Module):
    def __init__(self, width: int, sides: int, draw: random.Random) -> None:
        super().__init__()
        self.a, self.b = _conv(sides, width, width, draw), _conv(sides, width, width, draw)
        self.norm, self.again = _norm(sides, width), _norm(sides, width)
        self.act = nn.ReLU(inplace=draw.random() < 0.5)


class _Residual(_Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.again(self.b(self.act(self.norm(self.a(x)))))
        y += x
        return self.act(y)


class _PreActivated(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.act(self.again(self.a(self.act(self.norm(x))))))


class _Tapped(_Block):
    """Somebody else reads what the first convolution gives."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.again(self.b(F.relu(self.norm(y)))) + torch.tanh(y)


class _BySize(_Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if x.shape[-1] > 8:
            y = self.norm(y)
        return self.again(self.b(torch.relu(y)))


class _ByValue(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x)) if x.mean() > 0.5 else self.norm(self.b(x) * 2)


class _Shared(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.a(self.act(self.norm(self.a(x)))))


class _Hooked(_Block):
    def __init__(self, width: int, sides: int, draw: random.Random) -> None:
        super().__init__(width, sides, draw)
        draw.choice((self.a, self.norm)).register_forward_hook(lambda module, args, output: output.clamp(-0.5, 0.8))

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.b(self.norm(self.a(x))))


class _Listed(_Block):
    def __init__(self, width: int, sides: int, draw: random.Random) -> None:
        super().__init__(width, sides, draw)
        self.layers = nn.Sequential(self.a, self.norm, self.act, self.b, self.again)

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for layer in self.layers:
            x = layer(x)
            total = total + x.mean()
        return total


_BLOCKS = (_Residual, _PreActivated, _Tapped, _BySize, _ByValue, _Shared, _Hooked, _Listed)
