"""What the zoo says of each network: how to build it, what it reads, and what its loss is. Plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

__all__ = [
    "CLASSES",
    "Batch",
    "Network",
    "classify",
    "images",
    "labelled_tokens",
    "next_token",
    "sequences",
    "tokens",
    "vectors",
    "volumes",
]

CLASSES = 4
VOCABULARY = 16


class Batch(NamedTuple):
    """The inputs of one forward pass, and what its loss compares the outputs with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any

    def to(self, dtype: torch.dtype) -> Batch:
        """Return the batch with its floating-point tensors in ``dtype``."""

        def cast(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(dtype) if value.is_floating_point() else value
            if isinstance(value, dict):
                return {key: cast(inner) for key, inner in value.items()}
            return value

        return Batch(tuple(map(cast, self.args)), cast(self.kwargs), cast(self.target))


Draw = Callable[[Generator, int, int], Batch]
"""Draws a batch of so many samples, each so much larger than usual (pixels of a side, or steps of a sequence)."""


def classify(outputs: Any, target: Tensor) -> Tensor:
    """Cross entropy of logits of shape ``(n, classes)``."""
    return F.cross_entropy(outputs, target)


def next_token(outputs: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of logits of shape ``(n, length, vocabulary)``."""
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten())


@dataclass(frozen=True, eq=False, kw_only=True)
class Network:
    """One shape of network.

    Args:
        build: Returns a model; the caller seeds.
        draw: Returns a batch.
        loss: Called with the outputs and the target.
        samples: In a batch.
        grows: How much larger the samples of a second input shape are; 0 if the network reads one size only.
        ties: A module whose weight another one after it uses too, and a parameter of the block that the module is in.
        sparse: Whether some gradient is sparse.
        masks: Whether dropout draws masks, which torch lays over the elements in the order of memory.
        recomputes: Whether parts of the forward pass run again in the backward pass.
        stateful: Whether the model holds state outside its ``state_dict``, so that no checkpoint of it resumes exactly.
        only32: Whether it computes in its own precision only.
        name: Of the builder.
    """

    build: Callable[[], nn.Module]
    draw: Draw
    loss: Callable[[Any, Any], Tensor] = classify
    samples: int = 6
    grows: int = 0
    ties: tuple[tuple[str, str], ...] = ()
    sparse: bool = False
    masks: bool = False
    recomputes: bool = False
    stateful: bool = False
    only32: bool = False

    @property
    def name(self) -> str:
        """The name of the builder."""
        return self.build.__name__

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Build the model from the same seed every time."""
        torch.manual_seed(0)
        model = self.build()
        if dtype is not torch.float32 and not self.only32:
            model.to(dtype)
        torch.manual_seed(2)
        return model

    def batch(self, generator: Generator, dtype: torch.dtype = torch.float32, *, more: int = 0, grow: int = 0) -> Batch:
        """Draw a batch, of ``more`` samples than usual, each larger by ``grow``."""
        batch = self.draw(generator, self.samples + more, grow)
        return batch if self.only32 else batch.to(dtype)


def _labels(generator: Generator, samples: int) -> Tensor:
    return torch.randint(0, CLASSES, (samples,), generator=generator)


def images(generator: Generator, samples: int, grow: int) -> Batch:
    """Images ``(n, 3, 8, 8)`` and labels."""
    return Batch((torch.randn(samples, 3, 8 + grow, 8 + grow, generator=generator),), {}, _labels(generator, samples))


def vectors(generator: Generator, samples: int, grow: int) -> Batch:
    """Vectors ``(n, 8)`` and labels."""
    return Batch((torch.randn(samples, 8, generator=generator),), {}, _labels(generator, samples))


def sequences(generator: Generator, samples: int, grow: int) -> Batch:
    """Sequences ``(n, 5, 5)``, features last, and labels."""
    return Batch((torch.randn(samples, 5 + grow, 5, generator=generator),), {}, _labels(generator, samples))


def volumes(generator: Generator, samples: int, grow: int) -> Batch:
    """Volumes ``(n, 2, 4, 4, 4)`` and labels."""
    return Batch((torch.randn(samples, 2, *[4 + grow] * 3, generator=generator),), {}, _labels(generator, samples))


def tokens(generator: Generator, samples: int, grow: int) -> Batch:
    """Tokens ``(n, 6)`` with the tokens that follow."""
    text = torch.randint(0, VOCABULARY, (samples, 6 + grow + 1), generator=generator)
    return Batch((text[:, :-1],), {}, text[:, 1:])


def labelled_tokens(generator: Generator, samples: int, grow: int) -> Batch:
    """Tokens ``(n, 6)`` and labels."""
    batch = tokens(generator, samples, grow)
    return Batch(batch.args, {}, _labels(generator, samples))
