"""Param groups and communication indices under MindSpore's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tests.support.models import batch_for, cnn
from tests.support.optimizers import CASES, rate_for
from tests.support.trajectories import snapshot
from torchboost import FreezeOpt, IncompatibleError, OptimizerProcess, ParameterProcess, Target
from torchboost.algorithms import GradientCentralization
from torchboost.optim import ClipValue, CosineDecay

FORMS = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.Adam, {"betas": (0.8, 0.95), "amsgrad": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {"weight_decay": 0.3}),
]


def build(kind: Any, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = cnn()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "lr": 0.02, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2]},
    ]
    return model, kind(groups, lr=0.05, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        x, y = batch_for(model, torch.Generator().manual_seed(seed))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_the_new_optimizer_continues_with_centralisation():
    for kind, options in FORMS:
        model, old = build(kind, options)
        train(model, old, range(2))
        process = OptimizerProcess(old)
        process.add_grad_centralization(model)
        new = process.generate_new_optimizer()
        assert type(new) is kind
        assert new.defaults == old.defaults
        assert [(g["lr"], g.get("grad_centralization", False)) for g in new.param_groups] == [
            (0.02, True),
            (0.05, False),
        ]
        assert new.param_groups[0]["weight_decay"] == 0.1
        train(model, new, range(2, 5))

        twin, plain = build(kind, options)
        train(twin, plain, range(2))
        GradientCentralization().attach(Target(twin, plain))
        train(twin, plain, range(2, 5))
        assert snapshot(model) == snapshot(twin)


def test_rules_of_ours_continue_over_the_new_groups():
    for name in ["Adam-fused", "LARS-default", "ScheduleFreeSGD"]:
        options = {
            "lr": rate_for(name, CosineDecay(0.05, decay_steps=9)),
            "transforms": (ClipValue(0.5),),
            "nonfinite": "raise",
        }
        torch.manual_seed(0)
        model = cnn()
        old = CASES[name](model.parameters(), **options)
        train(model, old, range(2))
        process = OptimizerProcess(old)
        process.add_grad_centralization(model)
        new = process.generate_new_optimizer()
        train(model, new, range(2, 4))
        assert [group.get("grad_centralization", False) for group in new.param_groups] == [True, False]

        torch.manual_seed(0)
        twin = cnn()
        theirs = dict(zip(model.parameters(), twin.parameters(), strict=True))
        split = [{"params": [theirs[param] for param in group["params"]]} for group in new.param_groups]
        plain = CASES[name](split, **options)
        train(twin, plain, range(2))
        plain.param_groups[0]["grad_centralization"] = True
        train(twin, plain, range(2, 4))
        assert snapshot(model) == snapshot(twin)


def test_a_flagged_group_is_centralised_without_a_network_and_the_effect_can_be_removed():
    model = nn.Linear(4, 2, bias=False)
    process = OptimizerProcess(
        torch.optim.SGD([{"params": list(model.parameters()), "grad_centralization": True}], lr=1.0)
    )
    optimizer = process.generate_new_optimizer()
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert process.centralization is not None
    process.centralization.remove()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert torch.equal(model.weight, before - 1)


def test_without_centralisation_the_optimizer_is_only_rebuilt():
    _, old = build(torch.optim.SGD, {"momentum": 0.9})
    process = OptimizerProcess(old)
    new = process.generate_new_optimizer()
    assert new is not old
    assert process.centralization is None
    assert not new._optimizer_step_pre_hooks
    assert [g["params"] for g in new.param_groups] == [g["params"] for g in old.param_groups]


def test_groups_are_split_once_and_keep_their_names():
    model = cnn()
    process = OptimizerProcess(torch.optim.AdamW(model.named_parameters(), lr=0.1))
    for _ in range(2):  # adding it again changes nothing, and names survive
        process.add_grad_centralization(model)
        process.opt = process.generate_new_optimizer()
    assert [len(group["params"]) for group in process.opt.param_groups] == [3, 5]
    assert process.opt.param_groups[0]["param_names"] == ["0.weight", "4.weight", "9.weight"]


def test_optimizer_process_refuses_what_it_cannot_rebuild():
    model = nn.Linear(2, 2)
    with pytest.raises(IncompatibleError, match=r"LBFGS keeps parameters.*centralize_gradients\(optimizer\)"):
        OptimizerProcess(torch.optim.LBFGS(model.parameters())).generate_new_optimizer()
    outer = FreezeOpt(torch.optim.SGD(model.parameters(), lr=0.1), [list(model.parameters())], [0])
    with pytest.raises(IncompatibleError, match="FreezeOpt keeps parameters or another optimizer in 'opt'"):
        OptimizerProcess(outer).generate_new_optimizer()
    wrong: Any = model
    with pytest.raises(TypeError, match=r"opt must be a torch\.optim\.Optimizer, found Linear"):
        OptimizerProcess(wrong)
    process = OptimizerProcess(torch.optim.SGD(model.parameters(), lr=0.1))
    wrong = [model]
    with pytest.raises(TypeError, match=r"network must be a torch\.nn\.Module, found list"):
        process.add_grad_centralization(wrong)
    with pytest.raises(ValueError, match="empty list"):
        process.build_gc_params_group({}, [])
    mixed = [model.weight, {"params": []}]
    for wrong in ([1], mixed, [{"lr": 0.1}], [{"params": ["weight"]}], "text", model.weight, None):
        with pytest.raises(TypeError, match="parameters: found"):
            process.build_gc_params_group({}, wrong)
    process.opt.param_groups[0]["grad_centralization"] = "yes"
    with pytest.raises(TypeError, match="grad_centralization: found 'yes'"):
        process.generate_new_optimizer()


@given(st.integers(1, 30), st.data())
def test_every_parameter_has_an_index_that_rises_at_the_points(count, data):
    points = sorted(data.draw(st.sets(st.integers(0, 60))))
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(count)]
    process = ParameterProcess()
    assert process.assign_parameter_group(parameters, points) == parameters
    index = process.fusion_index(parameters)
    steps = [b - a for a, b in zip((1, *index), index, strict=False)]
    assert [i for i, step in enumerate(steps) if step] == [point for point in points if point < count]
    assert set(steps) <= {0, 1}


def test_without_points_there_are_two_halves_and_a_later_call_goes_on():
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(9)]
    process = ParameterProcess()
    process.assign_parameter_group(parameters[:5])
    process.assign_parameter_group(parameters[5:])
    assert process.fusion_index(parameters) == (1, 1, 2, 2, 2, 2, 2, 3, 3)
    assert process.fusion_index(parameters[2:4]) == (2, 2)
    assert not any(vars(parameter) for parameter in parameters)


def test_groups_are_rebuilt_over_another_list_of_parameters():
    ps = [nn.Parameter(torch.full((2,), float(i))) for i in range(3)]
    process = ParameterProcess()
    origin = [{"params": ps[:1], "param_names": ["a"]}, {"params": ps[1:2], "param_names": ["b"], "lr": 1.0}]
    assert [group["param_names"] for group in process.generate_group_params(ps[1:2], origin)] == [[], ["b"]]
    rebuilt = process.generate_group_params(ps, [*origin, {"order_params": ps[:2]}])
    assert all("param_names" not in group for group in rebuilt)  # the new parameter has none
    assert [group.get("params") for group in rebuilt] == [ps[:1], ps[1:2], None, ps[2:]]
    assert rebuilt[2] == {"order_params": ps}
    assert rebuilt[3]["lr"] == 1.0
    torch.optim.SGD([group for group in rebuilt if "params" in group], lr=0.1)
    assert process.generate_group_params(ps, ps[:1]) == [{"params": ps}]


@given(st.one_of(st.integers(), st.text(), st.lists(st.floats(), min_size=1), st.lists(st.booleans(), min_size=1)))
def test_bad_split_points_are_refused(bad):
    with pytest.raises(TypeError, match="split_point"):
        ParameterProcess().assign_parameter_group(list(nn.Linear(2, 2).parameters()), bad)


def test_parameter_process_refuses_bad_input():
    parameters = list(nn.Linear(2, 2).parameters())
    process = ParameterProcess()
    with pytest.raises(ValueError, match="2 of 2 parameters have no index"):
        process.fusion_index(parameters)
    for points in ([50, 3], [-1], [3, 3]):
        with pytest.raises(ValueError, match="split_point"):
            process.assign_parameter_group(parameters, points)
    for call in (process.assign_parameter_group, lambda ps: process.generate_group_params(ps, parameters)):
        with pytest.raises(ValueError, match="empty list"):
            call([])
        wrong: Any
        for wrong in ([1], [{"params": parameters}], "text", None):
            with pytest.raises(TypeError, match="parameters: found"):
                call(wrong)
    with pytest.raises(ValueError, match="empty list"):
        process.generate_group_params(parameters, [])
