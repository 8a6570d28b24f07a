"""AdaptiveSum: settings, what it refuses and why, one node, what is combined, DDP's hook."""

from __future__ import annotations

import copy
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.support.memory import live_tensors
from tests.support.models import cnn, mlp
from tests.support.nodes import batch_of, fresh, node_wrapped, tensors, train
from tests.support.ranks import run_ranks
from torchboost import DynamicLossScale, NodeGroups, Target, Topology, adasum, optim
from torchboost.algorithms import AdaptiveSum, adaptive_sum
from torchboost.core import attach_all
from torchboost.errors import IncompatibleError, NoEffectWarning


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


def test_settings_that_make_no_sense():
    bad: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"split_groups": 0}, ValueError),
        ({"split_groups": []}, ValueError),
        ({"split_groups": [4, 4]}, ValueError),
        ({"split_groups": [1.5]}, TypeError),
        ({"split_groups": "12"}, TypeError),
        ({"devices_per_node": 0}, ValueError),
        ({"devices_per_node": True}, ValueError),
    ]
    for settings, error in bad:
        with pytest.raises(error, match=rf"{next(iter(settings))}: found .*; pass"):
            AdaptiveSum(**settings)
    assert AdaptiveSum(split_groups=[2, 4]) == AdaptiveSum(split_groups=(2, 4)), "settings are values"
    assert AdaptiveSum(split_groups=3) == AdaptiveSum(split_groups=(3,))


def test_one_process_is_told_and_left_alone():
    model = mlp()
    optimizer = sgd(model)
    assert "no other node to combine with" in (AdaptiveSum().idle(model, optimizer) or "")
    with pytest.warns(NoEffectWarning, match="one node of 1 rank has"):
        summing = adasum(model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert not summing.active
    assert summing.agreement != summing.agreement
    summing.remove()


def one_node() -> tuple[list[str], bool]:
    found = []
    for attached in (False, True):
        model = DistributedDataParallel(fresh())
        optimizer = sgd(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if attached:
                adasum(model, optimizer)
        train(model, optimizer, 2)
        found.append(tensors(model))
    return [str(warning.message) for warning in said], found[0] == found[1]


@pytest.mark.dist
def test_one_node_of_two_ranks_trains_bit_for_bit_as_before(two):
    for said, same in two["one_node"]:
        assert same
        assert any("one node of 2 ranks" in message for message in said)


def refusal(model: nn.Module, settings: dict[str, Any], optimizer: Any = None, scaler: Any = None) -> str:
    """Return what is said where it refuses, and prove that nothing was changed."""
    optimizer = sgd(model) if optimizer is None else optimizer
    before = len(optimizer._optimizer_step_pre_hooks), len(getattr(model, "_comm_hooks", ()))
    try:
        attach_all(Target(model, optimizer, scaler), [AdaptiveSum(**settings)])
    except IncompatibleError as error:
        assert (len(optimizer._optimizer_step_pre_hooks), len(getattr(model, "_comm_hooks", ()))) == before
        return str(error)
    return "attached"


def refusals() -> dict[str, str]:
    two: dict[str, Any] = {"devices_per_node": 2}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    inside = NodeGroups.of(Topology.current(2)).inside
    narrow = torch.nn.Linear(4, 2).bfloat16()
    masters = optim.AdamWeightDecay(narrow.parameters(), 0.1, master_weights=True)
    table = nn.Embedding(8, 4, sparse=True)
    mixed = fresh()
    fully_shard(mixed[0], mesh=mesh["shard"])
    return {
        "averages over all": refusal(DistributedDataParallel(fresh()), two),
        "FSDP1": refusal(FullyShardedDataParallel(fresh(), device_id=torch.device("cpu")), two),
        "HSDP": refusal(fully_shard(fresh(), mesh=mesh), two),
        "sharded over all": refusal(fully_shard(fresh()), two),
        "half sharded": refusal(mixed, two),
        "masters": refusal(narrow, two, masters),
        "moves between steps": refusal(table, two, optim.LazyAdam(table.parameters(), exact=True)),
        "a deaf scaler": refusal(fresh(), two, scaler=torch.amp.GradScaler("cpu")),
        "agree=False": refusal(fresh(), two, scaler=DynamicLossScale(1024.0, agree=False)),
        "nodes of 3": refusal(fresh(), {"devices_per_node": 3}),
        "complex": refusal(nn.Linear(2, 2, dtype=torch.complex64), two),
        "two devices": refusal(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), two),
        "an agreeing scaler": refusal(fresh(), two, scaler=DynamicLossScale(1024.0)),
        "a second time": refusal(DistributedDataParallel(fresh(), process_group=inside), two),
    }


def test_rules_whose_state_holds_weights_are_refused():
    model = mlp()
    first, *rest = model.parameters()
    groups = [{"params": [first], "rule": "sgd"}, {"params": rest, "rule": "ftrl"}]
    rules = {
        "schedule-free": optim.ScheduleFreeAdamW(model.parameters()),
        "FTRL": optim.FTRL(model.parameters()),
        "one group": optim.MixedOptimizer(groups),
    }
    for optimizer in rules.values():
        target = Target(model, optimizer, topology=Topology(world_size=2))
        with pytest.raises(IncompatibleError, match="computes the weights from its state"):
            AdaptiveSum().check(target)
    AdaptiveSum().check(Target(model, optim.SGD(model.parameters()), topology=Topology(world_size=2)))


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_work_is_refused_with_what_to_do_on_every_rank():
    found = run_ranks(on_four, 4)
    said = found[0]["refusals"]
    fine = {"an agreeing scaler", "a second time"}
    assert {case for case, message in said.items() if message == "attached"} == fine
    for case, message in said.items():
        assert case in fine or "; " in message, "an error says what to do"
    assert all(other == found[0] for other in found)
    assert "process_group=torchboost.NodeGroups.of" in said["averages over all"]
    assert "FullyShardedDataParallel" in said["FSDP1"]
    assert "mean over nodes" in said["HSDP"]
    assert "a mesh of shape (4,)" in said["sharded over all"]
    assert "is not sharded" in said["half sharded"]
    assert "float32 master weights" in said["masters"]
    assert "exact=True" in said["moves between steps"]
    assert "DynamicLossScale" in said["a deaf scaler"]
    assert "may skip the step on one node" in said["agree=False"]
    assert "are not all real numbers" in said["complex"]
    assert "lie on cpu, meta" in said["two devices"]
    assert "found nodes of 3 ranks, and 4 ranks in total" in said["nodes of 3"]

    assert found[0]["nodes"].startswith("found nodes of 1 and 3 ranks")
    for text, kept in found[0]["different"]:
        assert "differ between the ranks" in text
        assert "; start all ranks from the same seed" in text
        assert kept


def uneven_nodes() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str([3, 3, 3, 1][dist.get_rank()]))
        model = fresh()
        with pytest.raises(IncompatibleError) as error:
            adasum(model, sgd(model))
    return str(error.value)


