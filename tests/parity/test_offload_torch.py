"""Offloaded Adam against torch's own on the host: weights, state, and what training loops do with an optimizer."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.offload import (
    SMALL,
    Remote,
    assert_same_state,
    assert_same_weights,
    give_grads,
    small_network,
    train,
)
from torchboost.optim.rules.adam import Adam
from torchboost.optim.rules.offload import AdamOffload

OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "amsgrad": True},
    {"weight_decay": 0.1, "maximize": True},
    {"lr": torch.tensor(0.02), "betas": (0.7, 0.9), "eps": 1e-3},
]


@pytest.mark.parametrize("kind", [AdamOffload, Remote])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bit_for_bit_torch_fused(kind, dtype):
    for changes, reference in itertools.product(OPTIONS, (torch.optim.Adam, torch.optim.AdamW)):
        options: dict[str, Any] = {"weight_decay": 0.0} | changes
        ours, theirs = small_network(dtype), small_network(dtype)
        own = {"chunk_mebibytes": SMALL, "decoupled_weight_decay": reference is torch.optim.AdamW}
        first = kind(ours.parameters(), master_weights=False, **options, **own)
        second = reference(theirs.parameters(), fused=True, **options)
        for step in range(4):
            train(ours, first, range(step, step + 1))
            train(theirs, second, range(step, step + 1))
            assert_same_weights(ours, theirs)
        assert_same_state(first, second)


FORMS = [
    {"nesterov": True},
    {"eps_uncorrected": True, "weight_decay": 0.1},
    {"nesterov": True, "amsgrad": True, "decoupled_weight_decay": True, "weight_decay": 0.1},
    {"bias_correction": False},
    {"bias_correction": False, "eps_uncorrected": True, "maximize": True},
]


@pytest.mark.parametrize("kind", [AdamOffload, Remote])
def test_other_forms_are_those_of_adam(kind):
    for form, masters in itertools.product(FORMS, (False, True)):
        dtype = torch.bfloat16 if masters else torch.float32
        ours, theirs = small_network(dtype), small_network(dtype)
        train(ours, kind(ours.parameters(), chunk_mebibytes=SMALL, master_weights=masters, **form), range(4))
        fused = None if form.keys() & {"nesterov", "eps_uncorrected"} else True
        train(theirs, Adam(theirs.parameters(), fused=fused, master_weights=masters, **form), range(4))
        assert_same_weights(ours, theirs)


def test_groups_with_options_of_their_own_added_late_and_parameters_without_gradient():
    models = [small_network(), small_network()]
    for kind, model in zip((Remote, torch.optim.AdamW), models, strict=True):
        own = {"decoupled_weight_decay": True, "weight_decay": 0.01} if kind is Remote else {"fused": True}
        params = list(model.parameters())
        optimizer = kind([{"params": params[:2], "lr": 0.1}, {"params": params[2:3]}], lr=0.01, **own)
        train(model, optimizer, range(2))
        optimizer.add_param_group({"params": params[3:], "eps": 1e-2})
        give_grads(model, 7)
        params[1].grad = params[-1].grad = None
        optimizer.step()
        train(model, optimizer, range(2, 4))
    assert_same_weights(*models)


@pytest.mark.parametrize("kind", [AdamOffload, Remote])
@pytest.mark.parametrize("form", [torch.channels_last, torch.contiguous_format])
def test_memory_order_of_weights_and_gradients(kind, form):
    model, plain = small_network().to(memory_format=form), small_network()
    first, second = kind(model.parameters(), chunk_mebibytes=SMALL), torch.optim.Adam(plain.parameters(), fused=True)
    for step in range(4):
        give_grads(model, step)
        give_grads(plain, step)
        if step == 2:
            model.to(memory_format=torch.channels_last)  # after there was state
        first.step()
        second.step()
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [AdamOffload, Remote])
@pytest.mark.parametrize("fused", [True, None])
def test_checkpoints_of_torch_go_both_ways(kind, fused):
    through, model = small_network(), small_network()
    reference = torch.optim.AdamW(through.parameters(), weight_decay=0.1, fused=True)
    train(through, reference, range(3))
    theirs = torch.optim.AdamW(model.parameters(), weight_decay=0.1, fused=True)
    train(model, theirs, range(1))
    written = copy.deepcopy(theirs.state_dict())
    written["param_groups"][0]["fused"] = fused
    ours = kind(model.parameters(), decoupled_weight_decay=True)
    ours.load_state_dict(written)
    train(model, ours, range(1, 2))
    back = torch.optim.AdamW(model.parameters(), fused=True)
    back.load_state_dict(ours.state_dict())
    train(model, back, range(2, 3))
    assert_same_weights(model, through)
    assert list(ours.state_dict()["state"][0]) == ["step", "exp_avg", "exp_avg_sq"]


def test_grad_scaler_and_accumulation():
    model, plain = small_network(), small_network()
    x, y = torch.randn(3, 4, 3, 8, 8), torch.randint(31, (3, 4))
    for net, optimizer in (
        (model, Remote(model.parameters(), lr=0.1)),
        (plain, torch.optim.Adam(plain.parameters(), lr=0.1, fused=True)),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(3):
                loss = nn.functional.cross_entropy(net(x[part]), y[part]) / 3
                scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
        assert all(state["step"] == 3 for state in optimizer.state.values())
    assert_same_weights(model, plain)


def test_weights_set_from_outside_are_honoured():
    model, plain = small_network(), small_network()
    for net, optimizer in (
        (model, Remote(model.parameters())),
        (plain, torch.optim.Adam(plain.parameters(), fused=True)),
    ):
        train(net, optimizer, range(2))
        for param in net.parameters():
            param.data.mul_(0.5)
        train(net, optimizer, range(2, 4))
    assert_same_weights(model, plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunk", [SMALL, 0.05, 64.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masters", [False, True])
def test_parameters_on_cuda_equal_fused_adamw_on_the_host(chunk, dtype, masters):
    there, here = small_network(dtype).cuda(), small_network(dtype)
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    optimizer = AdamOffload(
        there.parameters(), decoupled_weight_decay=True, master_weights=masters, chunk_mebibytes=chunk, **options
    )
    if masters and dtype is torch.bfloat16:
        reference: torch.optim.Optimizer = Adam(
            here.parameters(), decoupled_weight_decay=True, master_weights=True, fused=True, **options
        )
    else:
        reference = torch.optim.AdamW(here.parameters(), fused=True, **options)
    for step in range(20):
        give_grads(here, step)
        for far, near in zip(there.parameters(), here.parameters(), strict=True):
            far.grad = near.grad.cuda()
        optimizer.step()
        reference.step()
        for far, near in zip(there.parameters(), here.parameters(), strict=True):
            assert torch.equal(far.cpu(), near)  # ordered on the current stream
    for state in optimizer.state.values():
        assert all(value.device.type == "cpu" for value in state.values())
        assert state["exp_avg"].is_pinned()
    loaded = torch.optim.AdamW(there.parameters())
    loaded.load_state_dict(optimizer.state_dict())
    before = torch.cuda.memory_allocated()
    optimizer.load_state_dict(loaded.state_dict())
    assert torch.cuda.memory_allocated() <= before
    assert all(value.device.type == "cpu" for state in optimizer.state.values() for value in state.values())
