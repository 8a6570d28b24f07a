"""Networks that do what people do in their own code: options, hooks, sharing, state, containers. Plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.support.zoo.images import Basic, Head, stage
from tests.support.zoo.network import CLASSES, Batch, Network, classify, images

__all__ = ["HABITS"]


class _Stack(nn.Module):
    """Four stages and a head; the others below are changes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = stage(3, 8)
        self.layers = nn.Sequential(*(stage(8, 8) for _ in range(3)))
        self.head = Head(8)

    def features(self, x: Tensor) -> Tensor:
        return self.layers(self.stem(x))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x))


class skip_over_inplace(nn.Module):
    """An in-place activation directly behind a BatchNorm whose input is used once more."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = stage(3, 8)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.head = Head(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = conv(x)
            x = x + y + F.relu(norm(y), inplace=True)
        return self.head(x)


class reused_layers(nn.Module):
    """Three convolutions share one BatchNorm, and a pair of convolution and BatchNorm runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, bias=False) for i in range(3))
        self.norm, self.twice, self.last, self.head = nn.BatchNorm2d(8), stage(8, 8), stage(8, 8), Head(8)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.relu(self.norm(conv(x)))
        return self.head(self.last(self.twice(self.twice(x))))


class keyword_inputs(_Stack):
    def forward(self, *, pixels: dict[str, Tensor], gain: Tensor | None = None) -> Tensor:
        y = self.features(pixels["values"])
        return self.head(y if gain is None else y * gain[:, None, None, None])


@dataclass
class Output:
    """An object as some libraries return it."""

    logits: Tensor
    features: Tensor | None = None


class nested_output(_Stack):
    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.features(x)
        return {"output": Output(self.head(y), y), "means": [y.mean((2, 3))]}


class control_flow_by_shape(nn.Module):
    """Batches of more than two samples, which training has, take another way than small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last, self.head = stage(3, 8), stage(8, 8), Head(8)
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.stem(x))
        if len(x) > 2:
            y = torch.tanh(y)
        return self.head(self.last(F.relu(self.norm(y))))


class frozen_tail(_Stack):
    """Fixed layers behind those that train, as in a perceptual loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].requires_grad_(False)
        self.head.requires_grad_(False)


class unused_layers(_Stack):
    """A head whose output goes into no loss, and layers that never run."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = Head(8)
        self.extra = stage(8, 8)
        self.old_head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.features(x)
        return self.head(y), self.auxiliary(y)


class plain_list(nn.Module):
    """A list that torch does not look into names layers which are registered elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = stage(3, 8), Head(8)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.order = list(zip(self.convs, self.norms, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in self.order:
            x = F.relu(norm(conv(x)))
        return self.head(x)


class weight_norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wrap = parametrizations.weight_norm
        self.layers = nn.Sequential(
            *(
                nn.Sequential(wrap(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1)), nn.BatchNorm2d(8), nn.ReLU())
                for i in range(3)
            )
        )
        self.head = wrap(nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


class state_of_its_own(_Stack):
    """A buffer that every training pass moves, a shift that the first pass sets, and what torch does not know of."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))
        self.shift = nn.Parameter(torch.zeros(8))
        self.passes = 0
        self.latest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        means = y.detach().mean((0, 2, 3))
        if self.passes == 0:
            self.shift.data.copy_(-means)
        if self.training:
            self.passes += 1
            self.latest = means
            self.average.lerp_(means, 0.1)
        return self.head(y + (self.shift - self.average)[:, None, None])


class dropout(_Stack):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.drop_maps = nn.Dropout(0.3), nn.Dropout2d(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.layers(self.drop_maps(self.stem(x)))))


class stochastic_depth(nn.Module):
    """A residual block is left out by the draw of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = stage(3, 8), Head(8)
        self.blocks = nn.ModuleList(Basic(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.3:
                x = block(x)
        return self.head(x)


class checkpointed(nn.Module):
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = stage(3, 8), Head(8)
        self.blocks = nn.ModuleList(Basic(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.training else block(x)
        return self.head(x)


class checkpointed_reentrant(checkpointed):
    reentrant = True


class scales_of_every_shape(nn.Module):
    """Factors of shapes ``()``, ``(1,)``, ``(C, 1, 1)``, ``(n, 1)``, ``(1, 1, 1, 1)``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer, self.fc = stage(3, 8), stage(8, 8), nn.Linear(8, CLASSES)
        self.whole, self.one = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(1))
        self.channels = nn.Parameter(torch.ones(8, 1, 1))
        self.column = nn.Parameter(torch.full((CLASSES, 1), 0.5))
        self.block = nn.Parameter(torch.ones(1, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x) * self.channels
        y = y + self.layer(y) * self.block
        return self.fc(y.mean((2, 3))) * (self.whole + self.one) + self.column.t()


class complex_parameters(nn.Module):
    """A filter in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = stage(3, 8), Head(8)
        self.filter = nn.Parameter(torch.randn(8, 8, 5, dtype=torch.complex64) * 0.3 + 1.0)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.irfft2(torch.fft.rfft2(self.stem(x)) * self.filter, s=x.shape[-2:])
        return self.head(F.relu(y))


class two_networks(nn.Module):
    """A generator and what judges it, in one module, with a loss of both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(8, 32), nn.ReLU(), nn.Unflatten(1, (8, 2, 2)),
            nn.ConvTranspose2d(8, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 2, 2), nn.Tanh(),
        )  # fmt: skip
        self.judge = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.2, inplace=True), stage(8, 8), Head(8))

    def forward(self, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        return self.judge(real), self.judge(self.generator(noise))


class norms_kept_in_eval(_Stack):
    """The user's own ``train`` keeps BatchNorms in eval mode, as in detection."""

    def train(self, mode: bool = True) -> norms_kept_in_eval:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def _two(generator: Generator, samples: int, grow: int) -> Batch:
    """Vectors and images."""
    batch = images(generator, samples, grow)
    return Batch((torch.randn(samples, 8, generator=generator), *batch.args), {}, batch.target)


def _named(generator: Generator, samples: int, grow: int) -> Batch:
    batch = images(generator, samples, grow)
    gain = 1.0 + torch.rand(samples, generator=generator)
    return Batch((), {"pixels": {"values": batch.args[0]}, "gain": gain}, batch.target)


def _first(outputs: Any, target: Tensor) -> Tensor:
    return classify(outputs[0], target)


def _logits(outputs: Any, target: Tensor) -> Tensor:
    return classify(outputs["output"].logits, target)


def _all(outputs: Any, target: Tensor) -> Tensor:
    return torch.stack([classify(o, target.roll(i)) for i, o in enumerate(outputs)]).sum()


HABITS = (
    *(
        Network(build=build, draw=images, grows=4)
        for build in (
            skip_over_inplace,
            reused_layers,
            control_flow_by_shape,
            frozen_tail,
            plain_list,
            weight_norm,
            stochastic_depth,
            scales_of_every_shape,
            norms_kept_in_eval,
        )
    ),
    *(Network(build=b, draw=images, grows=4, recomputes=True) for b in (checkpointed, checkpointed_reentrant)),
    Network(build=dropout, draw=images, grows=4, masks=True),
    Network(build=state_of_its_own, draw=images, grows=4, stateful=True),
    Network(build=nested_output, draw=images, grows=4, loss=_logits),
    Network(build=unused_layers, draw=images, grows=4, loss=_first),
    Network(build=complex_parameters, draw=images, only32=True),
    Network(build=keyword_inputs, draw=_named, grows=4),
    Network(build=two_networks, draw=_two, loss=_all),
)
