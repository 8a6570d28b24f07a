"""Small networks in which something happens around a BatchNorm: it is written to, looked at, held or extended."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["NormAct", "PreAct", "RepVGG", "preact_net", "repvgg_net"]


class NormAct(nn.BatchNorm2d):
    """A BatchNorm that brings dropout and an activation along, as published networks have it."""

    def __init__(self, channels: int, act: nn.Module | None = None, drop: nn.Module | None = None) -> None:
        super().__init__(channels)
        self.drop = drop or nn.Identity()
        self.act = act or nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        assert x.ndim == 4, f"expected 4 dimensions, got {x.ndim}"
        return self.act(self.drop(super().forward(x)))


class PreAct(nn.Module):
    """A pre-activation block; the first norm shares its input with the skip."""

    def __init__(self, channels: int, style: str) -> None:
        super().__init__()
        self.style = style
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.c1, self.c2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.act = nn.ReLU(inplace=style == "module")

    def activate(self, x: Tensor) -> Tensor:
        if self.style == "method":
            return x.relu_()
        if self.style in ("keyword", "positional"):
            return F.relu(x, inplace=True) if self.style == "keyword" else F.relu(x, True)
        return self.act(x)

    def forward(self, x: Tensor) -> Tensor:
        h = self.c2(self.activate(self.bn2(self.c1(self.activate(self.bn1(x))))))
        return x + h


def preact_net(style: str) -> nn.Sequential:
    """A stem, three blocks, a head; ``style`` says how it activates; images (n, 3, 8, 8)."""
    head = [nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *[PreAct(8, style) for _ in range(3)], *head)


class RepVGG(nn.Module):
    """Two convolutions and a bare BatchNorm beside one another, added up in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))
        self.narrow = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels))
        self.same = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = self.same(x)
        out += self.wide(x)
        out += self.narrow(x)
        return torch.relu_(out)


def repvgg_net() -> nn.Sequential:
    """A stem, two blocks, a head; images (n, 3, 8, 8)."""
    stem = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*stem, RepVGG(8), RepVGG(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
