"""Masters: float32 copies of weights in low precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.support.optimizers import CASES, give_grads, parameters, train, values
from torchboost.optim import SGD, AdamW
from torchboost.optim.rules import masters


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


def test_a_file_of_stochastic_rounding_goes_on_with_masters():
    params = parameters([(4, 3), (4,)], dtype=torch.bfloat16)
    before = AdamW(params, master_weights=True)
    train(before, params, range(2))
    state = copy.deepcopy(before.state_dict())
    state["param_groups"][0] |= {"master_weights": "stochastic", "moments_8bit": False, "updates": 2}
    for entries in state["state"].values():
        del entries["master"]
    optimizer = AdamW(params, master_weights=True)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["master_weights"] is True
    assert "moments_8bit" not in optimizer.param_groups[0]
    train(optimizer, params, [2])
    assert {value.dtype for value in optimizer.state[params[0]].values()} == {torch.float32}
    with pytest.raises(TypeError, match="master_weights: found 'stochastic'"):
        CASES["SGD-plain"](params, master_weights="stochastic")


def test_a_file_of_moments_in_8_bits_is_refused_and_nothing_is_changed():
    params = parameters([(4, 3), (4,)])
    optimizer = AdamW(params)
    train(optimizer, params, range(2))
    state, before = copy.deepcopy(optimizer.state_dict()), values(optimizer)
    state["state"][0] |= {"exp_avg": torch.zeros(4, 3, dtype=torch.uint8), "exp_avg_scale": torch.ones(1)}
    with pytest.raises(ValueError, match="moments in 8 bits, which are not supported any more"):
        optimizer.load_state_dict(state)
    assert values(optimizer) == before
