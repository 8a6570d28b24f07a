"""Convolutional networks of every kind whose BatchNorms matter, small and untrained, under names that help nobody."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = [
    "Basic",
    "ForeignNames",
    "InvertedResidual",
    "PreActNet",
    "RefusesTracing",
    "names_of_norms",
    "outputs",
    "resnet",
    "train_a_little",
    "vgg",
]


def vgg(stages: tuple[int, ...] = (2, 2, 3), width: int = 4, norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    """A plain stack with pooling and a two-layer classifier, for images (n, 3, 16, 16)."""
    layers: list[nn.Module] = []
    channels = 3
    for count in stages:
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), norm(width), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 4)]
    return nn.Sequential(*layers, *head)


class Basic(nn.Module):
    """A post-activation basic block with torchvision's names."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = None
        if inside != outside or stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


def resnet(*layers: int) -> nn.Sequential:
    """A stem, stages of basic blocks with torchvision's names, and a head; images (n, 3, 16, 16)."""
    modules, width = [nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()], 4
    for index, count in enumerate(layers):
        for position in range(count):
            outside = 4 * 2**index
            modules.append(Basic(width, outside, 2 if index and not position else 1))
            width = outside
    return nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))


class ForeignNames(nn.Module):
    """A residual network whose names lie: the convolution is called ``bn``, the BatchNorm ``linear``."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.relu = nn.BatchNorm2d(4)
        self.downsample = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.linear = nn.BatchNorm2d(4)
        self.bn = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.conv1 = nn.BatchNorm2d(8)
        self.bn1 = nn.Conv2d(4, 8, 1, bias=False)
        self.main = nn.BatchNorm2d(8)
        self.conv = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.relu(self.fc(x)))
        side = self.main(self.bn1(x))
        x = self.conv1(self.bn(torch.relu(self.linear(self.downsample(x)))))
        return self.conv(torch.add(side, x).relu().mean((2, 3)))


class _PreAct(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inside), nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(outside), nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inside, outside, 1, bias=False) if inside != outside else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x))
        side = x if self.shortcut is None else self.shortcut(y)
        return self.conv2(F.relu(self.bn2(self.conv1(y)))) + side


class PreActNet(nn.Module):
    """ResNetV2: BatchNorm before the convolution, one at the end; images (n, 3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(_PreAct(4, 4), _PreAct(4, 8), _PreAct(8, 8))
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.blocks(self.stem(x)))).mean((2, 3)))


class InvertedResidual(nn.Module):
    """MobileNet's block with squeeze-and-excitation in the middle; adds its input where the shapes allow."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        wide = 2 * inside
        self.skip = inside == outside and stride == 1
        self.expand = nn.Sequential(nn.Conv2d(inside, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU())
        self.depth = nn.Sequential(
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU()
        )
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 2, 1), nn.ReLU(), nn.Conv2d(2, wide, 1))
        self.project = nn.Sequential(nn.Conv2d(wide, outside, 1, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.expand(x))
        y = self.project(y * torch.sigmoid(self.gate(y)))
        return x + y if self.skip else y


class RefusesTracing(nn.Module):
    """Torchvision's layout behind a forward pass that neither a symbolic trace nor a lone image gets through."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.layers = nn.Sequential(Basic(4, 4), Basic(4, 8, 2), Basic(8, 8))
        self.fc = nn.Linear(8, 4)

    def forward(self, images: Tensor, scale: Tensor) -> Tensor:
        if float(scale) > 0:
            images = images * scale
        return self.fc(self.layers(self.relu(self.bn1(self.conv1(images)))).mean((2, 3)))


def names_of_norms(model: nn.Module) -> list[str]:
    """Return the names of the BatchNorms that are left."""
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return what the model returns in eval mode, without gradients; its mode stays."""
    was = model.training
    with torch.no_grad():
        out = model.eval()(x)
    model.train(was)
    return out


def train_a_little(model: nn.Module, size: int = 16, steps: int = 3) -> torch.optim.Optimizer:
    """Move all parameters and statistics away from their initial values; return the optimizer, with momentum."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    for _ in range(steps):
        out = model(torch.randn(8, 3, size, size, generator=generator) * 2 + 0.5)
        out = out if isinstance(out, Tensor) else out.logits
        F.cross_entropy(out, torch.randint(out.shape[1], (8,), generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer
