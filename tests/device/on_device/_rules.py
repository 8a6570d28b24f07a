"""Parameters, gradients and steps of the optimizer rules, on either device."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.optimizers import CASES, shapes_of
from torchboost.optim import AdamW, Centralize, ClipNorm

DEVICES = ("cpu", "cuda")
OPTIONS: dict[str, Callable[..., Optimizer]] = {
    "AdamW-transforms": partial(AdamW, transforms=(Centralize(), ClipNorm(1.0))),
    "AdamW-fused-transforms": partial(AdamW, fused=True, transforms=(Centralize(), ClipNorm(1.0))),
    "AdamW-schedule": partial(AdamW, lr=lambda step: 0.01 / (step + 1)),
    "AdamW-nesterov": partial(AdamW, nesterov=True),
}
RULES: dict[str, Callable[..., Optimizer]] = {**CASES, **OPTIONS}
LARGE = (64, 65)
"""More entries than one block of a kernel."""


def parameters(name: str, device: str) -> list[nn.Parameter]:
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = [*shapes_of(name), LARGE]
    return [nn.Parameter(torch.randn(s, generator=generator, device="cpu").to(device)) for s in shapes]


def step(optimizer: Optimizer, params: Iterable[nn.Parameter], number: int) -> None:
    generator = torch.Generator("cpu").manual_seed(1000 + number)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, device="cpu").to(param.device)
    optimizer.step()


def trained(name: str, device: str, steps: int = 3) -> tuple[Optimizer, list[nn.Parameter]]:
    params = parameters(name, device)
    optimizer = RULES[name](params)
    for number in range(steps):
        step(optimizer, params, number)
    return optimizer, params


def reloaded(state: Any, location: str) -> Any:
    """Save and load, as a checkpoint does."""
    written = io.BytesIO()
    torch.save(state, written)
    written.seek(0)
    return torch.load(written, map_location=location, weights_only=True)


def resumed(name: str, location: str) -> tuple[Optimizer, list[nn.Parameter]]:
    """Return what ``trained`` returns, but as a new optimizer that loaded a checkpoint to ``location``."""
    before, params = trained(name, "cuda")
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer = RULES[name](copies)
    optimizer.load_state_dict(reloaded(before.state_dict(), location))
    return optimizer, copies


def numbers(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.detach().cpu() for param in params]
