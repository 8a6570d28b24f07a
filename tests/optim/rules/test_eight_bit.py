from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.support.optimizers import give_grads, parameters, train, values
from torchboost.errors import IncompatibleError
from torchboost.optim.rules import eight_bit
from torchboost.optim.rules.adam import Adam, AdamW, AdamWeightDecay
from torchboost.optim.rules.eight_bit import BLOCK, pack, unpack
from torchboost.optim.rules.lazy_adam import LazyAdam
from torchboost.optim.rules.offload import AdamOffload

SHAPES = ((64, 65), (32, 16, 3, 3), (64,))
FORMS = {
    "default": {},
    "fused": {"fused": True},
    "loop": {"foreach": False},
    "amsgrad": {"amsgrad": True},
    "nesterov": {"nesterov": True},
}


def sample(signed: bool, entries: int = 10 * BLOCK + 17) -> Tensor:
    drawn = torch.randn(entries, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 3, entries)
    return drawn if signed else drawn.square()


@pytest.mark.parametrize(("signed", "share", "relative"), [(True, 0.01, 0.07), (False, 0.006, 0.04)])
def test_packing_keeps_the_documented_precision(signed, share, relative):
    wanted = sample(signed)
    codes, scales = pack(wanted, signed=signed)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, wanted.shape, (11,))
    found = unpack(codes, scales, signed=signed)
    for block, own in zip(wanted.split(BLOCK), found.split(BLOCK), strict=True):
        largest = block.abs().max()
        assert ((own - block).abs() <= share * largest).all()
        large = block.abs() >= largest / 10
        assert ((own - block).abs() <= relative * block.abs())[large].all()
        assert own[block.abs().argmax()] == block[block.abs().argmax()]


@pytest.mark.parametrize("signed", [True, False])
def test_packing_what_was_unpacked_changes_nothing(signed):
    codes, scales = pack(sample(signed), signed=signed)
    again, other = pack(unpack(codes, scales, signed=signed), signed=signed)
    assert torch.equal(codes, again)
    assert torch.equal(scales, other)


def test_every_code_is_its_own_nearest_share():
    for signed in (True, False):
        codes = torch.arange(256, dtype=torch.uint8)
        found, scale = pack(unpack(codes, torch.ones(1), signed=signed), signed=signed)
        assert torch.equal(found, codes)
        assert scale.tolist() == [1.0]


def test_zeros_stay_zeros_and_what_is_not_finite_becomes_nan():
    wanted = torch.zeros(3 * BLOCK)
    wanted[BLOCK], wanted[2 * BLOCK] = torch.inf, torch.nan
    found = unpack(*pack(wanted, signed=True), signed=True)
    assert torch.equal(found[:BLOCK], torch.zeros(BLOCK))
    assert found[BLOCK:].isnan().all()


