"""Train on fixed data and compare the weights of two runs bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import batch_for
from torchboost.core.algorithm import Target

__all__ = ["identical", "snapshot", "train"]

State = dict[str, bytes]


def train(
    loop: Target | Callable[..., Any], steps: int, seed: int, *, model: nn.Module | None = None, size: int = 8
) -> list[State]:
    """Train ``steps`` batches drawn from ``seed`` and return a :func:`snapshot` of the model after each.

    Args:
        loop: A target, trained by the plain loop ``backward, step, zero_grad``; or a callable that trains one
            batch, called with inputs and labels.
        steps: Number of batches.
        seed: Of the batches; also seeds torch, so that dropout repeats.
        model: What the callable trains; a target knows its own.
        size: Samples per batch.
    """
    if isinstance(loop, Target):
        model = loop.model
        step = _plain_step(loop)
    else:
        step = loop
    if model is None:
        raise TypeError("a callable needs model=, the module whose weights are compared")
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    states = []
    for _ in range(steps):
        step(*batch_for(model, generator, size))
        states.append(snapshot(model))
    return states


def snapshot(model: nn.Module) -> State:
    """Return the bytes of every parameter and buffer, by name, independent of the memory format."""
    return {name: _bytes(tensor) for name, tensor in model.state_dict().items()}


def identical(a: Sequence[State], b: Sequence[State]) -> bool:
    """Whether two runs went through the same weights, bit for bit; runs of no steps are not comparable."""
    if not a or not b:
        raise ValueError("a run of no steps proves nothing")
    return list(a) == list(b)


def _plain_step(target: Target) -> Callable[[Tensor, Tensor], None]:
    def step(inputs: Tensor, labels: Tensor) -> None:
        F.cross_entropy(target.model(inputs), labels).backward()
        target.optimizer.step()
        target.optimizer.zero_grad()

    return step


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
