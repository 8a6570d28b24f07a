"""A group with a rule moves as under the rule's own class; loading, defaults and errors."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from tests.support.optimizers import SHAPES, parameters, same, train, values
from torchboost.optim import AdamW, Centralize, ClipNorm, GradientPipeline, Muon
from torchboost.optim.rules.mixed import GROUP_RULES, MixedOptimizer


def test_a_group_moves_as_under_its_own_class():
    for name in GROUP_RULES:
        shapes = [(4, 3), (3, 4), (2, 3, 2, 2)] if name == "muon" else SHAPES
        mixed, alone, rest = parameters(shapes), parameters(shapes), parameters([(5, 2)])
        optimizer = MixedOptimizer([{"params": mixed, "rule": name, "lr": 0.02, "weight_decay": 0.1}, {"params": rest}])
        other = GROUP_RULES[name](alone, lr=0.02, weight_decay=0.1)
        for step in range(4):
            train(optimizer, mixed, [step])
            train(other, alone, [step])
            assert same(mixed, alone), step
            for one, two in zip(mixed, alone, strict=True):
                assert optimizer.state[one].keys() == other.state[two].keys()


def test_defaults_are_those_of_the_rules_unless_the_constructor_gives_some():
    params = parameters([(3, 2), (3, 2), (3,)])
    groups = [{"params": params[:1], "rule": "muon"}, {"params": params[1:2], "rule": "sgd"}, {"params": params[2:]}]
    plain = MixedOptimizer(copy.deepcopy(groups)).param_groups
    assert [group["lr"] for group in plain] == [1e-3, 1e-3, 1e-3]
    assert [group["weight_decay"] for group in plain] == [0.1, 0.0, 0.01]
    assert [group["momentum"] for group in plain[:2]] == [0.95, 0.0]
    given = MixedOptimizer(groups, rule="adam", lr=0.5, weight_decay=0.2).param_groups
    assert [(group["rule"], group["lr"], group["weight_decay"]) for group in given] == [
        ("muon", 0.5, 0.2),
        ("sgd", 0.5, 0.2),
        ("adam", 0.5, 0.2),
    ]
    assert given[2]["decoupled_weight_decay"] is False


def mixed(shapes: tuple[tuple[int, ...], ...] = ((4, 3), (4,)), **options: object) -> tuple[MixedOptimizer, list]:
    params = parameters(shapes)
    own = [{"params": [p], "rule": "muon" if p.ndim > 1 else "adamw"} for p in params]
    return MixedOptimizer([{**group, **options} for group in own], lr=0.02), params


def test_a_scheduler_and_clipping_act_on_all_groups():
    _, params = mixed()
    outer, others = mixed()
    inner = MixedOptimizer(
        [{"params": [p], "rule": "muon" if p.ndim > 1 else "adamw"} for p in params],
        lr=lambda t: 0.02 * 0.5 ** (t // 2),
        transforms=(Centralize(), ClipNorm(0.1)),
    )
    scheduler = StepLR(outer, 2, 0.5)
    GradientPipeline(Centralize(), ClipNorm(0.1)).attach(outer)
    for step in range(5):
        train(inner, params, [step])
        train(outer, others, [step])
        scheduler.step()
        assert same(params, others)
    assert [group["lr"] for group in outer.param_groups] == [0.005, 0.005]


def test_a_file_with_another_rule_is_refused_and_one_without_rules_is_taken():
    optimizer, params = mixed()
    train(optimizer, params, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    assert [group["rule"] for group in state["param_groups"]] == ["muon", "adamw"]
    other, fresh = mixed()
    before = values(other)
    wrong = copy.deepcopy(state)
    wrong["param_groups"][0]["rule"] = "sgd"
    with pytest.raises(ValueError, match=r"group 0: the checkpoint was written with rule='sgd'.*has rule='muon'"):
        other.load_state_dict(wrong)
    assert values(other) == before
    for group in state["param_groups"]:
        del group["rule"]
    other.load_state_dict(state)
    with torch.no_grad():
        for mine, theirs in zip(fresh, params, strict=True):
            mine.copy_(theirs)
    assert same(train(optimizer, params, [2]), train(other, fresh, [2]))


def test_a_file_of_torch_is_read_as_the_only_rule_reads_it():
    """torch corrects the moments, and its files do not say so."""
    for rule in ("adamw", "adam_weight_decay"):
        params, plain = parameters(), parameters()
        optimizer, other = MixedOptimizer(params, rule=rule, lr=0.01), torch.optim.AdamW(plain, lr=0.01)
        train(other, plain, range(3))
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
        with torch.no_grad():
            for mine, theirs in zip(params, plain, strict=True):
                mine.copy_(theirs)
        assert same(train(optimizer, params, [3]), train(other, plain, [3]))


def test_a_rule_that_does_not_exist():
    for name in ["mun", "LazyAdam", None, 3]:
        with pytest.raises(ValueError, match="a group may name adam, adamw"):
            MixedOptimizer([{"params": parameters([(2, 2)]), "rule": name}])
        with pytest.raises(ValueError, match="a group may name adam, adamw"):
            MixedOptimizer(parameters([(2, 2)]), rule=name)
    with pytest.raises(ValueError, match="Did you mean 'muon'"):
        MixedOptimizer(parameters([(2, 2)]), rule="mun")


def test_fused_adamw_and_masters_in_one_optimizer():
    params, alone = parameters([(4, 3), (4,)], dtype=torch.bfloat16), parameters([(4, 3), (4,)], dtype=torch.bfloat16)
    groups = [{"params": params[:1], "rule": "muon", "lr": 0.01}, {"params": params[1:], "fused": True, "lr": 0.01}]
    optimizer = MixedOptimizer(groups, master_weights=True)
    muon = Muon(alone[:1], lr=0.01, master_weights=True)
    adam = AdamW(alone[1:], lr=0.01, master_weights=True, fused=True)
    for step in range(3):
        train(optimizer, params, [step])
        train(muon, alone, [step])
        adam.step()
    assert same(params, alone)


def test_groups_added_later_take_the_options_of_their_rule():
    optimizer, _ = mixed()
    late = nn.Parameter(torch.ones(3, 3))
    optimizer.add_param_group({"params": [late], "rule": "momentum"})
    assert optimizer.param_groups[2]["momentum"] == 0.9
    assert optimizer.param_groups[2]["lr"] == 0.02


@pytest.mark.parametrize("writes", ["one rate", "shares of the first rates", "zero", "one rate from the beginning"])
def test_a_loop_that_gives_all_groups_the_rate_of_one_rule_is_warned_once(writes: str):
    model = nn.Linear(3, 3)
    first = 1e-3 if writes == "one rate from the beginning" else 0.02
    optimizer = MixedOptimizer(
        [{"params": [model.weight], "rule": "muon", "lr": first}, {"params": [model.bias], "lr": 1e-3}]
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                share = 1 - step / 3
                group["lr"] = {"shares of the first rates": rate * share, "zero": 0.0}.get(writes, 1e-3 * share)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    said = [str(one.message) for one in caught]
    assert all("OneCycleLR takes max_lr=rates" in text for text in said)
    assert [text.startswith("all param groups have the learning rate 0.001 now") for text in said] == (
        [True] if writes == "one rate" else []
    )


def test_a_copy_and_a_pickle_still_warn_of_one_rate_for_all_rules():
    model = nn.Linear(3, 3)
    groups = [{"params": [model.weight], "rule": "muon", "lr": 0.02}, {"params": [model.bias], "lr": 1e-3}]
    optimizer = pickle.loads(pickle.dumps(MixedOptimizer(groups)))
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    with pytest.warns(UserWarning, match="all param groups have the learning rate"):
        optimizer.step()