def different_weights(how: str) -> tuple[str, bool]:
    torch.manual_seed(dist.get_rank())
    model = node_wrapped(mlp(), how, 2)
    optimizer = sgd(model)
    adasum(model, optimizer, devices_per_node=2)
    x, y = batch_of(dist.get_rank(), 0)
    F.cross_entropy(model(x), y).backward()
    before = tensors(model)
    try:
        optimizer.step()
    except IncompatibleError as error:
        return str(error), tensors(model) == before
    return "stepped", False


def on_four() -> dict[str, Any]:
    return {
        "refusals": refusals(),
        "nodes": uneven_nodes(),
        "different": [different_weights(how) for how in ("bare", "ddp", "fsdp")],
    }


def same_update_everywhere() -> list[str]:
    model = DistributedDataParallel(fresh())
    optimizer = sgd(model)
    adasum(model.module, optimizer, devices_per_node=1)  # attached before it was wrapped, over all ranks
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(model, optimizer, 3)
    return [str(warning.message) for warning in said if warning.category is NoEffectWarning]


@pytest.mark.dist
def test_equal_updates_are_told_once(two):
    for said in two["same_update_everywhere"]:
        assert len(said) == 1
        assert "all nodes made the same update" in said[0]


def agreement() -> tuple[float, list[list[float]]]:
    model = node_wrapped(fresh(), "ddp", 1)
    optimizer = sgd(model)
    summing = adasum(model, optimizer, devices_per_node=1)
    alone = copy.deepcopy(fresh())
    x, y = batch_of(dist.get_rank(), 0)
    F.cross_entropy(alone(x), y).backward()
    train(model, optimizer, 1)
    return summing.agreement, [p.grad.flatten().tolist() for p in alone.parameters()]  # pyright: ignore


@pytest.mark.dist
def test_agreement_is_the_mean_cosine_between_the_nodes(two):
    (mean, mine), (other, theirs) = two["agreement"]
    pairs = [(torch.tensor(a).double(), torch.tensor(b).double()) for a, b in zip(mine, theirs, strict=True)]
    expected = sum(float(F.cosine_similarity(a, b, dim=0)) for a, b in pairs) / len(pairs)
    assert mean == other == pytest.approx(expected, abs=1e-4)


