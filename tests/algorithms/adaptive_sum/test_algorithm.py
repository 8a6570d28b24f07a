"""AdaptiveSum: settings, what it refuses and why, one node, packs, agreement."""

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

from tests.support.models import mlp
from tests.support.nodes import batch_of, fresh, node_wrapped, tensors, train
from tests.support.ranks import run_ranks
from torchboost import optim
from torchboost.algorithms.adaptive_sum.algorithm import AdaptiveSum, adasum
from torchboost.algorithms.loss_scale_group.algorithm import GroupGradScaler
from torchboost.algorithms.loss_scale_group.scalers import DynamicLossScale, FixedLossScale
from torchboost.compat.loss_scale import GroupLossScaleManager
from torchboost.core.algorithm import Target, attach_all
from torchboost.core.step import TrainStep
from torchboost.distributed.topology import NodeGroups, Topology
from torchboost.errors import IncompatibleError, NoEffectWarning


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"on": "weights"}, ValueError),
        ({"split_groups": 0}, ValueError),
        ({"split_groups": []}, ValueError),
        ({"split_groups": [4, 4]}, ValueError),
        ({"split_groups": [1.5]}, TypeError),
        ({"split_groups": "12"}, TypeError),
        ({"devices_per_node": 0}, ValueError),
        ({"devices_per_node": True}, ValueError),
    ],
)
def test_settings_that_make_no_sense(settings, error):
    with pytest.raises(error, match=rf"{next(iter(settings))}: found .*; pass"):
        AdaptiveSum(**settings)


def test_split_groups_are_a_value_however_they_are_written():
    assert AdaptiveSum(split_groups=[2, 4]) == AdaptiveSum(split_groups=(2, 4))
    assert AdaptiveSum(split_groups=3) == AdaptiveSum(split_groups=(3,))
    assert AdaptiveSum().on == "delta", "right for adaptive optimizers, too"


