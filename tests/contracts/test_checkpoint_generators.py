"""Random numbers over a checkpoint: on as many ranks they go on where they stood, on others they are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import run_ranks
from tests.support.wrapped import Kind, all_weights, wrap
from torchboost.distributed import checkpoint

pytestmark = pytest.mark.dist

KINDS: tuple[Kind, ...] = ("ddp", "fsdp")
UPDATES, SAVED_AT = 6, 3


def started(kind: Kind) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 4)), kind)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Train on drawn batches, with dropout."""
    for _ in range(updates):
        model(torch.randn(8, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(root: Path) -> dict[str, list[float]]:
    """Return the last weights and numbers drawn then, after a save on the way."""
    found = {}
    for kind in KINDS:
        model, optimizer = started(kind)
        torch.manual_seed(100 + dist.get_rank())
        train(model, optimizer, SAVED_AT)
        checkpoint.save(root / kind, SAVED_AT, model, optimizer)
        train(model, optimizer, UPDATES - SAVED_AT)
        found[kind] = all_weights(model) + torch.rand(3).tolist()
    return found


def resumed(root: Path) -> dict[str, list[float]]:
    found = {}
    for kind in KINDS:
        model, optimizer = started(kind)
        torch.manual_seed(200 + dist.get_rank())
        checkpoint.load(root / kind / f"{SAVED_AT:08d}", model, optimizer)
        train(model, optimizer, UPDATES - SAVED_AT)
        found[kind] = all_weights(model) + torch.rand(3).tolist()
    return found


def test_a_network_with_dropout_resumes_bit_for_bit_on_as_many_ranks(tmp_path):
    wanted = run_ranks(whole, 2, tmp_path)
    for kind in KINDS:
        assert wanted[0][kind][:-3] == wanted[1][kind][:-3]
        assert wanted[0][kind][-3:] != wanted[1][kind][-3:], "each rank draws its own"
    assert run_ranks(resumed, 2, tmp_path) == wanted


def around_loading(root: Path) -> list[bool]:
    """Return whether a seed draws the same with and without loading."""
    same = []
    for kind in KINDS:
        model, optimizer = started(kind)
        torch.manual_seed(7)
        wanted = torch.rand(3)
        torch.manual_seed(7)
        checkpoint.load(root / kind / f"{SAVED_AT:08d}", model, optimizer)
        same.append(torch.equal(torch.rand(3), wanted))
    return same


@pytest.mark.parametrize(("wrote", "ranks"), [(2, 1), (1, 2)])
def test_on_another_number_of_ranks_the_generators_are_left_alone(wrote, ranks, tmp_path):
    run_ranks(whole, wrote, tmp_path)
    assert run_ranks(around_loading, ranks, tmp_path) == [[True, True]] * ranks