def collectives() -> dict[str, int]:
    """Count the exchanges in one update, for several packings: between two ranks two for each pack."""
    counts = {}
    for name, points in (("one", None), ("two", (2,)), ("three", (2, 4)), ("behind the end", (50, 100))):
        model = fresh()
        optimizer = sgd(model)
        adasum(model, optimizer, split_groups=points, devices_per_node=1)
        train(model, optimizer, 2)
        with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as exchange:
            train(model, optimizer, 1, first=2)
        counts[name] = exchange.call_count
    return counts


@pytest.mark.dist
def test_split_groups_decide_the_number_of_collectives(two):
    assert two["collectives"] == [{"one": 2, "two": 4, "three": 6, "behind the end": 2}] * 2


class Held(nn.Module):
    """A module that holds parameters."""

    def __init__(self, *weights: nn.Parameter) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)


def memory_and_buffers() -> tuple[bool, bool, bool]:
    model = fresh(cnn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    summing = adasum(model, optimizer, devices_per_node=1)
    alive = []
    for number in range(4):
        x, y = batch_of(dist.get_rank(), number, model)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        alive.append(live_tensors()[1])
    mean = dict(model.named_buffers())["1.running_mean"]
    means = [torch.empty_like(mean) for _ in range(2)]
    dist.all_gather(means, mean)
    summing.remove()
    copies = sum(p.nbytes for p in model.parameters())
    return alive[3] <= alive[1], live_tensors()[1] <= alive[1] - copies // 2, torch.equal(*means)


@pytest.mark.dist
def test_the_copy_of_the_weights_stays_one_and_every_node_keeps_its_buffers(two):
    assert two["memory_and_buffers"] == [(True, True, False)] * 2


def groups_and_freezing() -> tuple[list[list[int]], bool]:
    first, second, third = (nn.Parameter(torch.ones(size)) for size in (4, 5, 6))
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    adasum(Held(first, second), optimizer, devices_per_node=1)
    travelled: list[list[int]] = []
    combine = adaptive_sum.adasum_

    def combined(tensors: Any, *groups: Any, **kwargs: Any) -> torch.Tensor:
        travelled[-1] += [tensor.numel() for tensor in tensors]
        return combine(tensors, *groups, **kwargs)

    def step(*params: torch.Tensor) -> None:
        for param in params:
            param.grad = torch.arange(float(len(param))) * (dist.get_rank() + 1) + dist.get_rank()
        travelled.append([])
        with mock.patch.object(adaptive_sum, "adasum_", combined):
            optimizer.step()
        optimizer.zero_grad()

    step(first, second)
    first.requires_grad_(False)
    before = first.detach().clone()
    step(second)
    optimizer.add_param_group({"params": [third]})
    step(second, third)
    second.requires_grad_(False)
    third.requires_grad_(False)
    step()
    return travelled, torch.equal(before, first)


@pytest.mark.dist
def test_frozen_parameters_do_not_travel_and_groups_may_be_added(two):
    assert two["groups_and_freezing"] == [([[4, 5], [5], [5, 6], []], True)] * 2


def first_steps() -> dict[str, str]:
    """Return what the first step says to weights that are equal, or that differ in one number."""
    torch.set_num_threads(1 + 3 * dist.get_rank())  # machines that add in another order
    found = {}
    for case in ("equal", "NaN on both", "one bit", "NaN on one rank", "NaN and one bit"):
        weight = nn.Parameter(torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)))
        if case in ("NaN on both", "NaN and one bit"):
            weight.data[5] = torch.nan
        if case in ("one bit", "NaN and one bit"):
            weight.data.view(torch.int32)[7] += dist.get_rank()
        elif case == "NaN on one rank":
            weight.data[7] = torch.nan if dist.get_rank() else 0.0
        optimizer = torch.optim.SGD([weight], lr=0.1)
        adasum(Held(weight), optimizer, devices_per_node=1)
        weight.grad = torch.ones_like(weight)
        try:
            optimizer.step()
        except IncompatibleError as error:
            found[case] = str(error)
        else:
            found[case] = "stepped"
    return found


@pytest.mark.dist
def test_weights_that_differ_in_a_bit_are_refused_at_the_first_step(two):
    first, second = two["first_steps"]
    assert first == second
    assert first.pop("equal") == first.pop("NaN on both") == "stepped"
    for said in first.values():
        assert said.startswith("1 of 1 parameters differ between the ranks before the first update")


def on_two() -> dict[str, Any]:
    tasks = (
        one_node,
        same_update_everywhere,
        memory_and_buffers,
        groups_and_freezing,
        first_steps,
        agreement,
        collectives,
    )
    return {fn.__name__: fn() for fn in tasks}


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    answers = run_ranks(on_two, 2)
    return {name: [answer[name] for answer in answers] for name in answers[0]}
