"""Networks over images, volumes and vectors: the families that people train. Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.zoo.network import CLASSES, Network, images, vectors, volumes

__all__ = ["IMAGES", "Basic", "Head", "stage"]


def stage(inputs: int, outputs: int, *, inplace: bool = False, **options: int) -> nn.Sequential:
    """A 3 x 3 convolution without bias, its BatchNorm and ReLU."""
    options = {"padding": 1, **options}
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, bias=False, **options), nn.BatchNorm2d(outputs), nn.ReLU(inplace=inplace)
    )


class Head(nn.Module):
    """The mean over all places, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(2).mean(2))


def mlp_batch_norm() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs in (8, 16, 16, 16):
        layers += [nn.Linear(inputs, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16, CLASSES))


def conv_batch_norm() -> nn.Module:
    return nn.Sequential(stage(3, 8), *(stage(8, 8) for _ in range(3)), Head(8))


def conv_other_norms() -> nn.Module:
    norms = (nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True), nn.LayerNorm([8, 8, 8]))
    layers = ((nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), norm, nn.ReLU()) for i, norm in enumerate(norms))
    return nn.Sequential(*(part for layer in layers for part in layer), Head(8))


class Basic(nn.Module):
    """A residual block of two convolutions; ``inplace`` writes over what it can, as torchvision does."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, *, inplace: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.act = nn.ReLU(inplace=inplace)
        self.inplace = inplace
        self.down = None
        if stride > 1 or inputs != outputs:
            self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        skip = x if self.down is None else self.down(x)
        if self.inplace:
            y += skip
            return self.act(y)
        return self.act(y + skip)


def resnet_basic_inplace() -> nn.Module:
    blocks = (Basic(8, 8, inplace=True), Basic(8, 12, 2, inplace=True), Basic(12, 12, inplace=True))
    return nn.Sequential(stage(3, 8, inplace=True), *blocks, Head(12))


class PreAct(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.bn1(x), inplace=True))
        return x + self.conv2(F.relu(self.bn2(y), inplace=True))


def resnet_preact_inplace() -> nn.Module:
    blocks = [PreAct(8) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.BatchNorm2d(8), nn.ReLU(True), Head(8))


class densenet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = stage(3, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8 + 4 * i), nn.ReLU(), nn.Conv2d(8 + 4 * i, 4, 3, padding=1, bias=False))
            for i in range(3)
        )
        self.norm = nn.BatchNorm2d(20)
        self.head = Head(20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.head(F.relu(self.norm(x), inplace=True))


class Inverted(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        wide = 2 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skips = inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.skips else self.body(x)


def mobilenet() -> nn.Module:
    return nn.Sequential(stage(3, 8), Inverted(8, 8), Inverted(8, 12), Inverted(12, 12), Head(12))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.layer_scale = nn.Parameter(torch.full((width, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return x + self.layer_scale * y


def convnext() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 2, 2), *(ConvNeXtBlock(8) for _ in range(3)), Head(8))


class lenet(nn.Module):
    """``view`` over channels, height and width at once, which reads memory in channels-first order only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, 2, 1)
        self.fc1, self.fc2 = nn.Linear(8 * 16, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.fc2(F.relu(self.fc1(x.view(-1, 8 * 16))))


def conv_three_dimensions() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs in (2, 6, 6):
        layers += [nn.Conv3d(inputs, 6, 3, padding=1, bias=False), nn.BatchNorm3d(6), nn.ReLU()]
    return nn.Sequential(*layers, Head(6))


def conv_transposed() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(3, 8, 2, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 8, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), Head(6),
    )  # fmt: skip


class odd_batch_norms(nn.Module):
    """BatchNorms with a cumulative average, without weights, without statistics, and with another ``eps``."""

    def __init__(self) -> None:
        super().__init__()
        norms = (
            nn.BatchNorm2d(8, momentum=None),
            nn.BatchNorm2d(8, affine=False),
            nn.BatchNorm2d(8, track_running_stats=False),
            nn.BatchNorm2d(8, momentum=0.5, eps=1e-2),
        )
        layers = (nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), n) for i, n in enumerate(norms))
        self.layers = nn.Sequential(*layers)
        self.head = Head(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


IMAGES = (
    Network(build=mlp_batch_norm, draw=vectors),
    *(
        Network(build=build, draw=images, grows=4)
        for build in (
            conv_batch_norm,
            resnet_basic_inplace,
            resnet_preact_inplace,
            densenet,
            mobilenet,
            convnext,
            conv_transposed,
            odd_batch_norms,
        )
    ),
    Network(build=conv_other_norms, draw=images),
    Network(build=lenet, draw=images),
    Network(build=conv_three_dimensions, draw=volumes, grows=2),
)
