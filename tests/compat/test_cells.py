"""The training cell: the documented triple, sens, and what is not there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchboost import AutoBoost, BoostTrainOneStepCell, IncompatibleError, StepOutput, WithLoss


def pair(seed: int = 0):
    torch.manual_seed(seed)
    network = WithLoss(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), F.cross_entropy)
    return network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)


def batch(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=generator), torch.randint(0, 2, (8,), generator=generator)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_returns_loss_overflow_and_scale_and_trains_like_the_raw_loop():
    network, optimizer = pair()
    raw, raw_optimizer = pair()
    cell = BoostTrainOneStepCell(*AutoBoost("O0").network_auto_process_train(network, optimizer))
    for i in range(10):
        out = cell(*batch(i))
        raw_optimizer.zero_grad()
        loss = raw(*batch(i))
        loss.backward()
        raw_optimizer.step()
        assert isinstance(out, StepOutput)
        assert torch.equal(out.loss, loss.detach())
        assert [t.ndim for t in out] == [0, 0, 0]
        assert (bool(out.overflow), float(out.loss_scale)) == (False, 1.0)
    assert same(network, raw)


def test_sens_multiplies_the_gradients_and_is_not_divided_out():
    network, optimizer = pair()
    raw, raw_optimizer = pair()
    out = BoostTrainOneStepCell(network, optimizer, sens=4)(*batch(0))
    loss = raw(*batch(0))
    (loss * 4.0).backward()
    raw_optimizer.step()
    assert same(network, raw)
    assert torch.equal(out.loss, loss.detach())
    assert float(out.loss_scale) == 4.0


@pytest.mark.parametrize("sens", ["1", None, True, [1.0]])
def test_sens_must_be_a_number(sens):
    with pytest.raises(TypeError, match="sens must be a number"):
        BoostTrainOneStepCell(*pair(), sens)


def test_a_network_without_its_loss_is_pointed_to_with_loss():
    backbone = nn.Sequential(nn.Linear(4, 2))
    before = backbone[0].weight.clone()
    cell = BoostTrainOneStepCell(backbone, torch.optim.SGD(backbone.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"forward of Sequential does not take 2 inputs.*WithLoss\(network, loss_fn\)"):
        cell(*batch(0))
    assert torch.equal(backbone[0].weight, before)


def test_other_type_errors_pass():
    def odd(outputs, labels):
        raise TypeError("inside the loss")

    network = WithLoss(nn.Linear(4, 2), odd)
    with pytest.raises(TypeError, match=r"^inside the loss$"):
        BoostTrainOneStepCell(network, torch.optim.SGD(network.parameters(), lr=0.1))(*batch(0))


def test_wrong_pair():
    network, optimizer = pair()
    with pytest.raises(TypeError, match="network"):
        BoostTrainOneStepCell(F.cross_entropy, optimizer)
    with pytest.raises(TypeError, match="optimizer"):
        BoostTrainOneStepCell(network, network)


def test_what_is_not_there_is_said_plainly():
    cell = BoostTrainOneStepCell(*pair())
    assert cell.check_adasum_enable() is False
    assert cell.check_dim_reduce_enable() is False
    loss = torch.zeros(())
    calls = [
        (cell.adasum_process, (loss, ())),
        (cell.gradient_accumulation_process, (loss, (), 1.0)),
        (cell.gradient_freeze_process, batch(0)),
    ]
    for method, arguments in calls:
        with pytest.raises(IncompatibleError, match="not part of this version"):
            method(*arguments)
