from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.optimizers import CASES, give_grads, parameters, train, values
from torchboost.optim.rules import masters
from torchboost.optim.rules.base import Batch
from torchboost.optim.rules.masters import Stamps, pieces
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


@pytest.mark.parametrize("name", ["Adam-fused", "Adam-native", "SGD-foreach", "LARS-default", "Lamb", "AdamOffload"])
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


@pytest.mark.parametrize("name", ["SGD-plain", "Adam-fused", "Adam-native", "LazyAdam", "AdamOffload", "Lamb"])
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
