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
from tests.support.zoo.network import CLASSES, Batch, Network, classify, images, vectors

__all__ = ["HABITS"]

Draw = Any


class _Stack(nn.Module):
    """Four stages and a head; the others below are changes of it."""

    inplace = False

    def __init__(self) -> None:
        super().__init__()
        self.stem = stage(3, 8, inplace=self.inplace)
        self.layers = nn.Sequential(*(stage(8, 8, inplace=self.inplace) for _ in range(3)))
        self.head = Head(8)

    def features(self, x: Tensor) -> Tensor:
        return self.layers(self.stem(x))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x))


class inplace_activations(_Stack):
    inplace = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x).mul(0.5)
        y += 0.1
        return self.head(y.mul_(2.0))


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


class reused_convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last, self.head = stage(3, 8), stage(8, 8), stage(8, 8), Head(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.twice(self.twice(self.first(x)))))


class reused_batch_norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, bias=False) for i in range(3))
        self.norm, self.last, self.head = nn.BatchNorm2d(8), stage(8, 8), Head(8)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.relu(self.norm(conv(x)))
        return self.head(self.last(x))


class tied_convolutions(_Stack):
    """Two convolutions hold one weight."""

    def __init__(self) -> None:
        super().__init__()
        first, second = self.layers[0], self.layers[1]
        assert isinstance(first, nn.Sequential)
        assert isinstance(second, nn.Sequential)
        second[0].weight = first[0].weight


class optional_argument(_Stack):
    """A second input that steers the features where it is given, as here."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(5, 8)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        y = self.stem(x)
        if condition is not None:
            y = y * self.condition(condition)[:, :, None, None]
        return self.head(self.layers(y))


class optional_branch(nn.Module):
    """An optional input goes through the BatchNorm too: with it, what the convolution gives is not what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last, self.head = stage(3, 8), stage(8, 8), Head(8)
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y = self.conv(self.stem(x))
        if shift is not None:
            y = y + shift[:, :, None, None]
        return self.head(self.last(F.relu(self.norm(y))))


class keyword_inputs(_Stack):
    def forward(self, *, pixels: Tensor, gain: Tensor | None = None) -> Tensor:
        y = self.features(pixels)
        return self.head(y if gain is None else y * gain[:, None, None, None])


class dictionary_input(_Stack):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.features(batch["pixels"]) * batch["gain"][:, None, None, None])


class dictionary_output(_Stack):
    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.features(x)
        return {"logits": self.head(y), "features": [y]}


class tuple_output(_Stack):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.features(x)
        return self.head(y), y


@dataclass
class Output:
    """What some libraries return."""

    logits: Tensor
    features: Tensor | None = None


class dataclass_output(_Stack):
    def forward(self, x: Tensor) -> Output:
        y = self.features(x)
        return Output(self.head(y), y)


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


class frozen_stem(_Stack):
    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)


class frozen_tail(_Stack):
    """Fixed layers behind those that train, as in a perceptual loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].requires_grad_(False)
        self.head.requires_grad_(False)


class unused_last_block(_Stack):
    def __init__(self) -> None:
        super().__init__()
        self.extra = stage(8, 8)
        self.old_head = nn.Linear(8, CLASSES)


class unused_auxiliary_head(_Stack):
    """A head that is computed and whose output goes into no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = Head(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.features(x)
        return self.head(y), self.auxiliary(y)


class parameters_on_the_root(nn.Module):
    """Kernels are parameters of the root and used by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(0.2 * torch.randn(8, 3 if i == 0 else 8, 3, 3) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.matrix = nn.Parameter(0.3 * torch.randn(CLASSES, 8))

    def forward(self, x: Tensor) -> Tensor:
        for weight, norm in zip(self.weights, self.norms, strict=True):
            x = F.relu(norm(F.conv2d(x, weight, padding=1)))
        return F.linear(x.mean((2, 3)), self.matrix)


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


class instance_forward(_Stack):
    """``forward`` of single modules is covered on the instance, as patches do."""

    def __init__(self) -> None:
        super().__init__()
        inner = self.layers[1]
        assert isinstance(inner, nn.Sequential)
        conv, norm = inner[0], inner[1]
        conv.forward = _Scaled(conv.forward, 0.5)
        norm.forward = _Scaled(norm.forward, 1.5)


class _Scaled:
    def __init__(self, forward: Any, factor: float) -> None:
        self.forward, self.factor = forward, factor

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x) * self.factor


class hooks_on_modules(_Stack):
    def __init__(self) -> None:
        super().__init__()
        inner = self.layers[1]
        assert isinstance(inner, nn.Sequential)
        inner[0].register_forward_hook(_doubled)
        inner[1].register_forward_pre_hook(_shifted)


def _doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2.0 + 0.1


def _shifted(module: nn.Module, args: Any) -> Any:
    return (torch.tanh(args[0]),)


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


class spectral_norm(_Stack):
    def __init__(self) -> None:
        super().__init__()
        inner = self.layers[1]
        assert isinstance(inner, nn.Sequential)
        parametrizations.spectral_norm(inner[0])


class moving_average(_Stack):
    """A buffer that every training pass moves, and a counter that torch does not know."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))
        self.seen = 0
        self.latest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        if self.training:
            self.seen += 1
            self.latest = y.detach().mean((0, 2, 3))
            self.average.lerp_(self.latest, 0.1)
        return self.head(y - self.average[:, None, None])


class initialised_by_data(_Stack):
    """The first pass sets a shift by what it sees, once."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        if not self.ready:
            self.ready = True
            with torch.no_grad():
                self.shift.copy_(-y.mean((0, 2, 3)))
        return self.head(y + self.shift[:, None, None])


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


class _Checkpointed(nn.Module):
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


class checkpointed(_Checkpointed):
    pass


class checkpointed_reentrant(_Checkpointed):
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


class linear_of_one_feature(nn.Module):
    """``Linear(1, n)``, as for the time in a diffusion model."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.body = nn.Linear(1, 12), nn.Linear(8, 12)
        self.layers = nn.Sequential(nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.body(x) + self.time(x[:, :1]))


class conv_of_one_channel(nn.Module):
    """``Conv2d(1, n, 1)``, as over grey images."""

    def __init__(self) -> None:
        super().__init__()
        self.grey, self.stem, self.layer, self.head = nn.Conv2d(1, 8, 1), stage(8, 8), stage(8, 8), Head(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.stem(self.grey(x))))


