"""Networks of every kind with a frozen front, and one training step of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import batch_for, cnn, mlp
from torchboost.algorithms.grad_freeze.cache import FastPrefix
from torchboost.algorithms.grad_freeze.freezer import Freezing, prefixes_of
from torchboost.algorithms.grad_freeze.schedule import repeated
from torchboost.graph.blocks import blocks_of
from torchboost.workloads.models import GPT, VGG, BasicBlock, Bottleneck, ResNet

__all__ = [
    "MAKERS",
    "Net",
    "as_plain",
    "freeze",
    "frozen_cnn",
    "frozen_mlp",
    "gpt",
    "inputs_for",
    "named",
    "scheduled",
    "step",
    "with_rows",
]  # fmt: skip


def freeze(*modules: nn.Module) -> None:
    for module in modules:
        module.requires_grad_(False)
        for inner in module.modules():
            if isinstance(inner, nn.BatchNorm2d):
                inner.eval()


def moved(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_var is not None:
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return model


def resnet(share: float, block: Any = Bottleneck) -> ResNet:
    model = ResNet(block, [1, 1, 1, 1], width=4)
    moved(model)
    blocks = [block for stage in model.stages for block in stage]
    freeze(model.stem, *blocks[: int(share * len(blocks))])
    return model


def vgg() -> VGG:
    model = VGG((1, 1, 1), width=4)
    moved(model)
    freeze(model.features[:7])
    return model


def gpt(tied: bool) -> GPT:
    model = GPT(16, context=8, layers=2, heads=2, width=8)
    if not tied:
        model.head.weight = nn.Parameter(model.tokens.weight.detach().clone())
    freeze(model.positions, model.blocks[0])
    if not tied:
        freeze(model.tokens)
    return model


def frozen_mlp() -> nn.Sequential:
    model = mlp()
    freeze(model[0], model[2])
    return model


def frozen_cnn() -> nn.Sequential:
    model = cnn()
    moved(model)
    freeze(model[:7])
    return model


MAKERS: dict[str, Callable[[], Any]] = {
    "resnet 25%": lambda: resnet(0.25),
    "resnet 50%": lambda: resnet(0.5),
    "resnet 75%": lambda: resnet(0.75),
    "basic 50%": lambda: resnet(0.5, BasicBlock),
    "vgg": vgg,
    "cnn": frozen_cnn,
    "gpt": lambda: gpt(False),
    "mlp": frozen_mlp,
}


def inputs_for(model: nn.Module, seed: int = 0, count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, GPT):
        x = torch.randint(16, (count, 8), generator=generator)
        return x, x.roll(1, 1)
    if isinstance(model, (ResNet, VGG)):
        return torch.randn(count, 3, 32, 32, generator=generator), torch.randint(10, (count,), generator=generator)
    x, y = batch_for(model, generator)
    return x[:count], y[:count]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    model.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    return loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def as_plain(model: nn.Module) -> Tensor:
    twin = copy.deepcopy(model)
    return twin(inputs_for(model)[0].to(next(model.parameters()).dtype))


class Net(nn.Module):
    """Layers ``a`` (frozen) and ``b`` (trainable), a frozen table, a buffer, and a forward that a test gives."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.a2, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Embedding(8, 4)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(4))
        for module in (self.a, self.a2, self.table):
            module.requires_grad_(False)
        self.run = run

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, x, *args, **kwargs)


def with_rows(model: nn.Module, budget: int = 2**22) -> FastPrefix:
    return FastPrefix(model, budget)


def named(fast: FastPrefix, *args: Any, **kwargs: Any) -> Any:
    with fast.samples(range(len(args[0]))):
        return fast._model(*args, **kwargs)


def scheduled(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Sequence[int],
    *,
    norms: Any = "update",
    **options: Any,
) -> Freezing:
    """Freeze so many blocks at each update; the list begins again at its end."""
    blocks = blocks_of(model)
    prefixes = prefixes_of(blocks, range(len(blocks)), norms)
    return Freezing(model, optimizer, prefixes, repeated(tuple(schedule)), **options)
