from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.memory import live_tensors
from tests.support.offload import (
    SMALL,
    Remote,
    assert_same_state,
    assert_same_weights,
    small_network,
    train,
    weights,
)
from torchboost.errors import IncompatibleError
from torchboost.optim.pipeline import GradientPipeline
from torchboost.optim.rules.adam import Adam
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.rules.offload import AdamOffload
from torchboost.optim.rules.staging import Transfer
from torchboost.optim.transforms import Centralize, ClipNorm, Coalesce, Decay


@settings(max_examples=25)
@given(chunk=st.floats(SMALL, 0.2), masters=st.booleans(), nesterov=st.booleans())
def test_any_chunk_size_gives_the_same_weights(chunk, masters, nesterov):
    dtype = torch.bfloat16 if masters else torch.float32
    ours, whole = small_network(dtype), small_network(dtype)
    options: dict[str, Any] = {"weight_decay": 0.1, "nesterov": nesterov, "amsgrad": True}
    first = Remote(ours.parameters(), chunk_mebibytes=chunk, **options)
    second = AdamOffload(whole.parameters(), **options)
    train(ours, first, range(3))
    train(whole, second, range(3))
    assert_same_weights(ours, whole)
    assert_same_state(first, second)
    assert first._stagings[torch.device("cpu")].allocated <= 2 * chunk * 2**20


def test_masters_move_where_the_parameter_cannot():
    model = small_network(torch.bfloat16)
    optimizer = Remote(model.parameters(), lr=1e-5)
    train(model, optimizer, range(20))
    for param in model.parameters():
        state = optimizer.state[param]
        assert state["master"].dtype == state["exp_avg"].dtype == torch.float32
        assert torch.equal(state["master"].bfloat16(), param)
    assert not torch.equal(state["master"], param.float())


@pytest.mark.parametrize("kind", [AdamOffload, Remote])
def test_parameters_with_gaps_leave_what_lies_between(kind):
    whole = torch.ones(6, 10)
    param = nn.Parameter(whole[:, ::2])
    param.grad = torch.ones(6, 5)
    kind([param], lr=0.5).step()
    torch.testing.assert_close(whole[:, ::2], torch.full((6, 5), 0.5))
    assert torch.equal(whole[:, 1::2], torch.ones(6, 5))


@pytest.mark.parametrize("kind", [AdamOffload, Remote])
@pytest.mark.parametrize("at", range(4))
def test_resuming_is_bit_identical(kind, at):
    through, model = small_network(torch.bfloat16), small_network(torch.bfloat16)
    options: dict[str, Any] = {"lr": [0.1, 0.05, 0.02, 0.01, 0.1], "chunk_mebibytes": SMALL, "amsgrad": True}
    train(through, kind(through.parameters(), **options), range(5))
    optimizer = kind(model.parameters(), **options)
    train(model, optimizer, range(at))
    buffer = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), buffer)
    buffer.seek(0)
    again = small_network(torch.bfloat16)
    resumed = kind(again.parameters(), **options)
    saved, state = torch.load(buffer)
    resumed.load_state_dict(state)  # before the weights, which is as good
    again.load_state_dict(saved)
    train(again, resumed, range(at, 5))
    assert_same_weights(again, through)


def test_loading_never_makes_state_on_the_device():
    """Meta stands for a device without room: what is moved there is lost."""
    model = small_network()
    source = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, source, range(2))
    with torch.device("meta"):
        there = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 31))
    optimizer = AdamOffload(there.parameters())
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(type(state["state"][0]["exp_avg"])))
    optimizer.register_load_state_dict_post_hook(
        lambda loaded: seen.extend({value.device.type for s in loaded.state.values() for value in s.values()})
    )
    optimizer.load_state_dict(source.state_dict())
    assert seen == [Tensor, "cpu"]
    for ours, theirs in zip(optimizer.state.values(), source.state.values(), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) and ours[key] is not theirs[key] for key in theirs)
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


