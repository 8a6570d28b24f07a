import copy
import gc

import pytest
import torch
from torch import nn

from torchboost import AutoBoost
from torchboost.algorithms.grad_freeze.algorithm import BlockFreeze, freeze_blocks
from torchboost.algorithms.grad_freeze.flags import HeldFlags, release_others
from torchboost.algorithms.grad_freeze.freezer import Freezing, prefixes_of
from torchboost.algorithms.grad_freeze.schedule import Repeated
from torchboost.graph.blocks import blocks_of


class Owner:
    def __init__(self, parameters) -> None:
        self.flags, self.removed = HeldFlags(self, parameters), False

    def remove(self) -> None:
        self.removed = True
        self.flags.change(())


def parameters(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(1)) for _ in range(count)]


def trains(given) -> list[bool]:
    return [p.requires_grad for p in given]


def test_flags_come_back_and_those_of_others_stay():
    a, b, c = given = parameters()
    b.requires_grad_(False)
    flags = Owner(given).flags
    flags.change(given)
    assert trains(given) == [False] * 3
    assert flags.may_train(a)
    assert not flags.may_train(b)
    c.requires_grad_(True)
    flags.change([a])
    assert trains(given) == [False, False, True]
    flags.change(given)
    assert trains(given) == [False, False, True], "what somebody thawed is theirs from then on"
    flags.change(())
    assert trains(given) == [True, False, True]


@pytest.mark.parametrize("alive", [True, False])
def test_a_later_owner_gets_them_as_they_were(alive):
    a, b, _ = given = parameters()
    b.requires_grad_(False)
    owner = Owner(given)
    owner.flags.change(given)
    if not alive:
        del owner
        gc.collect()
    release_others(given)
    assert trains(given) == [True, False, True]
    a.requires_grad_(False)
    release_others(given)
    assert trains(given) == [False, False, True], "nobody of ours had it"
    if alive:
        assert owner.removed


def layers(count: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def start(model, schedule) -> tuple[torch.optim.Optimizer, Freezing]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks = blocks_of(model)
    return optimizer, Freezing(model, optimizer, prefixes_of(blocks, range(len(blocks))), Repeated(schedule))


def update(model, optimizer, count: int = 1) -> None:
    for _ in range(count):
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_layer_that_the_user_freezes_in_mid_run_stays_frozen():
    model = layers()
    optimizer, freezing = start(model, (0, 3, 1))
    update(model, optimizer, 3)
    model[1].requires_grad_(False)
    before = copy.deepcopy(model[1].state_dict())
    update(model, optimizer, 9)
    freezing.remove()
    assert [trains(layer.parameters()) == [True, True] for layer in model] == [True, False, *[True] * 4]
    assert all(torch.equal(before[name], value) for name, value in model[1].state_dict().items())


def test_weights_frozen_for_adapters_after_boosting_stay_frozen():
    """As peft's ``get_peft_model`` does: everything is frozen, new parameters train beside it."""
    model = layers()
    optimizer, freezing = start(model, (0, 3, 1))
    model.requires_grad_(False)
    adapter = nn.Linear(4, 4)
    model.append(adapter)
    optimizer.add_param_group({"params": adapter.parameters()})
    before = [p.detach().clone() for p in model[:6].parameters()]
    update(model, optimizer, 9)
    freezing.remove()
    assert all(torch.equal(a, b) for a, b in zip(before, model[:6].parameters(), strict=True))
    assert trains(adapter.parameters()) == [True, True]
    assert not any(trains(model[:6].parameters()))


def test_a_backbone_that_the_user_thaws_later_then_follows_the_schedule():
    model = layers()
    model[:4].requires_grad_(False)
    optimizer = torch.optim.SGD(model[4:].parameters(), lr=0.1)
    blocks = blocks_of(model)
    freezing = Freezing(model, optimizer, prefixes_of(blocks, range(6)), Repeated((0, 2)))
    update(model, optimizer, 3)
    assert freezing.frozen == ()
    model[:4].requires_grad_(True)
    optimizer.add_param_group({"params": model[:4].parameters()})
    update(model, optimizer)
    assert not any(p.requires_grad for p in freezing.frozen)
    seen = []
    for _ in range(4):
        update(model, optimizer)
        seen.append((freezing.index, len(freezing.frozen)))
    assert set(seen) == {(0, 0), (2, 4)}
    freezing.remove()
    assert all(trains(model.parameters()))


def test_flags_are_right_after_loading_into_a_model_with_others():
    model = layers()
    optimizer, freezing = start(model, (0, 3, 1))
    states = []
    for _ in range(3):
        states.append(freezing.state_dict())
        update(model, optimizer)
    for state, index in zip(states, (0, 3, 1), strict=True):
        again = layers()
        again[0].requires_grad_(False)
        _, resumed = start(again, (0, 3, 1))
        resumed.load_state_dict(state)
        assert resumed.index == index
        assert [trains(layer.parameters())[0] for layer in again] == [at >= max(index, 1) for at in range(6)]
        resumed.remove()
        assert [trains(layer.parameters())[0] for layer in again] == [at >= 1 for at in range(6)]


@pytest.mark.parametrize("kept", [True, False])
def test_boosting_a_second_time_begins_with_everything_trained(kept):
    model = layers()
    config = {"boost": {"mode": "manual", "grad_freeze": True}, "grad_freeze": {"param_groups": 6, "freeze_type": 2}}
    config["grad_freeze"] |= {"total_steps": 20, "freeze_p": 0.25}
    first = AutoBoost("O0", config)
    _, optimizer = first.network_auto_process_train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    update(model, optimizer, 15)
    assert not all(trains(model.parameters()))
    if not kept:
        del first, optimizer
        gc.collect()
    second = AutoBoost("O0", config)
    _, again = second.network_auto_process_train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(trains(model.parameters()))
    update(model, again, 2)
    assert second.attached["grad_freeze"].step == 2
    if kept:
        update(model, optimizer)
        assert all(trains(model.parameters())), "the first one is gone"


def test_norms_that_the_user_keeps_in_eval_mode_stay_in_it():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4))), nn.Linear(4, 2))
    norms = [module for module in model if isinstance(module, nn.BatchNorm1d)]
    norms[0].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = BlockFreeze(pattern="continuous", groups=5, full_share=0.0, total_steps=40, norms="eval")
    freezing = freeze_blocks(model, optimizer, settings)
    seen = set()
    for _ in range(9):
        update(model, optimizer)
        assert not norms[0].training
        seen.add(norms[1].training)
    assert seen == {True, False}
    freezing.remove()
    assert [norm.training for norm in norms] == [False, True, True, True]
