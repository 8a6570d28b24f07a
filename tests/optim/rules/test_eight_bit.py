from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.optimizers import give_grads, parameters, train, values
from torchboost.errors import IncompatibleError
from torchboost.optim.rules import masters as eight_bit
from torchboost.optim.rules.adam import Adam, AdamW, AdamWeightDecay
from torchboost.optim.rules.lamb import Lamb
from torchboost.optim.rules.lazy_adam import LazyAdam
from torchboost.optim.rules.masters import BLOCK, noise, pack, unpack
from torchboost.optim.rules.mixed import MixedOptimizer
from torchboost.optim.rules.offload import AdamOffload
from torchboost.optim.rules.schedule_free import ScheduleFreeAdamW

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
def test_packing_what_was_unpacked_changes_nothing(signed):
    for seed in range(3):
        codes, scales = pack(sample(signed), signed=signed, noise=noise(seed, torch.device("cpu")))
        other = noise(seed + 100, torch.device("cpu"))
        again, same = pack(unpack(codes, scales, signed=signed), signed=signed, noise=other)
        assert torch.equal(codes, again)
        assert torch.equal(scales, same)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("scale", [1.0, 3.7e-5, 2.9e12])
def test_every_code_stands_for_a_value_of_its_own_that_no_noise_moves(signed, scale):
    codes = torch.arange(1, 256, dtype=torch.uint8)
    kept = unpack(codes, torch.tensor([scale]), signed=signed)
    assert kept.unique().numel() == 255
    for seed in range(20):
        found, scales = pack(kept, signed=signed, noise=noise(seed, torch.device("cpu")))
        assert torch.equal(found, codes)
        assert scales.tolist() == [torch.tensor(scale).item()]


@pytest.mark.parametrize("signed", [True, False])
def test_the_mean_over_many_roundings_is_the_value(signed):
    wanted = sample(signed, BLOCK)
    total = torch.zeros(BLOCK, dtype=torch.float64)
    for seed in range(2000):
        total += unpack(*pack(wanted, signed=signed, noise=noise(seed, torch.device("cpu"))), signed=signed).double()
    kept = wanted.abs() >= wanted.abs().max() * 2.0**-20
    torch.testing.assert_close((total / 2000)[kept], wanted.double()[kept], rtol=0.009, atol=0)


def test_a_positive_second_moment_never_becomes_zero():
    wanted = torch.full((BLOCK,), 1e-30)
    wanted[0], wanted[1] = 1.0, 0.0
    for seed in range(20):
        found = unpack(*pack(wanted, signed=False, noise=noise(seed, torch.device("cpu"))), signed=False)
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


@pytest.mark.parametrize("small", [1e-1, 3e-4, 1e-6, 1e-8])
def test_steps_stay_bounded_if_a_block_holds_gradients_of_very_different_sizes(small):
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


def test_outputs_with_noise_of_another_size_in_the_same_block_do_not_disturb():
    # 64 outputs: every other one can be predicted, the others are noise.
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(64, 64, generator=generator) / 8
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = AdamW([weight], lr=0.01, weight_decay=0, moments_8bit=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    largest = 0.0
    for _ in range(1000):
        inputs, before = torch.randn(64, 64, generator=generator), weight.detach().clone()
        errors = inputs @ (before - wanted).T
        errors = torch.where(torch.arange(64) % 2 == 0, errors, 1000 * torch.randn(64, 64, generator=generator))
        weight.grad = 2 * errors.T @ inputs / 64**2
        optimizer.step()
        largest = max(largest, float((weight.detach() - before).abs().max()) / optimizer.param_groups[0]["lr"])
        schedule.step()
    assert largest <= LARGEST_STEP / 3
    assert float((weight.detach() - wanted)[::2].square().mean()) <= 1e-6


def test_layouts_are_kept():
    wanted = torch.randn(8, 16, 6, 6).to(memory_format=torch.channels_last)
    codes, scales = pack(wanted, signed=True)
    assert codes.is_contiguous(memory_format=torch.channels_last)
    found = unpack(codes, scales, signed=True)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, wanted, rtol=0.123, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_update_follows_that_with_moments_in_full(form):
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
    complex_one = nn.Parameter(torch.randn(64, 65, dtype=torch.complex64))
    optimizer = Adam([complex_one], moments_8bit=True)
    complex_one.grad = torch.randn_like(complex_one)
    with pytest.raises(IncompatibleError, match="complex64"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_another_precision_are_refused_before_anything_is_changed(dtype):
    params = [*parameters(SHAPES), *parameters(SHAPES, dtype=dtype)]
    optimizer = AdamW(params, lr=0.01, moments_8bit=True)
    give_grads(params, 0)
    before = [param.detach().clone() for param in params]
    with pytest.raises(IncompatibleError, match=f"float32, found .*{dtype}"):
        optimizer.step()
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
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
    full = {
        key: unpack(state[key], state[key + eight_bit.SCALE], signed=key == "exp_avg")
        for key in ("exp_avg", "exp_avg_sq")
    }
    return copy.deepcopy(optimizer.state_dict()), full


@pytest.mark.parametrize("rule", [LazyAdam, AdamOffload, Lamb, ScheduleFreeAdamW, "lamb"])
def test_a_rule_without_moments_in_8_bits_loads_them_in_full(rule):
    params = parameters(SHAPES)
    saved, full = packed_file(params)
    others = parameters(SHAPES)
    optimizer = MixedOptimizer(others, rule) if isinstance(rule, str) else rule(others)
    optimizer.load_state_dict(saved)
    state = optimizer.state[others[0]]
    for key, value in full.items():
        assert torch.equal(state[key], value)
    assert not [key for key in state if key.endswith(eight_bit.SCALE)]
    train(optimizer, others, range(3, 5))
    assert saved["state"][0]["exp_avg"].dtype is torch.uint8  # the file was not changed


def test_sparse_rows_continue_from_a_file_with_moments_in_8_bits():
    params = parameters(((64, 65),))
    saved, full = packed_file(params)
    optimizer = LazyAdam(params)
    optimizer.load_state_dict(saved)
    params[0].grad = torch.sparse_coo_tensor(torch.tensor([[3]]), torch.ones(1, 65), (64, 65), check_invariants=True)
    optimizer.step()
    assert torch.equal(optimizer.state[params[0]]["exp_avg"][4:], full["exp_avg"][4:])


def test_the_number_of_updates_goes_on_from_a_file_with_moments_in_full():
    params = parameters(SHAPES)
    other = torch.optim.Adam(params)
    train(other, params, range(5))
    optimizer = Adam(params, moments_8bit=True)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["updates"] == 5
