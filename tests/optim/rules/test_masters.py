"""Weights and moments in low precision: masters, stochastic rounding, moments in 8 bits."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.optimizers import CASES, give_grads, parameters, train, values
from torchboost.errors import IncompatibleError
from torchboost.optim import (
    SGD,
    Adam,
    AdamOffload,
    AdamW,
    AdamWeightDecay,
    Lamb,
    LazyAdam,
    MixedOptimizer,
    ScheduleFreeAdamW,
)
from torchboost.optim.rules import masters
from torchboost.optim.rules.masters import BLOCK, SCALE, noise, pack, stochastically_rounded, unpack

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["Adam-fused", "SGD-foreach", "LARS-default", "Lamb", "LazyAdam", "AdamOffload"])
def test_pieces_change_no_bit(name, monkeypatch):
    found = []
    for piece in (masters.PIECE, 5):
        monkeypatch.setattr(masters, "PIECE", piece)
        params = parameters(dtype=torch.bfloat16)
        optimizer = CASES[name](params, master_weights=True)
        train(optimizer, params, range(3))
        found.append(values(optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["SGD-plain", "Adam-fused", "LazyAdam", "AdamOffload", "Lamb"])
def test_masters_follow_weights_that_were_written(name):
    params = parameters([(4, 3), (4,)], dtype=torch.bfloat16)
    optimizer = CASES[name](params, master_weights=True)
    train(optimizer, params, range(2))
    kept = optimizer.state[params[0]]["master"].clone()
    with torch.no_grad():
        params[0][1:] = 3.0
        params[1].copy_(torch.full((4,), -2.0))
    give_grads(params, 2, scale=0.0)
    optimizer.param_groups[0].update(lr=1e-12, weight_decay=0.0)
    optimizer.step()
    assert torch.equal(params[0][1:], torch.full((3, 3), 3.0, dtype=torch.bfloat16))
    assert torch.equal(params[1], torch.full((4,), -2.0, dtype=torch.bfloat16))
    torch.testing.assert_close(optimizer.state[params[0]]["master"][0], kept[0], rtol=0, atol=1e-7)


def test_masters_follow_a_model_that_is_loaded():
    for kind in ("weights", "weights and state", "replaced"):
        torch.manual_seed(0)
        model, other = (nn.Linear(4, 3).bfloat16() for _ in range(2))
        optimizer = SGD(model.parameters(), lr=1e-12, master_weights=True)
        train(optimizer, list(model.parameters()), [0])
        state = optimizer.state_dict()
        if kind == "replaced":
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(other.parameters()), model.parameters())
        else:
            model.load_state_dict(other.state_dict())
        if kind == "weights and state":
            optimizer.load_state_dict(state)
        train(optimizer, list(model.parameters()), [1])
        assert all(map(torch.equal, model.parameters(), other.parameters())), kind


STOCHASTIC = [
    *("Adam-fused", "Adam-default", "Adam-nesterov", "AdamW-default", "SGD-fused", "SGD-plain", "LARS-default", "Lamb"),
    *("RMSprop", "RMSProp-centered", "FTRL", "Muon", "MixedOptimizer"),
]


def test_stochastic_rounding_gives_a_neighbour_and_the_value_on_average():
    values = torch.tensor([1.0, 1.001, -1.001, 3.14159, 1e-30, -7e20, 0.0, math.inf, -math.inf, math.nan])
    generator = torch.Generator().manual_seed(0)
    found = torch.stack([stochastically_rounded(values, generator) for _ in range(4000)])
    assert found.dtype is torch.bfloat16
    finite = values.isfinite()
    assert torch.equal(found[:, ~finite].float()[0].nan_to_num(7.0), values[~finite].nan_to_num(7.0))
    down = (values.view(torch.int32) & -(2**16)).view(torch.float32)
    up = ((values.view(torch.int32) + (2**16 - 1)) & -(2**16)).view(torch.float32)
    neighbours = (found.float() == down) | (found.float() == up)
    assert neighbours[:, finite].all()
    mean = found.double().mean(0)[finite]
    error = (up - down).double().abs()[finite] / 2 / math.sqrt(4000)
    assert ((mean - values.double()[finite]).abs() <= 5 * error).all()


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding_follows_the_float32_run_and_resumes_bit_identically(name):
    shapes = [(40, 30), (30,)] if not name.startswith("Muon") else [(40, 30), (30, 30)]
    exact = [nn.Parameter(param.detach().bfloat16().float()) for param in parameters(shapes)]
    rounded = [nn.Parameter(param.detach().bfloat16()) for param in exact]
    truth, optimizer = CASES[name](exact), CASES[name](rounded, master_weights="stochastic")
    for step in range(20):
        give_grads(rounded, step)
        for one, other in zip(exact, rounded, strict=True):
            one.grad = other.grad.float()
        truth.step()
        optimizer.step()
    for param, wanted in zip(rounded, exact, strict=True):
        # 20 roundings with errors of at most 2**-7 of the largest weight: their sum grows as the root, without a drift
        error = (param.detach().float() - wanted.detach()) / wanted.detach().abs().max()
        assert error.abs().max() < 6 * math.sqrt(20) * 2**-7
        assert error.mean().abs() < 6 * math.sqrt(20) * 2**-7 / math.sqrt(param.numel())
    state = optimizer.state[rounded[0]]
    assert "master" not in state
    assert not [key for key, value in state.items() if isinstance(value, Tensor) and value.dtype is torch.bfloat16]
    others, saved = [nn.Parameter(param.detach().clone()) for param in rounded], copy.deepcopy(optimizer.state_dict())
    train(optimizer, rounded, range(3, 6))
    resumed = CASES[name](others, master_weights="stochastic")
    resumed.load_state_dict(saved)
    train(resumed, others, range(3, 6))
    assert values(resumed) == values(optimizer)


def test_small_updates_are_kept():
    params = [nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))]
    optimizer = SGD(params, lr=1e-4, master_weights="stochastic")
    for _ in range(100):
        params[0].grad = torch.ones(1000, dtype=torch.bfloat16)
        optimizer.step()
    assert params[0].detach().float().mean().item() == pytest.approx(0.99, abs=0.002)


def test_stochastic_rounding_in_parts_covers_every_parameter(monkeypatch):
    monkeypatch.setattr(masters, "PIECE", 5)
    params = parameters([(4, 3), (4,), (2,), (30,)], dtype=torch.bfloat16)
    before = [param.detach().clone() for param in params]
    optimizer = CASES["SGD-plain"](params, master_weights="stochastic")
    optimizer.param_groups[0]["lr"] = 1.0
    train(optimizer, params, range(1))
    for param, old in zip(params, before, strict=True):
        wanted = old.float() - param.grad.float()
        assert ((param.float() - wanted).abs() <= wanted.abs() * 2**-7).all()


def test_a_float32_parameter_stays_exact_next_to_rounded_ones():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    plain = [nn.Parameter(torch.ones(3))]
    train(SGD(params, lr=0.01, master_weights="stochastic"), params, range(3))
    train(SGD(plain, lr=0.01), plain, range(3))
    assert torch.equal(params[0], plain[0])


def test_where_stochastic_rounding_is_refused():
    for name in ("LazyAdam", "AdamOffload", "ScheduleFreeAdamW"):
        with pytest.raises(ValueError, match="stochastic"):
            CASES[name](parameters([(4, 3)], dtype=torch.bfloat16), master_weights="stochastic")
    params = parameters([(4, 3)], dtype=torch.float16)
    optimizer = CASES["SGD-plain"](params, master_weights="stochastic")
    give_grads(params, 0)
    with pytest.raises(IncompatibleError, match="float16"):
        optimizer.step()
    with pytest.raises(TypeError, match="'stochastic'"):
        CASES["SGD-plain"](params, master_weights="random")


# Moments in 8 bits

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


@pytest.mark.parametrize("signed", [True, False])
def test_packing_keeps_the_documented_precision(signed):
    wanted = sample(signed)
    codes, scales = pack(wanted, signed=signed)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, wanted.shape, (11,))
    found = unpack(codes, scales, signed=signed)
    for block, own in zip(wanted.split(BLOCK), found.split(BLOCK), strict=True):
        largest = block.abs().max()
        kept = block.abs() >= largest * (2.0**-21 if signed else 2.0**-42)
        assert ((own - block).abs() <= 0.123 * block.abs())[kept].all()
        assert (own.abs() <= largest * 2.0**-20)[~kept].all()
        assert own[block.abs().argmax()] == block[block.abs().argmax()]


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_stands_for_a_value_of_its_own_that_no_noise_moves(signed):
    codes = torch.arange(1, 256, dtype=torch.uint8)
    for scale in (1.0, 3.7e-5, 2.9e12):
        kept = unpack(codes, torch.tensor([scale]), signed=signed)
        assert kept.unique().numel() == 255
        for seed in range(20):
            found, scales = pack(kept, signed=signed, noise=noise(seed, CPU))
            assert torch.equal(found, codes)
            assert scales.tolist() == [torch.tensor(scale).item()]


@pytest.mark.parametrize("signed", [True, False])
def test_the_mean_over_many_roundings_is_the_value(signed):
    wanted = sample(signed, BLOCK)
    total = torch.zeros(BLOCK, dtype=torch.float64)
    for seed in range(1000):
        total += unpack(*pack(wanted, signed=signed, noise=noise(seed, CPU)), signed=signed).double()
    kept = wanted.abs() >= wanted.abs().max() * 2.0**-20
    torch.testing.assert_close((total / 1000)[kept], wanted.double()[kept], rtol=0.013, atol=0)


def test_a_positive_second_moment_never_becomes_zero():
    wanted = torch.full((BLOCK,), 1e-30)
    wanted[0], wanted[1] = 1.0, 0.0
    for seed in range(20):
        found = unpack(*pack(wanted, signed=False, noise=noise(seed, CPU)), signed=False)
        assert found[:2].tolist() == [1.0, 0.0]
        assert (found[2:] > 0).all()


def test_a_second_moment_that_overflows_stops_its_weight_as_in_full_precision():
    found = []
    for packed in (True, False):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(5000))
        optimizer = AdamW([weight], lr=0.1, moments_8bit=packed, nonfinite="skip")
        for step in range(3):
            weight.grad = torch.randn(5000)
            if step == 1:
                weight.grad[5] = 1e25
            optimizer.step()
        found.append(weight.detach())
    assert found[0].isfinite().all()
    assert found[0][5] == pytest.approx(float(found[1][5]), rel=0.02)


@pytest.mark.parametrize("signed", [True, False])
def test_zeros_stay_zeros_and_only_what_is_not_finite_is_kept_as_such(signed):
    wanted = torch.zeros(3 * BLOCK)
    wanted[BLOCK : 2 * BLOCK] = torch.linspace(0.1, 1, BLOCK)
    clean = unpack(*pack(wanted, signed=signed), signed=signed)
    wanted[BLOCK], wanted[BLOCK + 1], wanted[-1] = torch.inf, torch.nan, -torch.inf
    found = unpack(*pack(wanted, signed=signed), signed=signed)
    wrong = ~found.isfinite()
    assert wrong.nonzero().flatten().tolist() == [BLOCK, BLOCK + 1, 3 * BLOCK - 1]
    assert torch.equal(found[~wrong], clean[~wrong])
    assert found[wrong].isnan().all() if signed else (found[wrong] == torch.inf).all()
    assert torch.equal(found[:BLOCK], torch.zeros(BLOCK))


def moved(grads: list[Tensor], **options: Any) -> list[Tensor]:
    """Return the moves of the weights per step, in multiples of the rate."""
    weights = nn.Parameter(torch.zeros_like(grads[0]))
    optimizer = AdamW([weights], lr=1.0, weight_decay=0, eps=1e-30, **options)
    found = []
    for grad in grads:
        before = weights.detach().clone()
        weights.grad = grad.clone()
        optimizer.step()
        found.append(weights.detach() - before)
    return found


LARGEST_STEP = 3 * 0.1 / 0.001**0.5
"""Three times (1 - beta1) / sqrt(1 - beta2), in multiples of the rate."""


def test_steps_stay_bounded_if_a_block_holds_gradients_of_very_different_sizes():
    for small in (1e-1, 3e-4, 1e-6, 1e-8):
        grad = torch.full((4096,), small)
        grad[::BLOCK] = 1.0
        steps = moved([grad] * 300, moments_8bit=True)
        assert max(float(step.abs().max()) for step in steps) <= 2.0
        if small >= 1e-6:  # in full precision each step is the rate
            way = torch.stack(steps).sum(0) / -300
            torch.testing.assert_close(way.mean(), torch.tensor(1.0), rtol=0, atol=0.1)
            assert (way > 0.7).all()


@pytest.mark.parametrize("spread", [1.0, 5.0])
def test_steps_stay_bounded_for_log_normal_sizes(spread):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp(spread * torch.randn(16384, generator=generator))
    grads = [sizes * torch.randn(16384, generator=generator) for _ in range(60)]
    steps, full = moved(grads, moments_8bit=True), moved(grads)
    assert max(float(step.abs().max()) for step in steps) <= LARGEST_STEP / 3
    ratio = torch.stack(steps).sum(0).norm() / torch.stack(full).sum(0).norm()
    # With a spread of 5, half of the second moments are below the smallest share, which makes their steps smaller.
    assert (0.6 if spread == 5 else 0.9) <= ratio <= 1.1


def test_steps_stay_bounded_if_gradients_come_seldom_and_end():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(0, -8, 4096)
    seen = [torch.rand(4096, generator=generator) < 0.02 for _ in range(200)]
    grads = [torch.where(one, sizes * torch.randn(4096, generator=generator), 0) for one in seen]
    rest = torch.zeros(4096)
    rest[::BLOCK] = 1e3  # keeps the scale of each block
    steps, full = (moved([*grads, *[rest] * 300], **way) for way in ({"moments_8bit": True}, {}))
    assert max(float(step.abs().max()) for step in steps) <= 1.5 * max(float(step.abs().max()) for step in full)
    still = rest == 0
    assert max(float(step[still].abs().max()) for step in steps[-100:]) <= 1e-3


def test_layouts_are_kept():
    wanted = torch.randn(8, 16, 6, 6).to(memory_format=torch.channels_last)
    codes, scales = pack(wanted, signed=True)
    found = unpack(codes, scales, signed=True)
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in (codes, found))
    torch.testing.assert_close(found, wanted, rtol=0.123, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_update_follows_that_with_moments_in_full_and_resumes_bit_identically(form):
    rule = AdamWeightDecay if form == "fused" else AdamW
    exact, params = parameters(SHAPES), parameters(SHAPES)
    options = {"lr": 0.01, "betas": (0.9, 0.99), **FORMS[form]}
    truth, optimizer = rule(exact, **options), rule(params, moments_8bit=True, **options)
    start = [param.detach().clone() for param in exact]
    train(truth, exact, range(20))
    train(optimizer, params, range(20))
    for param, wanted, old in zip(params, exact, start, strict=True):
        way = (wanted - old).norm()
        assert (param - wanted).norm() <= 0.08 * way  # without a bias, see above
    assert torch.equal(params[2], exact[2])  # below 4,096 entries
    others, state = [nn.Parameter(param.detach().clone()) for param in params], copy.deepcopy(optimizer.state_dict())
    train(optimizer, params, range(20, 23))
    resumed = rule(others, lr=0.01, **FORMS[form])  # the file says that the moments have 8 bits
    resumed.load_state_dict(state)
    train(resumed, others, range(20, 23))
    assert values(resumed) == values(optimizer)


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


def test_state_of_torch_is_packed_at_the_next_step_and_unpacked_when_it_is_turned_off():
    params = parameters(SHAPES)
    other = torch.optim.AdamW(params, lr=0.01)
    train(other, params, range(2))
    optimizer = AdamW(params, lr=0.01, moments_8bit=True)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.state[params[0]]["exp_avg"].dtype is torch.float32
    train(optimizer, params, range(2, 3))
    assert optimizer.state[params[0]]["exp_avg"].dtype is torch.uint8
    assert optimizer.param_groups[0]["updates"] == 3
    optimizer.param_groups[0]["moments_8bit"] = False
    train(optimizer, params, range(3, 4))
    state = optimizer.state[params[0]]
    assert state["exp_avg"].dtype is torch.float32
    assert not [key for key in state if key.endswith(SCALE)]
    train(optimizer, params, range(4, 5))


def test_with_masters_stochastic_rounding_and_transforms():
    for setting in (True, "stochastic"):
        params = parameters(SHAPES, dtype=torch.bfloat16)
        optimizer = AdamW(params, lr=0.01, moments_8bit=True, master_weights=setting)
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
    optimizer.param_groups[0]["updates"] -= 1  # it counts the skipped one
    assert values(optimizer) == before


def test_what_cannot_be_packed_is_refused_before_anything_is_changed():
    with pytest.raises(ValueError, match="moments_8bit"):
        Adam(parameters(SHAPES), moments_8bit=True, capturable=True)
    for rule in (LazyAdam, AdamOffload):
        optimizer = rule(parameters(SHAPES))
        optimizer.param_groups[0]["moments_8bit"] = True
        with pytest.raises(ValueError, match="moments_8bit"):
            optimizer.step()
    with pytest.raises(TypeError, match="moments_8bit"):
        Adam(parameters(SHAPES), moments_8bit="yes")  # pyright: ignore[reportArgumentType]


def test_parameters_of_another_precision_are_refused_before_anything_is_changed():
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64):
        params = [*parameters(SHAPES), *parameters(SHAPES, dtype=dtype)]
        optimizer = AdamW(params, lr=0.01, moments_8bit=True)
        give_grads(params, 0)
        before = [param.detach().clone() for param in params]
        with pytest.raises(IncompatibleError, match=f"float32, found .*{dtype}"):
            optimizer.step()
        assert all(map(torch.equal, params, before))
        assert not optimizer.state


def test_turned_off_for_bfloat16_the_moments_get_the_precision_of_the_weights():
    params = parameters(SHAPES[:2], dtype=torch.bfloat16)
    optimizer = AdamW(params, lr=0.01, moments_8bit=True, master_weights="stochastic")
    train(optimizer, params, range(2))
    optimizer.param_groups[0].update(moments_8bit=False, master_weights=False)
    train(optimizer, params, range(2, 4))
    assert optimizer.state[params[0]]["exp_avg"].dtype is torch.bfloat16


def test_an_entry_that_is_not_finite_ruins_its_weight_only():
    params = parameters(SHAPES)
    optimizer = AdamW(params, lr=0.01, moments_8bit=True)
    train(optimizer, params, range(2))
    give_grads(params, 2)
    grad = params[0].grad
    assert grad is not None
    grad[0, 0], grad[5, 7] = torch.inf, torch.nan
    optimizer.step()
    train(optimizer, params, range(3, 6))
    assert params[0].isnan().nonzero().tolist() == [[0, 0], [5, 7]]


def packed_file(params: list[nn.Parameter]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a state dict with moments in 8 bits, and the moments of the first parameter in float32."""
    optimizer = Adam(params, lr=0.01, moments_8bit=True)
    train(optimizer, params, range(3))
    state = optimizer.state[params[0]]
    full = {key: unpack(state[key], state[key + SCALE], signed=key == "exp_avg") for key in ("exp_avg", "exp_avg_sq")}
    return copy.deepcopy(optimizer.state_dict()), full


@pytest.mark.parametrize("rule", [LazyAdam, AdamOffload, Lamb, ScheduleFreeAdamW, "lamb"])
def test_a_rule_without_moments_in_8_bits_loads_them_in_full(rule):
    saved, full = packed_file(parameters(SHAPES))
    others = parameters(SHAPES)
    optimizer = MixedOptimizer(others, rule) if isinstance(rule, str) else rule(others)
    optimizer.load_state_dict(saved)
    state = optimizer.state[others[0]]
    for key, value in full.items():
        assert torch.equal(state[key], value)
    assert not [key for key in state if key.endswith(SCALE)]
    train(optimizer, others, range(3, 5))
    assert saved["state"][0]["exp_avg"].dtype is torch.uint8  # the file was not changed
