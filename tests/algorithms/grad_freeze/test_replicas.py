"""Freezing on several ranks: what is sent, what is trained, and DDP that comes early, late, compiled or with hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.support.frozen_nets import scheduled as freeze
from tests.support.models import BottleneckNet, batch_for
from tests.support.ranks import run_ranks
from tests.support.versions import GROUPS_OF_REPLICATE, flags_are_followed
from tests.support.wire import sent
from tests.support.wrapped import all_weights
from torchboost import FreezeOpt
from torchboost.algorithms.grad_freeze.checks import rebuild_reducer
from torchboost.core.wrapping import unwrap
from torchboost.errors import IncompatibleError, RankDisagreementError

pytestmark = [pytest.mark.dist, pytest.mark.long]

SCHEDULES = ((0, 2, 1, 3, 0, 2), (2, 0, 3, 1))
WITH_FEW_GRAPHS = (0, 2, 0, 2)
"""For a compiled network, each of whose graphs takes long: frozen, thawed and frozen again."""
PARTS = (232, 448, 320, 68)
"""Parameters of the stem, the two blocks and the head."""
DDP = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.001},
}


def network() -> BottleneckNet:
    torch.manual_seed(0)
    model = BottleneckNet()
    for module in model.modules():  # statistics of a share of the batch are not those of the batch
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def wrapped(model: nn.Module, how: str) -> nn.Module:
    """``how``: "late" and a way of DDP is wrapped by the caller, after freezing."""
    if how in DDP:
        return DistributedDataParallel(model, **DDP[how])
    if how == "group":
        return DistributedDataParallel(model, process_group=dist.new_group())
    if how == "compiled around":
        return torch.compile(DistributedDataParallel(model), backend="aot_eager")  # pyright: ignore
    if how == "compiled inside":
        return DistributedDataParallel(torch.compile(model, backend="aot_eager"))  # pyright: ignore
    if how in ("sharded", "sharded by block"):
        if how == "sharded by block":
            for part in (model.stem, *model.blocks):  # pyright: ignore
                fully_shard(part)
        return fully_shard(model)
    return replicate(model) if how == "replicate" else model


def share(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x, y = batch_for(BottleneckNet(), torch.Generator().manual_seed(step), size)
    mine = slice(size // ranks * rank, size // ranks * (rank + 1))
    return x[mine], y[mine]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    for step in steps:
        x, y = share(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _trained(how: str, schedule: tuple[int, ...]) -> list[float]:
    model = network()
    inner, late = how.removeprefix("late "), how.startswith("late ")
    called = model if late else wrapped(model, inner)
    optimizer = torch.optim.SGD(called.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    freeze(called, optimizer, schedule)
    train(wrapped(model, inner) if late else called, optimizer, range(8))
    return all_weights(model)


def _trained_all(ways: Sequence[str]) -> dict[str, list[float]]:
    with flags_are_followed():
        return {f"{how} {schedule}": _trained(how, schedule) for how in ways for schedule in _schedules(how)}


def _schedules(how: str) -> tuple[tuple[int, ...], ...]:
    return (WITH_FEW_GRAPHS,) if how in COMPILED else SCHEDULES


WAYS = (*DDP, "late plain", "late unused", "late views", "group", "sharded", "sharded by block", "replicate")
COMPILED = ("compiled around", "compiled inside")


@pytest.mark.parametrize(
    ("ranks", "ways"),
    [(1, ("plain", "late plain")), (2, (*WAYS, *COMPILED)), (4, ("plain", "sharded by block"))],
)
def test_ranks_train_like_one_process(ranks: int, ways: Sequence[str], two: list[dict[str, Any]]) -> None:
    found = [answer["trained"] for answer in two] if ranks == 2 else run_ranks(_trained_all, ranks, ways)
    for key, weights in found[0].items():
        assert all(other[key] == weights for other in found)
    for schedule in {schedule for how in ways for schedule in _schedules(how)}:
        alone = _trained("bare", schedule)
        for how in [how for how in ways if schedule in _schedules(how)]:
            tolerance = 1e-5 if how in COMPILED else 1e-6
            torch.testing.assert_close(found[0][f"{how} {schedule}"], alone, rtol=0, atol=tolerance, msg=how)


def _gradient_bytes(how: str) -> list[tuple[int, int]]:
    """Index and bytes of float32 that were reduced in each step."""
    model = network()
    called = wrapped(model, how)
    optimizer = torch.optim.SGD(called.parameters(), lr=0.05)
    freezing = freeze(called, optimizer, (0, 0, 2, 2, 3, 1, 0))
    seen = []
    for step in range(7):
        index = freezing.index
        counted = sent(lambda step=step: train(called, optimizer, [step]))
        seen.append((index, counted["all_reduce", "float"] + counted["reduce_scatter", "float"]))
    return seen


def _gathered_bytes() -> list[tuple[int, int]]:
    called = wrapped(network(), "sharded by block")
    optimizer = torch.optim.SGD(called.parameters(), lr=0.05)
    freezing = freeze(called, optimizer, (0, 2, 3))
    return [
        (freezing.index, sent(lambda step=step: train(called, optimizer, [step]))["all_gather", "float"])
        for step in range(3)
    ]


COUNTED = ("plain", "unused", "small buckets", "sharded", "sharded by block", "replicate")


def test_no_gradient_of_a_frozen_part_is_sent_and_fsdp_gathers_what_the_passes_need(two: list[dict[str, Any]]) -> None:
    stem, first, second, head = (4 * size // 2 for size in PARTS)
    forward = stem + first + second + head
    for seen, gathered in (answer["bytes"] for answer in two):
        for how in COUNTED:
            bytes_each = 4 * GROUPS_OF_REPLICATE if how == "replicate" else 4
            assert seen[how] == [(index, bytes_each * sum(PARTS[index:])) for index in (0, 0, 2, 2, 3, 1, 0)], how
        # In the backward pass torch fetches the unit before the one it works on, whether or not it is frozen.
        assert gathered == [(0, forward + stem + first + second), (2, forward + first + second), (3, forward + second)]


def _kept_in_an_open_window(view: bool) -> list[float]:
    model = network()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(2):  # buckets in the order of the gradients
        train(ddp, optimizer, [step])
    x, y = share(2)
    with ddp.no_sync():
        F.cross_entropy(ddp(x), y).backward()
    rebuild_reducer(ddp)
    train(ddp, optimizer, [3])
    return all_weights(model)


def test_a_reducer_built_again_reduces_what_an_open_window_holds(two: list[dict[str, Any]]) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer, range(2))
    x, y = share(2)
    F.cross_entropy(model(x), y).backward()
    train(model, optimizer, [3])
    assert two[0]["kept"] == two[1]["kept"]
    for weights in two[0]["kept"]:
        torch.testing.assert_close(weights, all_weights(model), rtol=0, atol=1e-6)


def _removed(how: str) -> tuple[list[float], int, int]:
    model = network()
    late = how.startswith("late ")
    called = model if late else wrapped(model, how)
    optimizer = torch.optim.SGD(called.parameters(), lr=0.05)
    freezing = freeze(called, optimizer, (3,))
    trained = wrapped(model, how.removeprefix("late ")) if late else called
    train(trained, optimizer, range(2))
    freezing.remove()
    freezing.remove()
    hooks = sum(len(m._forward_pre_hooks) for m in {trained, model, unwrap(trained)} if isinstance(m, nn.Module))
    bytes_sent = sent(lambda: train(trained, optimizer, [2]))
    train(trained, optimizer, [3])
    return all_weights(model), bytes_sent["all_reduce", "float"], hooks


def test_after_removal_everything_is_reduced_again(two: list[dict[str, Any]]) -> None:
    first, second = (answer["removed"] for answer in two)
    assert first == second
    assert [found[1:] for found in first] == [(4 * sum(PARTS), 0)] * 3


def _hooked() -> dict[str, object]:
    model = network()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    freeze(ddp, optimizer, (0, 2, 0))
    train(ddp, optimizer, range(2))
    gradients = []
    for step in (2, 3):
        x, y = share(step)
        F.cross_entropy(ddp(x), y).backward()
        gradients += [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    refused = DistributedDataParallel(network())
    refused.register_comm_hook(PowerSGDState(None), powerSGD_hook)
    built_in = DistributedDataParallel(network())
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    bare = network()
    late = freeze(bare, torch.optim.SGD(bare.parameters(), lr=0.05), (0, 2))
    static = DistributedDataParallel(bare, static_graph=True)
    found = {"half": all(torch.equal(g, g.half().float()) for g in gradients), "hooks": len(ddp._comm_hooks)}
    for name, call in {
        "state": lambda: freeze(refused, torch.optim.SGD(refused.parameters(), lr=0.05), (0, 2)),
        "built-in": lambda: freeze(built_in, torch.optim.SGD(built_in.parameters(), lr=0.05), (0, 2)),
        "static": lambda: static(share(0)[0]),
    }.items():
        with pytest.raises(IncompatibleError) as caught:
            call()
        found[name] = str(caught.value)
    late.remove()
    return found


def test_communication_hooks_without_a_state_stay_and_others_are_refused(two: list[dict[str, Any]]) -> None:
    for found in (answer["hooked"] for answer in two):
        assert found["half"], "the hook rounds every gradient to float16"
        assert found["hooks"] == 1
        assert "powerSGD_hook with a state (PowerSGDState)" in str(found["state"])
        assert "the built-in communication hook BuiltinCommHookType.FP16_COMPRESS" in str(found["built-in"])
        assert "static_graph=False" in str(found["static"])


def _before_the_group() -> list[float]:
    """Attached before there is a process group, as far as freezing can tell; wrapped while two blocks are frozen."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchboost.algorithms.grad_freeze.checks.several", lambda: False)
        freeze(model, optimizer, SCHEDULES[1])
    train(DistributedDataParallel(model), optimizer, range(8))
    return all_weights(model)