def test_a_checkpoint_that_does_not_fit_changes_nothing():
    model = small_network()
    optimizer = Remote(model.parameters())
    train(model, optimizer, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    other = AdamOffload([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(other.state_dict())
    wrong = copy.deepcopy(before)
    wrong["state"][0]["exp_avg"] = torch.zeros(77)
    with pytest.raises(ValueError, match="exp_avg"):
        optimizer.load_state_dict(wrong)
    for index, entries in before["state"].items():
        assert all(torch.equal(optimizer.state_dict()["state"][index][key], value) for key, value in entries.items())
    assert not optimizer._optimizer_load_state_dict_pre_hooks


def test_masters_another_optimizer_did_not_know_are_made_anew():
    model = small_network(torch.bfloat16)
    first = AdamOffload(model.parameters(), lr=0.1)
    train(model, first, range(2))
    theirs = torch.optim.AdamW(model.parameters(), lr=0.1)
    theirs.load_state_dict(copy.deepcopy(first.state_dict()))
    train(model, theirs, range(2, 5))
    before = weights(model)
    for kind in (AdamOffload, Remote):
        copied = copy.deepcopy(model)
        ours = kind(copied.parameters(), lr=0.0)
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        ours.param_groups[0]["lr"] = 0.0
        train(copied, ours, range(5, 6))
        for param, value in zip(copied.parameters(), before, strict=True):
            assert torch.equal(param, value)
            assert ours.state[param]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("kind", [AdamOffload, Remote])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_alike(kind, copied):
    model = small_network(torch.bfloat16)
    optimizer = (
        kind(model.parameters(), lr=lambda n: 0.1 / (n + 1), chunk_mebibytes=SMALL)
        if copied is copy.deepcopy
        else kind(model.parameters(), lr=0.1, chunk_mebibytes=SMALL)
    )
    train(model, optimizer, range(2))
    other, twin = copied((model, optimizer))
    assert twin.chunk_mebibytes == SMALL
    train(model, optimizer, range(2, 4))
    train(other, twin, range(2, 4))
    assert_same_weights(model, other)
    assert_same_state(optimizer, twin)


@pytest.mark.parametrize("kind", [AdamOffload, Remote])
def test_transforms_run_where_the_gradients_are(kind):
    chain = (Decay(0.1), Centralize(), ClipNorm(0.5))
    model, plain = small_network(), small_network()
    train(model, kind(model.parameters(), transforms=chain, chunk_mebibytes=SMALL), range(3))
    train(plain, Adam(plain.parameters(), fused=True, transforms=chain), range(3))
    assert_same_weights(model, plain)
    attached = small_network()
    optimizer = kind(attached.parameters())
    GradientPipeline(*chain).attach(optimizer)
    train(attached, optimizer, range(3))
    assert_same_weights(attached, plain)


def test_transforms_and_masters():
    model, plain = small_network(torch.bfloat16), small_network(torch.bfloat16)
    train(model, Remote(model.parameters(), transforms=(ClipNorm(0.5),), chunk_mebibytes=SMALL), range(3))
    train(plain, Adam(plain.parameters(), fused=True, master_weights=True, transforms=(ClipNorm(0.5),)), range(3))
    assert_same_weights(model, plain)


@pytest.mark.parametrize("kind", [AdamOffload, Remote])
def test_sparse_gradients_are_refused_first(kind):
    table = nn.Embedding(5, 3, sparse=True)
    dense = nn.Linear(3, 1)
    dense(table(torch.tensor([1, 2]))).sum().backward()
    params = [*dense.parameters(), *table.parameters()]
    before = [param.detach().clone() for param in params]
    for transforms in ((), (Coalesce(),)):
        optimizer = kind(params, transforms=transforms)
        with pytest.raises(IncompatibleError, match="dense"):
            optimizer.step()
        assert all(torch.equal(param, value) for param, value in zip(params, before, strict=True))
    kind(params, transforms=(Coalesce(dense=True),)).step()
    assert not any(torch.equal(param, value) for param, value in zip(params, before, strict=True))


@pytest.mark.parametrize("option", ["foreach", "capturable"])
def test_choices_of_kernel_are_refused(option):
    param = nn.Parameter(torch.zeros(2))
    optimizer = AdamOffload([param])
    with pytest.raises(ValueError, match=option):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], option: True})
    with pytest.raises(ValueError, match="fused"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "fused": False})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"chunk_mebibytes": 0}, ValueError),
        ({"chunk_mebibytes": 1e-3}, ValueError),
        ({"chunk_mebibytes": "64"}, TypeError),
        ({"pin_memory": 1}, TypeError),
        ({"lr": -1.0}, ValueError),
    ],
)
def test_senseless_options(options, error):
    with pytest.raises(error, match=next(iter(options))):
        AdamOffload([nn.Parameter(torch.zeros(2))], **options)


def test_dtensors_on_a_device_are_refused():
    class Sharded(nn.Parameter):
        placements = ()

    param = Sharded(torch.zeros(2))
    param.grad = torch.ones(2)
    with pytest.raises(IncompatibleError, match="CPUOffloadPolicy"):
        Remote([param]).step()


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("transforms", [(), (ClipNorm(1.0),)])
def test_the_plan_is_what_happens(masters, amsgrad, transforms):
    moved = {"down": 0, "up": 0, "chunks": 0}

    class Counting(Transfer):
        def to_host(self, slot: int, targets: Any, sources: Any) -> None:
            moved["down"] += sum(source.nbytes for source in sources)
            moved["chunks"] += 1
            super().to_host(slot, targets, sources)

        def to_device(self, slot: int, targets: Any, sources: Any) -> None:
            moved["up"] += sum(source.nbytes for source in sources)
            super().to_device(slot, targets, sources)

    class Counted(Remote):
        def _transfer(self, device: torch.device) -> Transfer:
            return Counting()

    model = small_network(torch.bfloat16)
    optimizer = Counted(
        model.parameters(), master_weights=masters, amsgrad=amsgrad, transforms=transforms, chunk_mebibytes=0.01
    )
    plan = optimizer.plan()
    assert not optimizer.state
    train(model, optimizer, range(1))
    assert plan.bytes_to_host == moved["down"]
    assert plan.bytes_to_device == moved["up"]
    assert plan.chunks == moved["chunks"] > 2
    assert plan.staging_bytes == optimizer._stagings[torch.device("cpu")].allocated
    assert plan.state_bytes == sum(value.nbytes for state in optimizer.state.values() for value in state.values())


def test_the_plan_for_parameters_on_the_host():
    model = small_network()
    model[0].requires_grad_(False)
    plan = AdamOffload(model.parameters()).plan()
    assert plan.bytes_to_host == plan.bytes_to_device == plan.staging_bytes == plan.chunks == 0
    moving = [param for param in model.parameters() if param.requires_grad]
    assert plan.state_bytes == sum(8 * param.numel() + 4 for param in moving)


@pytest.mark.parametrize("kind", [AdamOffload, Remote])
def test_no_memory_is_added_step_by_step(kind):
    model = small_network(torch.bfloat16)
    optimizer = kind(model.parameters(), chunk_mebibytes=SMALL)
    train(model, optimizer, range(3))
    count, size = live_tensors()
    train(model, optimizer, range(60))
    count_after, size_after = live_tensors()
    assert count_after <= count
    assert size_after <= size


def test_the_base_is_an_ordinary_rule():
    assert issubclass(AdamOffload, UpdateRule)
    assert not AdamOffload([nn.Parameter(torch.zeros(1))])._step_supports_amp_scaling
