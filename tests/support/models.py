"""Tiny models that train in milliseconds and still have the structure the algorithms look for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["BottleneckNet", "TinyGPT", "batch_for", "cnn", "mlp"]

CLASSES = 4
IMAGE = (3, 8, 8)
FEATURES = 8
VOCABULARY = 16
CONTEXT = 8


def mlp() -> nn.Sequential:
    """Three linear layers over inputs of shape ``(n, 8)``; ``(n, 4)`` out."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def cnn() -> nn.Sequential:
    """Two convolutions with BatchNorm over images of shape ``(n, 3, 8, 8)``; ``(n, 4)`` out."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


class _Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, outside: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outside, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class BottleneckNet(nn.Module):
    """A stem, two bottleneck blocks (the first with a projection) and a head, over images ``(n, 3, 8, 8)``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(_Bottleneck(8, 4, 16), _Bottleneck(16, 4, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


class _Decoder(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """Two decoder blocks over tokens of shape ``(n, 8)``; next-token logits ``(n, 16, 8)``, classes second."""

    def __init__(self, width: int = 16, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(_Decoder(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


def batch_for(model: nn.Module, generator: torch.Generator, size: int = 8) -> tuple[Tensor, Tensor]:
    """Return random inputs and labels that fit one of the models above and ``cross_entropy``."""
    if any(isinstance(module, nn.Embedding) for module in model.modules()):
        tokens = torch.randint(VOCABULARY, (size, CONTEXT + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    convolutional = any(isinstance(module, nn.Conv2d) for module in model.modules())
    shape = IMAGE if convolutional else (FEATURES,)
    return torch.randn(size, *shape, generator=generator), torch.randint(CLASSES, (size,), generator=generator)