def test_one_process_is_told_and_left_alone():
    model = mlp()
    optimizer = sgd(model)
    assert "no other node to combine with" in (AdaptiveSum().idle(model, optimizer) or "")
    with pytest.warns(NoEffectWarning, match="one node of 1 rank has"):
        summing = adasum(model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert not summing.active
    assert summing.cosines == {}
    assert summing.agreement != summing.agreement
    summing.remove()


def one_node(on: Any) -> tuple[list[str], bool]:
    found = []
    for attached in (False, True):
        model = DistributedDataParallel(fresh())
        optimizer = sgd(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if attached:
                adasum(model, optimizer, on=on)
        train(model, optimizer, 2)
        found.append(tensors(model))
    return [str(warning.message) for warning in said], found[0] == found[1]


@pytest.mark.dist
@pytest.mark.parametrize("on", ["delta", "gradient"])
def test_one_node_of_two_ranks_trains_bit_for_bit_as_before(on):
    for said, same in run_ranks(one_node, 2, on):
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
    gradient = {"on": "gradient", **two}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    inside = NodeGroups.of(Topology.current(2)).inside
    narrow = torch.nn.Linear(4, 2).bfloat16()
    masters = optim.AdamWeightDecay(narrow.parameters(), 0.1, master_weights=True)
    table = nn.Embedding(8, 4, sparse=True)
    hooked = DistributedDataParallel(fresh())
    hooked.register_comm_hook(None, lambda state, bucket: None)
    built_in = DistributedDataParallel(fresh())
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    unit = fully_shard(fresh(), mesh=mesh["shard"])
    unit.set_all_reduce_hook(lambda output: None)
    mixed = fresh()
    fully_shard(mixed[0], mesh=mesh["shard"])
    grouped, layer = fresh(), nn.Linear(2, 2)
    groups = GroupGradScaler(grouped, ["0", "2"], process_group=inside)
    by_hand = GroupLossScaleManager(1024.0, [list(layer.parameters())], process_group=inside).scaler
    return {
        "averages over all": refusal(DistributedDataParallel(fresh()), two),
        "averages over the node": refusal(DistributedDataParallel(fresh(), process_group=inside), gradient),
        "another hook": refusal(hooked, gradient),
        "a built-in hook": refusal(built_in, gradient),
        "skips buckets": refusal(DistributedDataParallel(fresh(), skip_all_reduce_unused_params=True), gradient),
        "bare": refusal(fresh(), gradient),
        "FSDP1": refusal(FullyShardedDataParallel(fresh(), device_id=torch.device("cpu")), two),
        "HSDP": refusal(fully_shard(fresh(), mesh=mesh), two),
        "HSDP on gradients": refusal(fully_shard(fresh(), mesh=mesh), gradient),
        "sharded over all": refusal(fully_shard(fresh()), two),
        "half sharded": refusal(mixed, two),
        "a unit with a hook": refusal(unit, gradient),
        "masters": refusal(narrow, two, masters),
        "moves between steps": refusal(table, two, optim.LazyAdam(table.parameters(), exact=True)),
        "a deaf scaler": refusal(fresh(), two, scaler=torch.amp.GradScaler("cpu")),
        "agree=False": refusal(fresh(), two, scaler=DynamicLossScale(1024.0, agree=False)),
        "of the node": refusal(fresh(), two, scaler=DynamicLossScale(1024.0, process_group=inside)),
        "fixed, of the node": refusal(fresh(), two, scaler=FixedLossScale(8.0, process_group=inside)),
        "groups, of the node": refusal(grouped, two, scaler=groups),
        "by hand, of the node": refusal(fresh(), two, scaler=by_hand),
        "of all ranks": refusal(fresh(), two, scaler=DynamicLossScale(1024.0, process_group=dist.group.WORLD)),
        "complex": refusal(nn.Linear(2, 2, dtype=torch.complex64), two),
        "two devices": refusal(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), two),
        "nodes of 3": refusal(fresh(), {"devices_per_node": 3}),
        "an agreeing scaler": refusal(fresh(), two, scaler=DynamicLossScale(1024.0)),
        "a second time": refusal(DistributedDataParallel(fresh(), process_group=inside), two),
    }


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_work_is_refused_with_what_to_do():
    found = run_ranks(refusals, 4)
    said = found[0]
    fine = {"an agreeing scaler", "of all ranks", "a second time"}
    assert {case for case, message in said.items() if message == "attached"} == fine
    for case, message in said.items():
        assert case in fine or "; " in message, "an error says what to do"
    assert all(other == said for other in found)
    assert "process_group=torchboost.NodeGroups.of" in said["averages over all"]
    assert "over 2 ranks; on='gradient'" in said["averages over the node"]
    assert "already has a communication hook" in said["another hook"]
    assert said["a built-in hook"] == said["another hook"]
    assert "skip_all_reduce_unused_params" in said["skips buckets"]
    assert "the model is bare" in said["bare"]
    assert "FullyShardedDataParallel" in said["FSDP1"]
    assert "mean over nodes" in said["HSDP"]
    assert "mean over nodes" in said["HSDP on gradients"]
    assert "a mesh of shape (4,)" in said["sharded over all"]
    assert "is not sharded" in said["half sharded"]
    assert "already has an all-reduce hook" in said["a unit with a hook"]
    assert "float32 master weights" in said["masters"]
    assert "exact=True" in said["moves between steps"]
    assert "DynamicLossScale" in said["a deaf scaler"]
    assert "may skip the step on one node" in said["agree=False"]
    for case in ("of the node", "fixed, of the node", "groups, of the node", "by hand, of the node"):
        assert said[case].startswith("2 of 4 ranks agree on overflows in this ")
        assert "build it without process_group" in said[case]
    assert "are not all real numbers" in said["complex"]
    assert "lie on cpu, meta" in said["two devices"]
    assert "found 4 ranks in nodes of 3" in said["nodes of 3"]


def on_nodes_of(sizes: list[int], form: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(sizes[dist.get_rank()]))
        model = fresh() if form == "delta" else DistributedDataParallel(fresh())
        with pytest.raises(IncompatibleError) as error:
            adasum(model, sgd(model), on=form)
    return str(error.value)


@pytest.mark.dist
@pytest.mark.parametrize("form", ["delta", "gradient"])
@pytest.mark.parametrize("sizes", [[3, 3, 3, 1], [4, 4, 4, 4, 2, 2, 2, 2]])
def test_nodes_of_different_size_are_refused_on_every_rank(sizes, form):
    for said in run_ranks(on_nodes_of, len(sizes), sizes, form, timeout=20.0):
        assert said.startswith(f"found nodes of {min(sizes)} and {max(sizes)} ranks")


def different_weights(how: str, on: Any) -> tuple[str, bool]:
    torch.manual_seed(dist.get_rank())
    model = node_wrapped(mlp(), how, on, 2)
    optimizer = sgd(model)
    adasum(model, optimizer, on=on, devices_per_node=2)
    x, y = batch_of(dist.get_rank(), 0)
    F.cross_entropy(model(x), y).backward()
    before = tensors(model)
    try:
        optimizer.step()
    except IncompatibleError as error:
        return str(error), tensors(model) == before
    return "stepped", False


@pytest.mark.dist
@pytest.mark.parametrize(("how", "on"), [("bare", "delta"), ("ddp", "delta"), ("fsdp", "delta"), ("fsdp", "gradient")])
def test_nodes_that_begin_differently_are_refused_at_the_first_step(how, on):
    for said, kept in run_ranks(different_weights, 4, how, on):
        assert "differ between the ranks" in said
        assert "; start all ranks from the same seed" in said
        assert kept


def same_update_everywhere() -> list[str]:
    model = DistributedDataParallel(fresh())
    optimizer = sgd(model)
    adasum(model.module, optimizer, devices_per_node=1)  # attached before it was wrapped, over all ranks
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(model, optimizer, 3)
    return [str(warning.message) for warning in said if warning.category is NoEffectWarning]


@pytest.mark.dist
def test_equal_updates_are_told_once():
    for said in run_ranks(same_update_everywhere, 2):
        assert len(said) == 1
        assert "all nodes made the same update" in said[0]


def agreement(on: Any) -> tuple[float, dict[str, float], list[list[float]]]:
    model = node_wrapped(fresh(), "ddp", on, 1)
    optimizer = sgd(model)
    summing = adasum(model, optimizer, on=on, devices_per_node=1)
    alone = copy.deepcopy(fresh())
    x, y = batch_of(dist.get_rank(), 0)
    F.cross_entropy(alone(x), y).backward()
    train(model, optimizer, 1)
    return summing.agreement, summing.cosines, [p.grad.flatten().tolist() for p in alone.parameters()]  # pyright: ignore


@pytest.mark.dist
@pytest.mark.parametrize("on", ["delta", "gradient"])
def test_agreement_is_the_cosine_between_the_nodes(on):
    first, second = run_ranks(agreement, 2, on)
    assert first[:2] == second[:2]
    mean, cosines, _ = first
    assert list(cosines) == [name for name, _ in mlp().named_parameters()]
    for found, a, b in zip(cosines.values(), first[2], second[2], strict=True):
        wanted = F.cosine_similarity(torch.tensor(a).double(), torch.tensor(b).double(), dim=0)
        assert found == pytest.approx(float(wanted), abs=1e-4)
    assert mean == pytest.approx(sum(cosines.values()) / len(cosines))


def collectives(how: str, on: Any) -> dict[str, int]:
    """Count the exchanges in one update, for several packings: between two ranks two for each pack."""
    counts = {}
    for name, points, megabytes in (
        ("one", None, 25),
        ("two", (2,), 25),
        ("three", (2, 4), 25),
        ("three of small buckets", (2, 4), 1e-6),
        ("behind the end", (50, 100), 25),
    ):
        options = {"bucket_cap_mb": megabytes} if how == "ddp" else {}
        model = node_wrapped(fresh(), how, on, 1, **options)
        optimizer = sgd(model)
        adasum(model, optimizer, on=on, split_groups=points, devices_per_node=1)
        train(model, optimizer, 2)
        with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as exchange:
            train(model, optimizer, 1, first=2)
        counts[name] = exchange.call_count
    return counts


@pytest.mark.dist
@pytest.mark.parametrize(("how", "on"), [("bare", "delta"), ("ddp", "gradient")])
def test_split_groups_decide_the_number_of_collectives(how, on):
    for found in run_ranks(collectives, 2, how, on):
        assert found == {"one": 2, "two": 4, "three": 6, "three of small buckets": 6, "behind the end": 2}


def train_step_and_own_loop(on: Any) -> bool:
    found = []
    for own in (True, False):
        model = node_wrapped(fresh(), "ddp", on, 1)
        target = Target(model, torch.optim.Adam(model.parameters(), lr=0.01))
        attached = attach_all(target, [AdaptiveSum(on=on, devices_per_node=1)])
        step = TrainStep(target, lambda x, y, model=model: F.cross_entropy(model(x), y), attached=attached)
        if own:
            train(model, target.optimizer, 3)
        else:
            for number in range(3):
                step(*batch_of(dist.get_rank(), number))
        assert attached.state_dict() == {"adasum": {}}
        found.append(tensors(model))
    return found[0] == found[1]


@pytest.mark.dist
@pytest.mark.parametrize("on", ["delta", "gradient"])
def test_an_own_loop_equals_the_train_step(on):
    assert run_ranks(train_step_and_own_loop, 2, on) == [True, True]


def sizes_asked() -> list[int]:
    """How often ranks ask each other for the size of their nodes, when called directly and from a plan."""
    asked = []
    for attach in (
        lambda model: adasum(model, sgd(model), devices_per_node=1).remove(),
        lambda model: attach_all(Target(model, sgd(model)), [AdaptiveSum(devices_per_node=1)]).remove(),
    ):
        with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gather:
            attach(mlp())
            asked.append(gather.call_count)
    return asked


@pytest.mark.dist
def test_ranks_ask_once_for_the_size_of_nodes():
    assert run_ranks(sizes_asked, 2) == [[1, 1], [1, 1]]
