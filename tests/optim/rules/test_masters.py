from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from tests.support.optimizers import CASES, give_grads, parameters, train, values
from torchboost.errors import IncompatibleError
from torchboost.optim.rules import masters
from torchboost.optim.rules.base import Batch
from torchboost.optim.rules.masters import Stamps, pieces, stochastically_rounded
from torchboost.optim.rules.sgd import SGD


def batch(sizes: tuple[int, ...]) -> Batch:
    grads = [torch.ones(size, dtype=torch.bfloat16) for size in sizes]
    wide = [torch.zeros(size) for size in sizes]
    return Batch(wide, grads, [{"master": master} for master in wide])


def test_gradients_are_widened_one_piece_at_a_time(monkeypatch):
    monkeypatch.setattr(masters, "PIECE", 10)
    whole = batch((4, 4, 4, 30, 2))
    seen = []
    for part in pieces(whole):
        assert all(grad.dtype is torch.float32 for grad in part.grads)
        seen.append([(param, len(grad)) for param, grad in zip(part.params, part.grads, strict=True)])
    assert [[size for _, size in part] for part in seen] == [[4, 4, 4], [30], [2]]
    assert all(a is b for a, b in zip((param for part in seen for param, _ in part), whole.params, strict=True))
    assert all(grad.dtype is torch.bfloat16 for grad in whole.grads)


def test_a_batch_without_masters_stays_as_it_is():
    plain = Batch([torch.zeros(3)], [torch.ones(3)], [{}])
    assert list(pieces(plain)) == [plain]


@pytest.mark.parametrize("name", ["Adam-fused", "SGD-foreach", "LARS-default", "Lamb", "AdamOffload"])
def test_pieces_change_no_bit(name, monkeypatch):
    found = []
    for piece in (masters.PIECE, 5):
        monkeypatch.setattr(masters, "PIECE", piece)
        params = parameters(dtype=torch.bfloat16)
        optimizer = CASES[name](params, master_weights=True)
        train(optimizer, params, range(3))
        found.append(values(optimizer))
    assert found[0] == found[1]


def test_a_master_keeps_its_precision_where_nothing_was_written():
    param = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
    master = torch.tensor([1.001, 2.001, 3.001])
    stamps = Stamps()
    assert not stamps.known(param)
    stamps.note(param)
    assert stamps.current(param, master) is master
    with torch.no_grad():
        param[1] = 5.0
    assert not stamps.known(param)
    assert stamps.current(param, master).tolist() == pytest.approx([1.001, 5.0, 3.001])


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


@pytest.mark.parametrize("kind", ["weights", "weights and state", "replaced"])
def test_masters_follow_a_model_that_is_loaded(kind):
    torch.manual_seed(0)
    model, other = (nn.Linear(4, 3).bfloat16() for _ in range(2))
    optimizer = SGD(model.parameters(), lr=1e-12, master_weights=True)
    train(optimizer, list(model.parameters()), [0])
    if kind == "weights":
        model.load_state_dict(other.state_dict())
    elif kind == "replaced":
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(other.parameters()), model.parameters())
    else:
        state = optimizer.state_dict()
        model.load_state_dict(other.state_dict())
        optimizer.load_state_dict(state)
    train(optimizer, list(model.parameters()), [1])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


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
def test_stochastic_rounding_follows_the_float32_run(name):
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
    assert not [
        key for key, value in state.items() if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16
    ]


def test_small_updates_are_lost_without_it_and_kept_with_it():
    found = {}
    for masters_of in (False, "stochastic"):
        params = [nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))]
        optimizer = SGD(params, lr=1e-4, master_weights=masters_of)
        for _ in range(100):
            params[0].grad = torch.ones(1000, dtype=torch.bfloat16)
            optimizer.step()
        found[masters_of] = params[0].detach().float().mean().item()
    assert found[False] == 1.0
    assert found["stochastic"] == pytest.approx(0.99, abs=0.002)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding_resumes_bit_identically(name):
    shapes = [(4, 3), (3, 4)]
    params = parameters(shapes, dtype=torch.bfloat16)
    optimizer = CASES[name](params, master_weights="stochastic")
    train(optimizer, params, range(3))
    weights, state = [param.detach().clone() for param in params], copy.deepcopy(optimizer.state_dict())
    train(optimizer, params, range(3, 6))
    others = [nn.Parameter(weight) for weight in weights]
    resumed = CASES[name](others, master_weights="stochastic")
    resumed.load_state_dict(state)
    train(resumed, others, range(3, 6))
    assert values(resumed) == values(optimizer)


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


@pytest.mark.parametrize("name", ["LazyAdam", "AdamOffload", "ScheduleFreeAdamW"])
def test_rules_that_cannot_round_say_so(name):
    with pytest.raises(ValueError, match="stochastic"):
        CASES[name](parameters([(4, 3)], dtype=torch.bfloat16), master_weights="stochastic")


def test_stochastic_rounding_is_for_bfloat16():
    params = parameters([(4, 3)], dtype=torch.float16)
    optimizer = CASES["SGD-plain"](params, master_weights="stochastic")
    give_grads(params, 0)
    with pytest.raises(IncompatibleError, match="float16"):
        optimizer.step()
    with pytest.raises(TypeError, match="'stochastic'"):
        CASES["SGD-plain"](params, master_weights="random")
