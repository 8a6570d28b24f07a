"""Dimension-reduced training on one, two and four ranks, and what goes wrong between ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.algorithms.dim_reduce.test_algorithm import batch, network
from tests.support.ranks import run_ranks
from torchboost import Target, TrainStep
from torchboost.algorithms import DimReduction
from torchboost.core import attach_all
from torchboost.errors import IncompatibleError, RankDisagreementError


def train_on_ranks(k: int, folder: str, missing: bool = False) -> list[float] | str:
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = network()
    model[1] = nn.Identity()  # every rank would normalise by its own part of the batch
    model.double()
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    settings = DimReduction(n_components=k, weight_load_dir=folder, alpha=0.05, timeout=1 if missing else 3)
    target = Target(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    if missing and rank == 1:
        return "not here"
    try:
        attached = attach_all(target, [settings])
    except (RankDisagreementError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    step = TrainStep(target, lambda x, y: F.cross_entropy(wrapped(x), y), attached=attached)
    for number in range(8):
        x, y = batch(number)
        share = slice(16 * rank // ranks, 16 * (rank + 1) // ranks)
        step(x[share].double(), y[share])
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def plain_checkpoints(folder: Path, count: int) -> None:
    model = network()
    model[1] = nn.Identity()
    for number in range(count):
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        torch.save(model.state_dict(), folder / f"{number}.pt")


@pytest.mark.dist
def test_a_missing_rank_ends_in_an_error(tmp_path: Path) -> None:
    plain_checkpoints(tmp_path, 3)
    first, second = run_ranks(train_on_ranks, 2, 2, str(tmp_path), True, timeout=30)
    assert second == "not here"
    assert str(first).startswith("RankDisagreementError: dim_reduce, making the basis: ranks 0, 1 train together")


def _failures(folder: str) -> list[str]:
    """What is refused on both ranks, each time before anything hangs."""
    rank, errors = dist.get_rank(), []

    def refused(model: nn.Module, settings: DimReduction) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises((IncompatibleError, RankDisagreementError, ValueError)) as caught:
            attach_all(Target(model, optimizer), [settings])
        errors.append(str(caught.value))

    plain = network()
    plain[1] = nn.Identity()
    ddp = DistributedDataParallel(plain)
    refused(ddp, DimReduction(n_components=5, weight_load_dir=folder))
    refused(ddp, DimReduction(n_components=2, pca_mat_path=f"{folder}/{rank}.npy"))
    os.chdir(folder if rank == 0 else "/")
    refused(ddp, DimReduction(n_components=2, weight_load_dir="."))
    refused(nn.Sequential(*(DistributedDataParallel(nn.Linear(6, 6)) for _ in "ab")), DimReduction(n_components=2))
    refused(fully_shard(network()), DimReduction(n_components=2))
    return errors


def _on_two_ranks(folder: str) -> dict[str, Any]:
    later = {how: _wrapped_later(how) for how in ("ddp", "never")}
    trained = train_on_ranks(2, folder)
    return {"later": later, "trained": trained, "rows": _checkpoint_of_rank_0(folder), "failures": _failures(folder)}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    plain_checkpoints(folder, 3)
    answers = run_ranks(_on_two_ranks, 2, str(folder))
    return {name: [answer[name] for answer in answers] for name in answers[0]} | {
        "alone": [train_on_ranks(2, str(folder))]
    }


@pytest.mark.dist
def test_one_and_two_ranks_end_with_the_same_weights(on_two_ranks: dict[str, list[Any]]) -> None:
    one, two = on_two_ranks["trained"]
    assert one == two
    torch.testing.assert_close(torch.tensor(one), torch.tensor(on_two_ranks["alone"][0]), rtol=1e-5, atol=1e-6)


@pytest.mark.dist
def test_ddp_may_come_later_and_must_come(on_two_ranks: dict[str, list[Any]]) -> None:
    one, two = (later["ddp"] for later in on_two_ranks["later"])
    assert one == two
    assert isinstance(one, list)
    for later in on_two_ranks["later"]:
        assert "wrap the model in DistributedDataParallel" in str(later["never"])


@pytest.mark.dist
def test_a_rank_does_not_take_the_rows_of_another(on_two_ranks: dict[str, list[Any]]) -> None:
    first, second = on_two_ranks["rows"]
    assert first == ["loaded", "loaded"]
    assert "rows of rank 0 of 2, this is rank 1 of 2" in second[0]
    assert second[1] == "loaded"


@pytest.mark.dist
def test_what_is_refused_on_every_rank(on_two_ranks: dict[str, list[Any]]) -> None:
    one, two = on_two_ranks["failures"]
    needed = "n_components: found 5 and 3 snapshots; as many snapshots as components are needed"
    assert one[0].startswith(needed)
    assert two[0].startswith(needed)
    assert "another rank could not make the basis" in one[2]
    assert "found no checkpoints" in two[2]
    for errors in (one, two):
        assert "the ranks disagree: settings is" in errors[1]
        assert "'0' and '1'" in errors[3]
        assert "wrap the whole model once" in errors[3]
        assert "fully_shard" in errors[4]
        assert "use DistributedDataParallel" in errors[4]


def _wrapped_later(how: str) -> list[list[float]] | str:
    """As ``AutoBoost`` leaves it: the algorithm is attached to the bare model, which DDP wraps afterwards.

    The models differ until DDP gives all of them the weights of rank 0.
    """
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(6, 3)
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1))
    attach_all(target, [DimReduction(n_components=2, snapshot_every=1, alpha=0.05)])
    called = DistributedDataParallel(model) if how == "ddp" else model
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weights = []
    for number in range(6):
        x, y = batch(number)
        share = slice(16 * rank // ranks, 16 * (rank + 1) // ranks)
        try:
            target.optimizer.step(lambda x=x[share], y=y[share]: F.cross_entropy(called(x), y))
        except IncompatibleError as error:
            return str(error)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist())
    return weights


def _checkpoint_of_rank_0(folder: str) -> list[str]:
    """Each rank loads what rank 0 saved: its own rows are not in it, directions from a folder are not either."""
    answers = []
    for settings in (
        DimReduction(n_components=2, snapshot_every=1),
        DimReduction(n_components=2, weight_load_dir=folder),
    ):
        runs = []
        for _ in range(2):
            model = network()
            model[1] = nn.Identity()
            model = DistributedDataParallel(model)
            target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1))
            attach_all(target, [settings])
            for number in range(3):
                x, y = batch(number)
                target.optimizer.step(lambda x=x, y=y, model=model: F.cross_entropy(model(x), y))
            runs.append(target.optimizer)
        state = [runs[0].state_dict()]
        dist.broadcast_object_list(state)
        try:
            runs[1].load_state_dict(state[0])
        except ValueError as error:
            answers.append(str(error))
        else:
            answers.append("loaded")
    return answers
