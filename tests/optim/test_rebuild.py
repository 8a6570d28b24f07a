from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.optimizers import CASES, RULES, SCHEDULED, parameters, rate_for, shapes_of, train, values
from torchboost.errors import IncompatibleError
from torchboost.optim.front import FrontOptimizer
from torchboost.optim.rebuild import described_groups, rebuilt
from torchboost.optim.rules.adam import Adam
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.rules.offload import AdamOffload
from torchboost.optim.rules.sgd import SGD
from torchboost.optim.schedules import Constant, CosineDecay
from torchboost.optim.transforms import ClipNorm

TORCH = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


def halves(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {**group, "params": part}
        for group in described_groups(optimizer)
        for part in (group["params"][:2], group["params"][2:])
    ]


def carried(old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    for param, state in old.state.items():
        new.state[param] = copy.deepcopy(state)


@pytest.mark.parametrize("name", CASES)
def test_every_rule_goes_on_as_it_was(name):
    mine, other = parameters(shapes_of(name)), parameters(shapes_of(name))
    lr = CosineDecay(0.05, decay_steps=9)
    rate = lr if name.split("-")[0] in SCHEDULED else Constant(0.05)
    options = {
        "lr": rate_for(name, lr),
        "weight_decay": lambda update: 0.1 / (1 + update),
        "transforms": (ClipNorm(0.5),),
    }
    whole, old = CASES[name](mine, **options, nonfinite="skip"), CASES[name](other, **options, nonfinite="skip")
    train(whole, mine, range(3))
    train(old, other, range(3))
    new = rebuilt(old, halves(old))
    carried(old, new)
    assert type(new) is type(old)
    assert isinstance(new, UpdateRule)
    assert new.constructor_options().keys() == old.constructor_options().keys()
    assert new.transforms == old.transforms
    assert new.nonfinite == "skip"
    assert len(new.param_groups) == len(halves(old))
    train(whole, mine, range(3, 6))
    train(new, other, range(3, 6))
    assert values(new)[1:] == values(whole)[1:]
    assert new.param_groups[1]["lr"] == whole.param_groups[0]["lr"] == rate(5)


def test_the_schedule_of_a_group_goes_with_its_parameters():
    params = parameters()
    slow, fast = CosineDecay(0.01, decay_steps=9), CosineDecay(0.1, decay_steps=9)
    old = SGD([{"params": params[:2], "lr": slow}, {"params": params[2:4], "lr": fast}, {"params": params[4:]}], lr=3.0)
    new = rebuilt(old, list(reversed(described_groups(old))))
    train(new, params, range(3))
    assert [group["lr"] for group in new.param_groups] == [3.0, fast(2), slow(2)]


def test_a_rate_written_by_hand_over_a_schedule_stays():
    params = parameters()
    old = SGD(params, lr=CosineDecay(0.1, decay_steps=9))
    train(old, params, range(2))
    old.param_groups[0]["lr"] = 0.7
    new = rebuilt(old, described_groups(old))
    train(new, params, range(2))
    assert new.param_groups[0]["lr"] == 0.7
    assert "lr: 0.7\n" in repr(new)


def test_what_no_group_holds_is_kept():
    old = AdamOffload(parameters(), chunk_mebibytes=2.0, pin_memory=False)
    new = rebuilt(old, described_groups(old))
    assert isinstance(new, AdamOffload)
    assert (new.chunk_mebibytes, new.pin_memory) == (2.0, False)


@pytest.mark.parametrize("kind", TORCH, ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch_is_rebuilt_or_refuses_groups_itself(kind):
    shapes = [(3, 2), (2, 3), (2, 2)] if kind.__name__ == "Muon" else [(3, 2), (2,), (2, 2)]
    params = parameters(shapes)
    old = kind(params, **{"lr": 0.02} if kind is not torch.optim.LBFGS else {})
    if kind is torch.optim.LBFGS:
        with pytest.raises(ValueError, match="parameter"):
            rebuilt(old, halves(old))
        return
    old.param_groups[0]["weight_decay"] = 0.3
    new = rebuilt(old, halves(old))
    assert type(new) is kind
    assert new.defaults == old.defaults
    plain = {key: value for key, value in old.param_groups[0].items() if key != "params"}
    assert all({k: v for k, v in group.items() if k != "params"} == plain for group in new.param_groups)


class Passing(SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


class Fixed(Adam):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.3, nonfinite="raise")


class Losing(Adam):
    def __init__(self, params: Any, clip: float = 1.0) -> None:
        super().__init__(params, transforms=(ClipNorm(clip),))


class Kept(torch.optim.SGD):
    def __init__(self, params: Any, trust: float, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.trust = trust


class Clashing(torch.optim.SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, momentum=0.9, **options)


def test_subclasses_with_other_signatures():
    old: Any = Passing(parameters(), lr=0.3, momentum=0.5, nonfinite="skip")
    new: Any = rebuilt(old, described_groups(old))
    assert (new.param_groups[0]["momentum"], new.nonfinite) == (0.5, "skip")
    old = Fixed(parameters())
    old.param_groups[0]["lr"] = 0.7
    new = rebuilt(old, described_groups(old))
    assert (new.param_groups[0]["lr"], new.nonfinite) == (0.7, "raise")
    old = Kept(parameters(), 0.4)
    new = rebuilt(old, described_groups(old))
    assert new.trust == 0.4
    old = Losing(parameters(), clip=2.0)
    with pytest.raises(IncompatibleError, match="Losing takes clip, but neither its 'defaults' nor its attributes"):
        rebuilt(old, described_groups(old))
    old = Fixed(parameters())
    old.nonfinite = "skip"
    with pytest.raises(IncompatibleError, match="constructor of Fixed does not take nonfinite"):
        rebuilt(old, described_groups(old))
    old = Clashing(parameters())
    with pytest.raises(IncompatibleError, match="multiple values"):
        rebuilt(old, described_groups(old))


def test_changes_are_applied_and_unknown_ones_refused():
    old = torch.optim.AdamW(parameters(), lr=0.1, foreach=True)
    groups = [{k: v for k, v in group.items() if k not in ("fused", "foreach")} for group in described_groups(old)]
    new = rebuilt(old, groups, fused=True, foreach=None)
    assert (new.param_groups[0]["fused"], new.param_groups[0]["lr"]) == (True, 0.1)
    with pytest.raises(IncompatibleError, match="AdamW takes no 'momentum'"):
        rebuilt(old, groups, momentum=0.9)


def test_a_front_is_refused():
    front = FrontOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(IncompatibleError, match="wraps another optimizer"):
        rebuilt(front, described_groups(front))


@pytest.mark.parametrize("rule", SCHEDULED)
def test_repr_says_what_acts(rule):
    lr = CosineDecay(0.05, decay_steps=9)
    optimizer = RULES[rule](parameters(shapes_of(rule)), lr=lr, transforms=(ClipNorm(0.5),), nonfinite="skip")
    text = repr(optimizer)
    assert text.startswith(f"{rule} (\n")
    assert "ClipNorm(max_norm=0.5" in text
    assert "nonfinite: 'skip'" in text
    assert f"lr: 0.05 at this update, by {lr!r}" in text
