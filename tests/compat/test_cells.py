"""The training cell: the documented triple, sens, accumulation, and what is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from torchboost import (
    AutoBoost,
    BoostTrainOneStepCell,
    IncompatibleError,
    StepOutput,
    WithLoss,
)


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


def test_what_is_refused_and_what_is_not_there():
    network, optimizer = pair()
    wrong: Any
    for wrong in ("1", None, True, [1.0]):
        with pytest.raises(TypeError, match="sens must be a number"):
            BoostTrainOneStepCell(network, optimizer, wrong)
    wrong = F.cross_entropy
    with pytest.raises(TypeError, match="network"):
        BoostTrainOneStepCell(wrong, optimizer)
    wrong = network
    with pytest.raises(TypeError, match="optimizer"):
        BoostTrainOneStepCell(network, wrong)
    cell = BoostTrainOneStepCell(network, optimizer)
    assert cell.check_adasum_enable() is False
    assert cell.check_dim_reduce_enable() is False
    with pytest.raises(IncompatibleError, match="AdaSum does not act in this cell; give AutoBoost"):
        cell.adasum_process(torch.zeros(()), ())


def test_freezing_of_auto_boost_acts_in_the_cell():
    network, optimizer = pair()
    section = {"param_groups": 2, "freeze_type": 0, "freeze_p": 0.5, "total_steps": 10}
    booster = AutoBoost("O0", {"boost": {"mode": "manual", "grad_freeze": True}, "grad_freeze": section})
    cell = BoostTrainOneStepCell(*booster.network_auto_process_train(network, optimizer))
    first = network.backbone[0].weight.detach().clone()
    assert cell.gradient_freeze_process(*batch(0)).shape == ()
    assert not torch.equal(network.backbone[0].weight, first), "the first update trains everything"
    first = network.backbone[0].weight.detach().clone()
    cell.gradient_freeze_process(*batch(1))
    assert torch.equal(network.backbone[0].weight, first)


def accumulating(steps: int) -> AutoBoost:
    config = {
        "boost": {"mode": "manual", "grad_accumulation": True},
        "grad_accumulation": {"grad_accumulation_step": steps},
    }
    return AutoBoost("O0", config)


def raw_windows(network: nn.Module, optimizer: torch.optim.Optimizer, windows: list[list[int]]) -> None:
    for window in windows:
        for i in window:
            (network(*batch(i)) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_what_auto_boost_takes_away_acts_no_more():
    network, optimizer = pair()
    raw, raw_optimizer = pair()
    booster = accumulating(3)
    cell = BoostTrainOneStepCell(*booster.network_auto_process_train(network, optimizer))
    cell(*batch(0))
    booster.attached.remove()
    for i in range(1, 5):  # the window that was begun ends, the next ones are of one batch
        cell(*batch(i))
    raw_windows(raw, raw_optimizer, [[0, 1, 2], [3], [4]])
    assert same(network, raw)
    assert AutoBoost("O0").network_auto_process_train(network, optimizer)[1] is optimizer


def test_gradients_that_are_handed_over_without_accumulation_update_at_once():
    network, optimizer = pair()
    before = network.backbone[0].weight.detach().clone()
    ones = [torch.ones_like(p) for p in network.parameters()]
    BoostTrainOneStepCell(network, optimizer).gradient_accumulation_process(0.0, ones, 1.0)
    assert not torch.equal(network.backbone[0].weight, before)


def _in_ddp() -> list[int]:
    network, optimizer = accumulating(3).network_auto_process_train(*pair())
    wrapped = DistributedDataParallel(network)
    reduced: list[int] = []

    def counted(state, bucket):  # DDP does not read annotations that are strings
        reduced.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, counted)
    cell = BoostTrainOneStepCell(wrapped, optimizer)
    seen = []
    for i in range(3):
        cell(*batch(i))
        seen.append(len(reduced))
    with pytest.raises(IncompatibleError, match="static_graph"):
        BoostTrainOneStepCell(DistributedDataParallel(network, static_graph=True), optimizer)
    return seen


@pytest.mark.dist
def test_a_network_wrapped_after_auto_boost_is_not_synchronised_inside_the_window():
    assert run_ranks(_in_ddp, 2) == [[0, 0, 1]] * 2
