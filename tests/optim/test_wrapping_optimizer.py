"""Optimizers around another one, and optimizers over other groups in place of another one."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.optimizers import CASES, SCHEDULED, parameters, rate_for, shapes_of, train, values
from torchboost.errors import IncompatibleError
from torchboost.optim import SGD, Adam, AdamOffload, ClipNorm, Constant, CosineDecay, ScheduleFreeSGD
from torchboost.optim.wrapping_optimizer import DirectSteps, WrappingOptimizer, described_groups, regrouped

LR = CosineDecay(0.05, decay_steps=9)


def wrapped(*params: nn.Parameter) -> tuple[torch.optim.SGD, WrappingOptimizer]:
    inner = torch.optim.SGD(params or [nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    return inner, WrappingOptimizer(inner)


def test_groups_state_and_checkpoints_are_those_of_the_wrapped_optimizer():
    parameter = nn.Parameter(torch.ones(2))
    inner, outer = wrapped(parameter)
    outer.param_groups[0]["lr"] = 0.5
    parameter.grad = torch.ones(2)
    outer.step()
    assert parameter.tolist() == [0.5, 0.5]
    inner.load_state_dict(outer.state_dict())
    outer.load_state_dict(inner.state_dict())
    state = copy.deepcopy(inner.state_dict())
    state["param_groups"][0]["lr"] = 0.7
    inner.load_state_dict(state)
    assert outer.param_groups[0]["lr"] == 0.7
    assert outer.param_groups is inner.param_groups
    assert outer.state is inner.state


def test_what_only_the_wrapped_optimizer_has_is_reached():
    outer: Any = WrappingOptimizer(ScheduleFreeSGD([nn.Parameter(torch.ones(2))], lr=0.1))
    outer.eval()
    assert outer.param_groups[0]["training"] is False
    outer.train()
    assert outer.param_groups[0]["training"] is True
    assert not hasattr(wrapped()[1], "eval")


def test_a_group_that_is_added_to_either_is_in_both():
    inner, outer = wrapped()
    for place, one in enumerate((inner, outer), 1):
        param = nn.Parameter(torch.ones(3))
        one.add_param_group({"params": [param], "lr": 0.5})
        assert outer.param_groups is inner.param_groups
        assert outer.param_groups[place]["lr"] == 0.5
        param.grad = torch.ones(3)
        outer.step()
        assert param.tolist() == [0.5] * 3
        param.grad = None
        with pytest.raises(ValueError, match="some parameters appear in more than one"):
            outer.add_param_group({"params": [param]})


def test_what_is_refused():
    _, outer = wrapped()
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"WrappingOptimizer cannot be copied or pickled.*Copy that optimizer"):
            copied(outer)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, found str"):
        WrappingOptimizer("sgd")  # pyright: ignore[reportArgumentType]


def start() -> tuple[torch.optim.SGD, WrappingOptimizer, DirectSteps]:
    behind = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    front = WrappingOptimizer(behind)
    return behind, front, DirectSteps(behind, front, "step the one in front")


def test_refuses_until_allowed_or_removed():
    behind, _, direct = start()
    with pytest.raises(IncompatibleError, match="step the one in front"):
        behind.step()
    with direct.allowed():
        with direct.allowed():
            behind.step()
        behind.step()
    with pytest.raises(IncompatibleError, match="step the one in front"):
        behind.step()
    with pytest.raises(KeyError), direct.allowed():
        raise KeyError
    with pytest.raises(IncompatibleError):  # an error inside closes it again
        behind.step()
    direct.remove()
    behind.step()
    assert not behind._optimizer_step_pre_hooks


def test_the_one_in_front_lives_as_long_as_the_one_behind():
    behind, front, direct = start()
    kept = weakref.ref(front)
    del front, direct
    gc.collect()
    assert kept() is not None
    del behind
    gc.collect()
    assert kept() is None


def halves(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {**group, "params": part}
        for group in described_groups(optimizer)
        for part in (group["params"][:2], group["params"][2:])
    ]


def test_every_rule_goes_on_as_it_was():
    for name in CASES:
        mine, other = parameters(shapes_of(name)), parameters(shapes_of(name))
        rate = LR if name.split("-")[0] in SCHEDULED else Constant(0.05)
        options: dict[str, Any] = {"lr": rate_for(name, LR), "transforms": (ClipNorm(0.5),), "nonfinite": "skip"}
        options["weight_decay"] = lambda update: 0.1 / (1 + update)
        whole, old = CASES[name](mine, **options), CASES[name](other, **options)
        train(whole, mine, range(3))
        train(old, other, range(3))
        new = regrouped(old, halves(old))
        for param, state in old.state.items():
            new.state[param] = copy.deepcopy(state)
        assert isinstance(new, type(old))
        assert (new.transforms, new.nonfinite) == (old.transforms, "skip")
        assert len(new.param_groups) == len(halves(old))
        text = repr(new)
        assert text.startswith(f"{type(new).__name__} (\n")
        assert "ClipNorm(max_norm=0.5" in text
        assert "nonfinite: 'skip'" in text
        assert (f"lr: {rate!r}" in text) == (rate is LR)
        train(whole, mine, range(3, 6))
        train(new, other, range(3, 6))
        assert values(new)[1:] == values(whole)[1:]
        assert new.param_groups[1]["lr"] == whole.param_groups[0]["lr"] == rate(5)


def test_the_schedule_of_a_group_goes_with_its_parameters_unless_it_was_overwritten():
    params = parameters()
    slow, fast = CosineDecay(0.01, decay_steps=9), CosineDecay(0.1, decay_steps=9)
    old = SGD([{"params": params[:2], "lr": slow}, {"params": params[2:4], "lr": fast}, {"params": params[4:]}], lr=3.0)
    new = regrouped(old, list(reversed(described_groups(old))))
    train(new, params, range(3))
    assert [group["lr"] for group in new.param_groups] == [3.0, fast(2), slow(2)]
    new.param_groups[1]["lr"] = 0.7
    again = regrouped(new, described_groups(new))
    train(again, params, range(2))
    assert again.param_groups[1]["lr"] == 0.7
    assert "lr: 0.7\n" in repr(again)


def test_what_no_group_holds_is_kept():
    old = AdamOffload(parameters(), chunk_mebibytes=2.0)
    new = regrouped(old, described_groups(old))
    assert isinstance(new, AdamOffload)
    assert new.chunk_mebibytes == 2.0


def test_every_optimizer_of_torch_gets_other_groups_or_is_refused():
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    for kind in set(kinds) - {torch.optim.Optimizer}:
        if not issubclass(kind, torch.optim.Optimizer):
            continue
        make: Any = kind
        params = parameters([(3, 2), (2, 3), (2, 2)] if kind.__name__ == "Muon" else [(3, 2), (2,), (2, 2)])
        if kind is torch.optim.LBFGS:
            with pytest.raises(IncompatibleError, match="LBFGS keeps parameters or another optimizer in '_params'"):
                regrouped(make(params), halves(make(params)))
            continue
        old = make(params, lr=0.02)
        old.param_groups[0]["weight_decay"] = 0.3
        new = regrouped(old, halves(old))
        assert type(new) is kind
        assert new.defaults == old.defaults
        plain = {key: value for key, value in old.param_groups[0].items() if key != "params"}
        assert all({k: v for k, v in group.items() if k != "params"} == plain for group in new.param_groups)


class Fixed(Adam):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.3, nonfinite="raise")


class Kept(torch.optim.SGD):
    def __init__(self, params: Any, trust: float, **options: Any) -> None:
        super().__init__(params, momentum=0.9, **options)
        self.trust = trust


class Around(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = torch.optim.SGD(params)


def test_classes_with_other_constructors():
    old: Any = Fixed(parameters())
    old.param_groups[0]["lr"] = 0.7
    old.nonfinite = "skip"
    new: Any = regrouped(old, described_groups(old))
    assert (new.param_groups[0]["lr"], new.nonfinite) == (0.7, "skip")
    old = Kept(parameters(), 0.4, lr=0.2)
    handle = old.register_step_pre_hook(lambda *_: pytest.fail("a hook of the old one"))
    torch.optim.lr_scheduler.StepLR(old, 1)
    new = regrouped(old, halves(old))
    train(new, [param for group in new.param_groups for param in group["params"]], [0])
    assert (new.trust, new.param_groups[1]["momentum"], new.step.__self__) == (0.4, 0.9, new)
    handle.remove()
    for other, message in (
        (WrappingOptimizer(torch.optim.SGD(parameters(), lr=0.1)), "another optimizer in 'opt'"),
        (Around(parameters()), "another optimizer in 'base'"),
    ):
        with pytest.raises(IncompatibleError, match=message):
            regrouped(other, described_groups(other))
