"""Networks that do what a library should not count on, each small. Plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 5
WIDTH = 8


def cnn(norm: bool = True, dropout: float = 0.0) -> nn.Sequential:
    """Two convolutions, with BatchNorm or without, and a head."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=not norm)
        return [convolution, *([nn.BatchNorm2d(outputs)] if norm else []), nn.ReLU()]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(2 * WIDTH, CLASSES)]
    return nn.Sequential(*block(3, WIDTH, 1), *block(WIDTH, 2 * WIDTH, 2), *head)


def normalised(how: Any) -> nn.Sequential:
    """Two convolutions and a linear layer, each under what came before parametrizations."""
    second = how(nn.Conv2d(WIDTH, WIDTH, 3))
    return nn.Sequential(
        how(nn.Conv2d(3, WIDTH, 3)), nn.ReLU(), second, nn.ReLU(), nn.Flatten(), how(nn.Linear(WIDTH * 64, CLASSES))
    )


class Net(nn.Module):
    """Holds the plain network as ``net``."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = cnn(dropout=dropout)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


class Conv(nn.Module):
    """Holds a convolution and a head, as ``conv`` and ``head``."""

    def __init__(self, features: int = WIDTH) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, WIDTH, 3), nn.Linear(features, CLASSES)


# Weights and layouts


class ReadsContiguity(Conv):
    def __init__(self) -> None:
        super().__init__(features=WIDTH * 100)

    def forward(self, x: Tensor) -> Tensor:
        found = self.conv(x)
        return self.head(found.view(len(x), -1) if found.is_contiguous() else found.reshape(len(x), -1))


class StridedWeight(Conv):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.conv.weight.as_strided((WIDTH, 27), (27, 1))
        return self.head(F.relu(self.conv(x)).mean((2, 3))) + rows.pow(2).cumsum(0).sum() * 0.01 + rows[:, 3].sum()


class ViewsOfOne(Conv):
    """All parameters are views of one tensor that the model holds."""

    def __init__(self) -> None:
        super().__init__()
        flat, start = torch.cat([p.detach().flatten() for p in self.parameters()]), 0
        for p in self.parameters():
            p.data, start = flat[start : start + p.numel()].view_as(p), start + p.numel()
        self.flat = [flat]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x)).mean((2, 3)))


class OddParameters(Net):
    """A scalar, an empty one, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale + self.empty.sum()


# Inputs and outputs


class ReturnsGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)])
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        def outputs(x: Tensor) -> Iterator[Tensor]:
            for layer in self.layers:
                x = F.relu(layer(x))
                yield self.head(x.mean((2, 3)))

        return outputs(x)


class EmptiesItsList(Net):
    def forward(self, batch: list[Any]) -> Tensor:
        x = batch.pop()
        batch.append("seen")
        return self.net(x.mul_(0.5))


class Holder:
    """An input that is no container."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.calls = x, 0


class WritesIntoItsInput(Net):
    def forward(self, holder: Holder) -> Tensor:
        holder.x.mul_(0.9)
        holder.calls += 1
        return self.net(holder.x) * holder.calls


# State outside of parameters


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.history, self.last = 0, [], [0.0]
        self.register_buffer("average", torch.zeros(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found = self.net(x) * (1 + 0.1 * (self.calls % 3)) + 0.1 * self.last[0]
        self.history.append(self.calls)
        self.last[0] = found.detach()
        self.average = 0.9 * self.average + 0.1 * found.detach().mean(0)
        return found + self.average


class GrowsInForward(Net):
    """Makes a layer in its first forward pass, which the optimizer does not know."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.net(x)
        if not hasattr(self, "lazy"):
            self.lazy = nn.Linear(CLASSES, CLASSES)
        return self.lazy(found)


# Control flow


class SwitchesMode(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.net.eval()
        found = self.net(x)
        self.net.train()
        return found.detach() * 0.1 + self.net(x)


# Sequences


class Gated(nn.Module):
    """A GRU that returns its state, and reads packed sequences too."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(6, 12, batch_first=True), nn.Linear(12, CLASSES)

    def forward(self, x: Any, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state = self.cells(x, state)[1]
        return self.head(state[0]), state