def test_freezing_that_was_attached_before_the_process_group_finds_it(two: list[dict[str, Any]]) -> None:
    first, second = (answer["before"] for answer in two)
    assert first == second
    torch.testing.assert_close(first, _trained("bare", SCHEDULES[1]), rtol=0, atol=1e-6)


def _found_apart(what: str) -> str:
    rank, model = dist.get_rank(), network()
    called = wrapped(model, "plain" if what != "sharded" else "sharded")
    optimizer = torch.optim.SGD(called.parameters(), lr=0.05)
    called.train(what != "eval")
    seed = rank if what in ("seed", "eval") else 0
    freeze(called, optimizer, (0, 2) if what != "schedule" or rank else (0, 1), alike={"seed": seed})

    def go_on() -> None:
        for step in range(4):
            x, y = share(step)
            F.cross_entropy(called(x), y).backward()
            if not (what in ("update", "sharded") and step == 2 and rank == 1):
                optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RankDisagreementError) as caught:
        go_on()
    return str(caught.value)


DIFFERENCES = {
    "seed": "seed is 0 on rank 0 and 1 on rank 1 (updates 0, frozen groups 0, ",
    "eval": "seed is 0 on rank 0 and 1 on rank 1 (updates 0, frozen groups 0, ",
    "schedule": "frozen groups is 1 on rank 0 and 2 on rank 1 (updates 1,",
    "update": "updates is 3 on rank 0 and 2 on rank 1; frozen groups is 2 on rank 0 and 0 on rank 1",
    "sharded": "updates is 3 on rank 0 and 2 on rank 1; frozen groups is 2 on rank 0 and 0 on rank 1",
}


