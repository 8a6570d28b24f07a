"""A small network with its batch and its loop, and the hooks that an optimizer has."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    block = [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def pair(make=small_net) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 3, 8, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    x, y = batch()
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def hooks(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def in_one_line(text: str) -> str:
    """A text without the breaks and columns of a table."""
    return " ".join(text.split())
