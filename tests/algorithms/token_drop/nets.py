"""Small transformers, what their blocks compute by hand, and a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.algorithms import TokenDrop, drop_tokens
from torchboost.algorithms.token_drop.dropping import TokenDropping
from torchboost.workloads.models import GPT

WORDS, LENGTH, WIDTH = 40, 16, 16


def gpt(layers: int = 4, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(WORDS, context=LENGTH, layers=layers, heads=2, width=WIDTH)


def tokens(seed: int = 0, batch: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(5, WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def start(model: nn.Module, *, seed: int = 0, rank: int = 0, total_steps: int = 40, **settings: Any):
    """Return an optimizer, and the effect on the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, drop_tokens(
        model, optimizer, TokenDrop(total_steps=total_steps, **settings), seed=seed, rank=rank
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    for step in steps:
        loss_of(model, tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def watched(blocks: Sequence[nn.Module], run: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """Return the arguments and the output of every call of blocks during a run."""
    calls: list[tuple[Any, ...]] = []
    handles = [
        block.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True)  # pyright: ignore
        for block in blocks
    ]
    run()
    for handle in handles:
        handle.remove()
    return calls


def computed(before: Tensor, after: Tensor, axis: int = 1) -> Tensor:
    """Return which tokens a block has computed, from what went in and what came out."""
    same = (before == after).movedim(axis, 0).flatten(1).all(1)
    return (~same).nonzero().squeeze(1)


def kept_of(dropping: TokenDropping, place: int, length: int = LENGTH) -> Tensor:
    kept = dropping._kept(place, length, torch.device("cpu"))
    assert kept is not None
    return kept