def test_layouts_are_kept():
    wanted = torch.randn(8, 16, 6, 6).to(memory_format=torch.channels_last)
    codes, scales = pack(wanted, signed=True)
    assert codes.is_contiguous(memory_format=torch.channels_last)
    found = unpack(codes, scales, signed=True)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.01 * float(wanted.abs().max()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", [Adam, AdamW, AdamWeightDecay])
def test_the_update_follows_that_with_moments_in_full(rule, form):
    exact, params = parameters(SHAPES), parameters(SHAPES)
    options = {"lr": 0.01, "betas": (0.9, 0.99), **FORMS[form]}
    truth, optimizer = rule(exact, **options), rule(params, moments_8bit=True, **options)
    start = [param.detach().clone() for param in exact]
    train(truth, exact, range(20))
    train(optimizer, params, range(20))
    for param, wanted, old in zip(params, exact, start, strict=True):
        way = (wanted - old).norm()
        assert (param - wanted).norm() <= 0.05 * way
    assert torch.equal(params[2], exact[2])  # below 4,096 entries


def test_a_weight_takes_two_bytes_of_state():
    params = parameters(SHAPES)
    optimizer = Adam(params, moments_8bit=True)
    train(optimizer, params, range(1))
    state = optimizer.state[params[0]]
    held = sum(v.numel() * v.element_size() for v in state.values() if v.ndim)
    assert held <= 2 * params[0].numel() * (1 + 4 / BLOCK) + 8
    assert {key: value.dtype for key, value in optimizer.state[params[2]].items() if value.ndim} == {
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    }


@pytest.mark.parametrize("form", FORMS)
def test_resume_is_bit_identical(form):
    params = parameters(SHAPES)
    optimizer = AdamW(params, lr=0.01, moments_8bit=True, **FORMS[form])
    train(optimizer, params, range(3))
    weights, state = [param.detach().clone() for param in params], copy.deepcopy(optimizer.state_dict())
    train(optimizer, params, range(3, 6))
    others = [nn.Parameter(weight) for weight in weights]
    resumed = AdamW(others, lr=0.01, **FORMS[form])  # the file says that the moments have 8 bits
    resumed.load_state_dict(state)
    train(resumed, others, range(3, 6))
    assert values(resumed) == values(optimizer)


def test_state_of_torch_is_packed_at_the_next_step_and_unpacked_when_it_is_turned_off():
    params = parameters(SHAPES)
    other = torch.optim.AdamW(params, lr=0.01)
    train(other, params, range(2))
    optimizer = AdamW(params, lr=0.01, moments_8bit=True)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.state[params[0]]["exp_avg"].dtype is torch.float32
    train(optimizer, params, range(2, 3))
    assert optimizer.state[params[0]]["exp_avg"].dtype is torch.uint8
    optimizer.param_groups[0]["moments_8bit"] = False
    train(optimizer, params, range(3, 4))
    state = optimizer.state[params[0]]
    assert state["exp_avg"].dtype is torch.float32
    assert not [key for key in state if key.endswith(eight_bit.SCALE)]
    train(optimizer, params, range(4, 5))


def test_with_masters_stochastic_rounding_and_transforms():
    for masters in (True, "stochastic"):
        params = parameters(SHAPES, dtype=torch.bfloat16)
        optimizer = AdamW(params, lr=0.01, moments_8bit=True, master_weights=masters)
        exact = parameters(SHAPES, dtype=torch.bfloat16)
        truth = AdamW(exact, lr=0.01, master_weights=True)
        train(optimizer, params, range(10))
        train(truth, exact, range(10))
        assert optimizer.state[params[0]]["exp_avg"].dtype is torch.uint8
        for param, wanted in zip(params, exact, strict=True):
            assert (param.float() - wanted.float()).norm() <= 0.02 * wanted.float().norm()


def test_a_step_that_the_scaler_skips_changes_no_bit():
    params = parameters(SHAPES)
    optimizer = Adam(params, lr=0.01, fused=True, moments_8bit=True)
    train(optimizer, params, range(2))
    before = values(optimizer)
    give_grads(params, 2)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf
    assert values(optimizer) == before


def test_what_cannot_be_packed_is_refused_before_anything_is_changed():
    for wrong in ({"native": True}, {"capturable": True}):
        with pytest.raises(ValueError, match="moments_8bit"):
            Adam(parameters(SHAPES), moments_8bit=True, **wrong)
    for rule in (LazyAdam, AdamOffload):
        optimizer = rule(parameters(SHAPES))
        optimizer.param_groups[0]["moments_8bit"] = True
        with pytest.raises(ValueError, match="moments_8bit"):
            optimizer.step()
    with pytest.raises(TypeError, match="moments_8bit"):
        Adam(parameters(SHAPES), moments_8bit="yes")  # pyright: ignore[reportArgumentType]
    complex_one = nn.Parameter(torch.randn(64, 65, dtype=torch.complex64))
    optimizer = Adam([complex_one], moments_8bit=True)
    complex_one.grad = torch.randn_like(complex_one)
    with pytest.raises(IncompatibleError, match="complex64"):
        optimizer.step()