class complex_parameters(nn.Module):
    """A filter in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = stage(3, 8), Head(8)
        self.filter = nn.Parameter(torch.randn(8, 8, 5, dtype=torch.complex64) * 0.3 + 1.0)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.irfft2(torch.fft.rfft2(self.stem(x)) * self.filter, s=x.shape[-2:])
        return self.head(F.relu(y))


class double_precision(_Stack):
    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


class mixed_precisions(_Stack):
    """A head in float64 on a body in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.head.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).double())


class stored_channels_last(_Stack):
    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous(memory_format=torch.channels_last))


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


class several_tasks(_Stack):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"sort": Head(8), "other": Head(8)})

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.features(x)
        return [head(y) for head in self.heads.values()]


class reads_attributes(nn.Module):
    """``forward`` asks its BatchNorm how wide it is."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last, self.head = stage(3, 8), stage(8, 8), Head(8)
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(self.stem(x))))
        return self.head(self.last(y[:, : self.norm.num_features] * self.conv.out_channels / 8))


class norms_kept_in_eval(_Stack):
    """The user's own ``train`` keeps BatchNorms in eval mode, as in detection."""

    def train(self, mode: bool = True) -> norms_kept_in_eval:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def _two(features: int, *, first: bool = False) -> Draw:
    """Images and vectors, in that order or the other."""

    def draw(generator: Generator, samples: int, grow: int) -> Batch:
        batch = images()(generator, samples, grow)
        vector = torch.randn(samples, features, generator=generator)
        return Batch((vector, *batch.args) if first else (*batch.args, vector), {}, batch.target)

    return draw


def _named(*, as_dict: bool) -> Draw:
    def draw(generator: Generator, samples: int, grow: int) -> Batch:
        batch = images()(generator, samples, grow)
        given = {"pixels": batch.args[0], "gain": 1.0 + torch.rand(samples, generator=generator)}
        return Batch((given,), {}, batch.target) if as_dict else Batch((), given, batch.target)

    return draw


def _first(outputs: Any, target: Tensor) -> Tensor:
    return classify(outputs[0], target)


def _logits(outputs: Any, target: Tensor) -> Tensor:
    return classify(outputs["logits"] if isinstance(outputs, dict) else outputs.logits, target)


def _all(outputs: Any, target: Tensor) -> Tensor:
    return torch.stack([classify(o, target.roll(i)) for i, o in enumerate(outputs)]).sum()


HABITS = (
    *(
        Network(build=build, draw=images(), grows=4)
        for build in (
            inplace_activations,
            skip_over_inplace,
            reused_convolution,
            reused_batch_norm,
            control_flow_by_shape,
            frozen_stem,
            frozen_tail,
            unused_last_block,
            parameters_on_the_root,
            plain_list,
            instance_forward,
            hooks_on_modules,
            weight_norm,
            spectral_norm,
            stochastic_depth,
            scales_of_every_shape,
            stored_channels_last,
            reads_attributes,
            norms_kept_in_eval,
        )
    ),
    *(Network(build=b, draw=images(), grows=4, recomputes=True) for b in (checkpointed, checkpointed_reentrant)),
    Network(build=tied_convolutions, draw=images(), grows=4, ties=(("layers.0.0", "layers.0.1.weight"),)),
    Network(build=dropout, draw=images(), grows=4, masks=True),
    *(Network(build=b, draw=images(), grows=4, stateful=True) for b in (moving_average, initialised_by_data)),
    *(Network(build=b, draw=images(), grows=4, loss=_logits) for b in (dictionary_output, dataclass_output)),
    *(Network(build=b, draw=images(), grows=4, loss=_first) for b in (tuple_output, unused_auxiliary_head)),
    *(Network(build=b, draw=images(), grows=4, only32=True) for b in (double_precision, mixed_precisions)),
    Network(build=complex_parameters, draw=images(), only32=True),
    Network(build=conv_of_one_channel, draw=images(1), grows=4),
    Network(build=linear_of_one_feature, draw=vectors()),
    Network(build=optional_argument, draw=_two(5), grows=4),
    Network(build=optional_branch, draw=_two(8), grows=4),
    Network(build=keyword_inputs, draw=_named(as_dict=False), grows=4),
    Network(build=dictionary_input, draw=_named(as_dict=True), grows=4),
    Network(build=two_networks, draw=_two(8, first=True), loss=_all),
    Network(build=several_tasks, draw=images(), grows=4, loss=_all),
)
