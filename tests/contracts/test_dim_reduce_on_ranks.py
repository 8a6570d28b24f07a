"""Dimension-reduced training on one, two and four ranks, and what goes wrong between ranks."""

from __future__ import annotations

from pathlib import Path

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
from torchboost.algorithms import SubspaceDescent
from torchboost.core import attach_all
from torchboost.errors import IncompatibleError


def _train_on_ranks(k: int, folder: str, bad: str | None) -> list[float] | str:
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = network()
    model[1] = nn.Identity()  # every rank would normalise by its own part of the batch
    model.double()
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    settings = SubspaceDescent(n_components=k, weight_load_dir=folder, alpha=0.05, timeout=3)
    target = Target(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    if bad == "missing" and rank == 1:
        return "not here"
    try:
        attached = attach_all(target, [settings])
    except (TimeoutError, ValueError) as error:
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
@pytest.mark.parametrize("k", [32, 30])
def test_one_two_and_four_ranks_end_with_the_same_weights(k: int, tmp_path: Path) -> None:
    plain_checkpoints(tmp_path, 33)
    alone = _train_on_ranks(k, str(tmp_path), None)
    for ranks in (2, 4):
        found = run_ranks(_train_on_ranks, ranks, k, str(tmp_path), None)
        assert all(one == found[0] for one in found)
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.dist
def test_a_missing_rank_ends_in_an_error_and_bad_checkpoints_in_the_same_one_everywhere(tmp_path: Path) -> None:
    plain_checkpoints(tmp_path, 3)
    first, second = run_ranks(_train_on_ranks, 2, 2, str(tmp_path), "missing", timeout=30)
    assert second == "not here"
    assert str(first).startswith("TimeoutError: dim_reduce: rank 0 of 2 waited 3 s for the basis")
    one, two = run_ranks(_train_on_ranks, 2, 5, str(tmp_path), None)
    assert (
        one
        == two
        == "ValueError: n_components: found 5 and 3 snapshots; as many snapshots as components are "
        + ("needed: save more, or lower n_components.")
    )


def _settings_apart() -> str:
    model = DistributedDataParallel(network())
    settings = SubspaceDescent(n_components=2, snapshot_every=1, rho=0.5 + 0.1 * dist.get_rank())
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1))
    attach_all(target, [settings])
    (x, y), last = batch(0), batch(1)
    target.optimizer.step(lambda: F.cross_entropy(model(x), y))
    with pytest.raises(ValueError, match="the ranks differ") as caught:
        target.optimizer.step(lambda: F.cross_entropy(model(last[0]), last[1]))
    return str(caught.value)


@pytest.mark.dist
def test_settings_that_differ_between_ranks_are_named() -> None:
    one, two = run_ranks(_settings_apart, 2)
    assert one == two
    assert "rho=0.5" in one
    assert "rho=0.6" in one


def _wrapped_later(how: str) -> list[float] | str:
    """As ``AutoBoost`` leaves it: the algorithm is attached to the bare model, which DDP wraps afterwards."""
    model = network()
    model[1] = nn.Identity()
    called: nn.Module = model
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1))
    attach_all(target, [SubspaceDescent(n_components=2, snapshot_every=1, alpha=0.05)])
    if how == "ddp":
        called = DistributedDataParallel(model)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for number in range(6):
        x, y = batch(number)
        share = slice(16 * rank // ranks, 16 * (rank + 1) // ranks)
        try:
            target.optimizer.step(lambda x=x[share], y=y[share]: F.cross_entropy(called(x), y))
        except IncompatibleError as error:
            return str(error)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.dist
def test_ddp_may_come_later_and_must_come() -> None:
    one, two = run_ranks(_wrapped_later, 2, "ddp")
    assert one == two
    assert isinstance(one, list)
    apart = run_ranks(_wrapped_later, 2, "never")
    assert all("model in DistributedDataParallel" in str(found) for found in apart)


def _shard() -> str:
    model = fully_shard(network())
    with pytest.raises(IncompatibleError, match="use DistributedDataParallel") as caught:
        attach_all(Target(model, torch.optim.SGD(model.parameters(), lr=0.1)), [SubspaceDescent(n_components=2)])
    return str(caught.value)


@pytest.mark.dist
def test_sharded_models_are_refused() -> None:
    assert "fully_shard" in run_ranks(_shard, 2)[0]


def _other_starts() -> list[list[float]]:
    """Ranks whose models differ until DDP gives all of them the weights of rank 0."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(6, 3)
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1))
    attach_all(target, [SubspaceDescent(n_components=2, snapshot_every=1, alpha=0.05)])
    called = DistributedDataParallel(model)
    found = []
    for number in range(4):
        x, y = batch(number)
        target.optimizer.step(lambda x=x, y=y: F.cross_entropy(called(x), y))
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist())
    return found


@pytest.mark.dist
def test_ranks_begin_the_subspace_at_the_same_weights() -> None:
    one, two = run_ranks(_other_starts, 2)
    assert one == two


def _state_of_rank_0() -> str:
    settings = SubspaceDescent(n_components=2, snapshot_every=1)
    runs = []
    for _ in range(2):
        model = DistributedDataParallel(network())
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
        return str(error)
    return "loaded"


@pytest.mark.dist
def test_a_rank_does_not_take_the_rows_of_another() -> None:
    first, second = run_ranks(_state_of_rank_0, 2)
    assert first == "loaded"
    assert "rows of rank 0 of 2, this is rank 1 of 2" in second


def _two_wrappers() -> str:
    model = nn.Sequential(DistributedDataParallel(nn.Linear(6, 4)), DistributedDataParallel(nn.Linear(4, 3)))
    with pytest.raises(IncompatibleError, match="wrap the whole model once") as caught:
        attach_all(Target(model, torch.optim.SGD(model.parameters(), lr=0.1)), [SubspaceDescent(n_components=2)])
    return str(caught.value)


@pytest.mark.dist
def test_several_wrappers_are_refused() -> None:
    assert "'0' and '1'" in run_ranks(_two_wrappers, 2)[0]
