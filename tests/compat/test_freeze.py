"""Gradient freezing under MindSpore's names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.support.ranks import run_ranks
from torchboost import BoostTrainOneStepCell, FreezeOpt, GradientFreeze, NoEffectWarning, WithLoss, freeze_cell


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())]
    return WithLoss(nn.Sequential(*layers, nn.Linear(6, 3)), F.cross_entropy)


def batch(step: int):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def nested(net: nn.Module) -> list[list[nn.Parameter]]:
    parameters = list(net.parameters())
    return [parameters[start:] for start in (0, 4, 8, 12)]


def test_freeze_generate_trains_the_pair_it_was_given():
    for kind in [0, 1, 2]:
        net = network()
        optimizer = sgd(net)
        freeze = GradientFreeze(4, freeze_type=kind, freeze_p=0.25, total_steps=20)
        same, same_optimizer = freeze.freeze_generate(net, optimizer)
        assert same is net
        assert same_optimizer is optimizer
        cell = BoostTrainOneStepCell(net, optimizer)
        seen = set()
        for step in range(20):
            seen.add(sum(not p.requires_grad for p in net.parameters()))
            assert torch.isfinite(cell(*batch(step)).loss)
        assert 0 in seen
        assert len(seen) > 1
        freeze.freeze_generate(net, optimizer)
        assert len(optimizer._optimizer_step_post_hooks) == 1, "a second call replaces the first"


def test_explicit_groups_train_as_listed():
    net = network()
    freeze = GradientFreeze([list(net.parameters()), list(net.parameters())[-2:]], 0, 0.0, 10)
    freeze.freeze_generate(net, sgd(net))
    assert [p.requires_grad for p in net.parameters()] == [False] * 16 + [True] * 2


def test_progressive_sequences():
    freeze = GradientFreeze(4, 2, 0.5, 100)
    sequence = freeze.generate_freeze_index_sequence(4, 2, 0.5, 100)
    assert len(sequence) == 101
    assert sequence == sorted(sequence)
    assert sequence.count(0) / 101 == pytest.approx(0.5, abs=0.15)
    with pytest.raises(
        ValueError, match=r"freeze_type: found 3; give 0 \(continuous\), 1 \(interval\) or 2 \(progressive\)"
    ):
        freeze.generate_freeze_index_sequence(4, 3, 0.5, 100)


def test_what_gradient_freeze_refuses():
    for arguments, message in (
        ((4, 1, 1.0, 10), "full_share=1.0: the share of updates that train everything"),
        ((4, 1, -0.1, 10), "full_share=-0.1"),
        ((4, 4, 0.5, 10), "freeze_type: found 4"),
        ((0, 1, 0.5, 10), "groups=0: pass an integer of 1 or more"),
        ((4, 1, 0.5, 0), "total_steps=0: pass an integer of 1 or more"),
        ((3, 1, 0.7, 10**5000), r"total_steps: found more than 2\*\*53"),
    ):
        with pytest.raises(ValueError, match=message):
            GradientFreeze(*arguments)
        with pytest.raises(ValueError, match=message):
            GradientFreeze(4, 1, 0.5, 10).generate_freeze_index_sequence(*arguments)
    wrong: Any = "4"
    with pytest.raises(TypeError, match="list of lists of parameters"):
        GradientFreeze(wrong, 1, 0.5, 10)
    with pytest.raises(TypeError, match=r"such as \[list\(network.parameters.*; found \[Parameter"):
        GradientFreeze(list(network().parameters()), 1, 0.7, 100)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="empty one"):
        GradientFreeze([[]], 1, 0.5, 10)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, found str"):
        GradientFreeze(4, 1, 0.5, 10).freeze_generate(network(), wrong)


def test_fewer_units_than_groups_are_announced():
    with pytest.warns(NoEffectWarning, match="20 groups were requested, but the parameters form 5 units"):
        assert len(GradientFreeze(4, 1, 0.5, 10).split_parameters_groups(network(), 20)) == 5
    assert len(FreezeOpt(sgd(network())).groups) == 5  # ten by default, which nobody requested


def test_freeze_opt_is_the_optimizer_it_was_given_on_a_schedule():
    net, strategy = network(), [0, 2, 1, 3]
    inner = sgd(net)
    optimizer = FreezeOpt(inner, nested(net), strategy)
    assert optimizer.state is inner.state
    assert all(a is b for a, b in zip(optimizer.param_groups, inner.param_groups, strict=True))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    by_hand = network()
    plain = sgd(by_hand)
    for step in range(8):
        index = strategy[step % 4]
        for position, p in enumerate(by_hand.parameters()):
            p.requires_grad_(position >= 4 * index)
        plain.param_groups[0]["lr"] = 0.1 * 0.5**step
        for net_, opt in ((net, optimizer), (by_hand, plain)):
            net_(*batch(step)).backward()
            opt.step()
            opt.zero_grad()
        scheduler.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), by_hand.parameters(), strict=True))
    assert sum(s["momentum_buffer"].numel() for s in inner.state.values()) == sum(p.numel() for p in net.parameters())


def test_freeze_opt_resumes_and_its_file_loads_into_the_bare_optimizer():
    net = network()
    optimizer = FreezeOpt(sgd(net), nested(net), [0, 2, 1])
    cell = BoostTrainOneStepCell(net, optimizer)
    for step in range(4):
        cell(*batch(step))
    saved, weights = copy.deepcopy((optimizer.state_dict(), net.state_dict()))
    for step in range(4, 8):
        cell(*batch(step))
    again = network(seed=3)
    resumed = FreezeOpt(sgd(again), nested(again), [0, 2, 1])
    again.load_state_dict(weights)
    resumed.load_state_dict(saved)
    cell = BoostTrainOneStepCell(again, resumed)
    for step in range(4, 8):
        cell(*batch(step))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))
    sgd(again).load_state_dict(saved)
    resumed.load_state_dict(sgd(again).state_dict())


def test_a_checkpoint_that_freeze_opt_refuses_changes_nothing():
    net, other = network(), network()
    optimizer, written = (FreezeOpt(sgd(one), nested(one), [0, 2, 1]) for one in (net, other))
    cell = BoostTrainOneStepCell(other, written)
    for step in range(2):
        cell(*batch(step))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="groups"):
        optimizer.load_state_dict({**written.state_dict(), "param_groups": []})
    assert repr(optimizer.state_dict()) == repr(before)
    state = written.state_dict()
    with pytest.raises(IndexError):
        optimizer.load_state_dict({**state, "front": {**state["front"], "unreached": [99]}})
    assert repr(optimizer.state_dict()) == repr(before)


def test_strategies_may_be_tuples_and_int32_tensors():
    for strategy in ((0, 3), torch.tensor([0, 3], dtype=torch.int32)):
        net = network()
        optimizer = FreezeOpt(sgd(net), nested(net), strategy)
        BoostTrainOneStepCell(net, optimizer)(*batch(0))
        assert optimizer.freezing.index == 3


def test_what_freeze_opt_refuses():
    net = network()
    flat, every = list(net.parameters()), nested(net)
    stranger = [[*flat, nn.Parameter(torch.zeros(2))]]
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((sgd(net), every, "0"), TypeError, "found '0'; give a list"),
        ((sgd(net), every, [0, 1.5]), TypeError, r"found \[0, 1.5\]"),
        ((sgd(net), every, [0, 4]), ValueError, "below the number of groups, 4"),
        ((sgd(net), every, []), ValueError, "below the number of groups"),
        ((sgd(net), every, torch.zeros(2, 2, dtype=torch.int32)), TypeError, "a 1-D tensor of integers"),
        (("adam",), TypeError, r"torch\.optim\.Optimizer"),
        ((sgd(net), None, [0]), ValueError, "without train_parameter_groups"),
        ((sgd(net), flat), TypeError, r"found \[Parameter"),
        ((sgd(net), stranger), ValueError, "1 parameters that opt does not update"),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message):
            FreezeOpt(*arguments)
        assert all(p.requires_grad for p in net.parameters())


def test_freeze_cells_train_their_own_group_with_sens():
    net = network()
    optimizer = FreezeOpt(torch.optim.SGD(net.parameters(), lr=0.1), nested(net), [0])
    cells = freeze_cell(False, net, optimizer, 2.0)
    assert len(cells) == 4
    by_hand = network()
    for step, index in enumerate((2, 0, 3)):
        loss = cells[index](*batch(step))
        expected = by_hand(*batch(step))
        assert torch.equal(loss, expected.detach())
        group = list(by_hand.parameters())[4 * index :]
        for p, grad in zip(group, torch.autograd.grad(expected, group), strict=True):
            p.data.sub_(grad, alpha=0.2)
        for a, b in zip(net.parameters(), by_hand.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def test_freeze_cells_accumulate_each_for_itself():
    net = network()
    optimizer = FreezeOpt(torch.optim.SGD(net.parameters(), lr=0.1), nested(net), [0])
    cells = freeze_cell(False, net, optimizer, 1.0, use_grad_accumulation=True, max_accumulation_step=2)
    start = [p.detach().clone() for p in net.parameters()]
    first = list(net.parameters())[8:]
    expected = [
        (a + b) / 2
        for a, b in zip(
            torch.autograd.grad(net(*batch(0)), first), torch.autograd.grad(net(*batch(2)), first), strict=True
        )
    ]
    cells[2](*batch(0))
    cells[3](*batch(1))
    assert all(torch.equal(a, b) for a, b in zip(start, net.parameters(), strict=True)), "both windows are half full"
    cells[2](*batch(2))
    for p, before, grad in zip(first, start[8:], expected, strict=True):
        torch.testing.assert_close(p.detach(), before - 0.1 * grad)


def test_what_freeze_cell_refuses():
    net = network()
    wrong: Any = sgd(net)
    with pytest.raises(TypeError, match="FreezeOpt"):
        freeze_cell(False, net, wrong, 1.0)
    optimizer = FreezeOpt(sgd(net), nested(net))
    for wrong in ("x", None, True, [1.0]):
        with pytest.raises(TypeError, match="sens must be a number, found"):
            freeze_cell(False, net, optimizer, wrong)


def _reduced() -> tuple[list[float], list[float]]:
    net = network()
    cells = freeze_cell(True, net, FreezeOpt(torch.optim.SGD(net.parameters(), lr=0.1), nested(net)), 1.0, mean=True)
    for step in range(2):
        cells[1](*batch(2 * step + dist.get_rank()))
    other = network()
    group = list(other.parameters())[4:]
    for step in range(2):
        both = [torch.autograd.grad(other(*batch(2 * step + rank)), group) for rank in range(2)]
        for p, a, b in zip(group, *both, strict=True):
            p.data.sub_((a + b) / 2, alpha=0.1)
    flat = [torch.cat([p.detach().flatten() for p in n.parameters()]).tolist() for n in (net, other)]
    return flat[0], flat[1]


@pytest.mark.dist
def test_freeze_cells_reduce_over_ranks():
    first, second = run_ranks(_reduced, 2)
    assert first[0] == second[0]
    assert first[0] == pytest.approx(first[1], abs=1e-6)


def test_freeze_opt_trains_a_group_that_is_added_later():
    model, head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2)
    groups = [list(model.parameters()), list(model[1].parameters())]
    optimizer = FreezeOpt(torch.optim.SGD(model.parameters(), lr=0.1), groups, [0, 1])
    optimizer.add_param_group({"params": head.parameters()})
    for index in (0, 1, 0):
        before = head.weight.detach().clone()
        assert optimizer.freezing.index == index
        head(model(torch.randn(3, 4))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(before, head.weight)
