"""Architectures that people train: without some BatchNorms the first step is finite, and the weights go home."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.conv_nets import ForeignNames, InvertedResidual, resnet, vgg
from tests.support.removal_nets import NormAct, preact_net, repvgg_net
from torchboost.algorithms.less_bn import less_bn
from torchboost.errors import NoEffectWarning
from torchboost.workloads.models import Bottleneck, ResNet


def unit(inside: int, outside: int, kernel: int = 3, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inside, outside, kernel, padding=kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]


def pooled(*body: nn.Module, width: int = 8) -> nn.Sequential:
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))


class Joined(nn.Module):
    """Branches over one input, joined by a function."""

    def __init__(self, join: Callable[..., Tensor], *branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(*branch) for branch in branches)
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, *[branch(x) for branch in self.branches])


def concatenated(x: Tensor, *ys: Tensor) -> Tensor:
    return torch.cat([x, *ys], 1)


def gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return F.relu_(x + y * gate.sigmoid())


def shuffled(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def scaled(x: Tensor, y: Tensor) -> Tensor:
    y *= 0.2
    y += x
    return y


class Encoder(nn.Module):
    """Down, up and a skip between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Sequential(*unit(3, 8)), nn.Sequential(nn.MaxPool2d(2), *unit(8, 8), *unit(8, 8))
        self.up, self.norm = nn.ConvTranspose2d(8, 8, 2, 2, bias=False), nn.BatchNorm2d(8)
        self.tail, self.head = nn.Sequential(*unit(16, 8), *unit(8, 8)), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.relu(self.norm(self.up(self.down(x))), inplace=True)
        return self.head(self.tail(torch.cat([x, y], 1))).mean((2, 3))


def flat(sides: int) -> nn.Sequential:
    """Convolutions of one or three dimensions over images, reshaped."""
    conv, norm = (nn.Conv1d, nn.BatchNorm1d) if sides == 1 else (nn.Conv3d, nn.BatchNorm3d)
    reshape = nn.Flatten(2) if sides == 1 else nn.Unflatten(2, (4, 4))
    body = [m for wide in (3, 8, 8, 8) for m in (conv(wide, 8, 3, padding=1, bias=False), norm(8), nn.ReLU(True))]
    pool = nn.AdaptiveAvgPool1d(1) if sides == 1 else nn.AdaptiveAvgPool3d(1)
    return nn.Sequential(reshape, *body, pool, nn.Flatten(), nn.Linear(8, 4))


def mlp() -> nn.Sequential:
    body = [m for wide in (768, 16, 16, 16) for m in (nn.Linear(wide, 16), nn.BatchNorm1d(16), nn.ReLU(True))]
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(16, 4))


def dense() -> nn.Sequential:
    growing = [Joined(concatenated, [nn.BatchNorm2d(w), nn.ReLU(True), *unit(w, 8)[:2]]) for w in (8, 16)]
    return pooled(*unit(3, 8), *growing, width=24)


def squeeze() -> nn.Sequential:
    gate = [nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1)]
    return pooled(*unit(3, 8), *[Joined(gated, [*unit(8, 8), *unit(8, 8)[:2]], gate) for _ in range(2)])


def mobile() -> nn.Sequential:
    return pooled(*unit(3, 8), InvertedResidual(8, 8), InvertedResidual(8, 8), InvertedResidual(8, 8))


def acting() -> nn.Sequential:
    return pooled(*[m for wide in (3, 8, 8, 8) for m in (nn.Conv2d(wide, 8, 3), NormAct(8, nn.SiLU(inplace=True)))])


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "vgg": vgg,
    "resnet, basic": lambda: resnet(2, 2),
    "resnet, bottleneck": lambda: ResNet(Bottleneck, [1, 2], width=4),
    "other names": ForeignNames,
    "pre-activation, in place": lambda: preact_net("module"),
    "pre-activation, method": lambda: preact_net("method"),
    "repvgg": repvgg_net,
    "mobilenet": mobile,
    "depthwise": lambda: pooled(*unit(3, 8), *[m for _ in range(3) for m in (*unit(8, 8, 3, 8), *unit(8, 8, 1))]),
    "squeeze and excitation": squeeze,
    "shuffle": lambda: pooled(*unit(3, 8), *[Joined(shuffled, [*unit(8, 8, 3, 2), *unit(8, 8)[:2]]) for _ in range(2)]),
    "dense": dense,
    "inception": lambda: pooled(*unit(3, 8), Joined(concatenated, [*unit(8, 8)], [*unit(8, 8, 1)]), width=24),
    "scaled in place": lambda: pooled(*unit(3, 8), *[Joined(scaled, [*unit(8, 8), *unit(8, 8)[:2]]) for _ in range(2)]),
    "encoder and decoder": Encoder,
    "one dimension": lambda: flat(1),
    "three dimensions": lambda: flat(3),
    "perceptron": mlp,
    "activation in the norm": acting,
}


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).eval()(x)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_the_first_step_is_finite_and_the_weights_go_home(name):
    for folded in (False, True):
        torch.manual_seed(0)
        build, x = ARCHITECTURES[name], torch.randn(4, 3, 16, 16)
        model = build()
        plain = copy.deepcopy(model)
        if folded:
            for _ in range(2):
                model(x)
        before = evaluated(model, x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoEffectWarning)
            report = less_bn(model)
        if folded:
            assert (evaluated(model, x) - before).abs().max() <= 1e-4 * before.abs().max()
        elif name not in ("dense", "inception"):
            assert report.removed
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = F.cross_entropy(model(x), torch.arange(4))
        loss.backward()
        assert loss.isfinite()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        state = model.state_dict()
        plain.load_state_dict(state)
        expected = evaluated(model, x)
        assert (evaluated(plain, x) - expected).abs().max() <= 1e-5 * expected.abs().max()
        again = copy.deepcopy(model)
        for parameter in again.parameters():
            nn.init.zeros_(parameter)
        again.load_state_dict(state)
        assert all(
            torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True)
        )