def test_ranks_that_differ_are_told_before_the_pass(two: list[dict[str, Any]]) -> None:
    for told in (answer["apart"] for answer in two):
        for what, message in DIFFERENCES.items():
            assert message in told[what]
            assert "same settings, seed and checkpoint" in told[what]


def _alone() -> int:
    """Ranks that train a model each: passes need not match, nothing is compared."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    freeze(model, optimizer, (0, 2))
    counted = sent(lambda: train(model, optimizer, range(1 + dist.get_rank())))
    parameters = list(network().parameters())
    with pytest.warns(RuntimeWarning, match="only parameters, no model"):
        FreezeOpt(torch.optim.SGD(parameters, lr=0.05), [parameters], [0])
    return len(counted)


def _evaluated_alone(late: bool) -> tuple[int, int]:
    """One rank evaluates with gradients, which nobody uses, between the updates of a loop in training mode."""
    model = network()
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    freeze(model if late else ddp, optimizer, (2,), agree_within=10)
    ddp.train()
    train(ddp, optimizer, range(2))  # until DDP has ordered its buckets, which takes all ranks
    compared = []
    for step in range(2, 5):
        train(ddp, optimizer, [step])
        ddp.eval()
        calls = sent(lambda step=step: [ddp(share(step)[0]) for _ in range(2 * (dist.get_rank() == 0))])
        compared.append(calls["all_gather", "long int"])
        ddp.train()
    return max(compared), len(compared)


def _switched_off() -> bool:
    model = network()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    freeze(ddp, optimizer, (0, 2), agree_within=0)
    return ("all_gather", "long int") in sent(lambda: train(ddp, optimizer, range(2)))


def _all_on_two_ranks() -> dict[str, Any]:
    return {
        "trained": _trained_all((*WAYS, *COMPILED)),
        "bytes": ({how: _gradient_bytes(how) for how in COUNTED}, _gathered_bytes()),
        "kept": [_kept_in_an_open_window(view) for view in (False, True)],
        "removed": [_removed(how) for how in ("plain", "late plain", "unused")],
        "hooked": _hooked(),
        "before": _before_the_group(),
        "alone": (_alone(), _switched_off(), [_evaluated_alone(late) for late in (False, True)]),
        "apart": {what: _found_apart(what) for what in DIFFERENCES},
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(_all_on_two_ranks, 2, timeout=300)


def test_separate_models_an_evaluation_of_one_rank_alone_and_passes_of_the_user_are_not_compared(
    two: list[dict[str, Any]],
) -> None:
    assert [answer["alone"] for answer in two] == [(0, False, [(0, 3)] * 2)] * 2
