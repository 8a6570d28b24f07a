"""Small networks that train on either device from the same weights and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import BottleneckNet, TinyGPT, batch_for, cnn

NETWORKS: dict[str, Callable[[], nn.Module]] = {"cnn": cnn, "bottleneck": BottleneckNet, "gpt": TinyGPT}
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
HALF: dict[str, Any] = {"rtol": 0.05, "atol": 0.02}
"""Of losses in bfloat16, which the devices round in other places."""


def network(name: str, device: str) -> nn.Module:
    with torch.device("cpu"):
        torch.manual_seed(0)
        return NETWORKS[name]().to(device)


def batch(model: nn.Module, number: int, device: str) -> tuple[Tensor, Tensor]:
    with torch.device("cpu"):
        inputs, labels = batch_for(model, torch.Generator("cpu").manual_seed(number))
    return inputs.to(device), labels.to(device)


def losses(model: nn.Module, optimizer: Any, device: str, *, steps: int = 4, scaler: Any = None) -> list[float]:
    """Train, and return the loss of each batch."""
    return [float(step(model, optimizer, device, number, scaler=scaler)) for number in range(steps)]


def step(model: nn.Module, optimizer: Any, device: str, number: int, *, scaler: Any = None) -> Tensor:
    inputs, labels = batch(model, number, device)
    loss = F.cross_entropy(model(inputs), labels)
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    return loss.detach()


@contextmanager
def default_device(device: str | None) -> Iterator[None]:
    """Let tensors without a device lie on this one, as a user's ``torch.set_default_device`` does."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
