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
from torchboost.algorithms.gradient_centralization import GradientCentralization
from torchboost.compat.freeze import FreezeOpt
from torchboost.compat.process import OptimizerProcess, ParameterProcess
from torchboost.core.algorithm import Target
from torchboost.errors import IncompatibleError
from torchboost.optim.schedules import CosineDecay
from torchboost.optim.transforms import ClipValue

FUSED = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.Adam, {"betas": (0.8, 0.95), "amsgrad": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {"weight_decay": 0.3}),
    (torch.optim.AdamW, {"fused": True}),
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


@pytest.mark.parametrize(("kind", "options"), FUSED, ids=str)
def test_the_new_optimizer_continues_with_centralisation(kind, options):
    model, old = build(kind, options)
    train(model, old, range(2))
    process = OptimizerProcess(old)
    process.add_grad_centralization(model)
    new = process.generate_new_optimizer()
    assert type(new) is kind
    assert new.defaults == old.defaults
    assert [(g["lr"], g.get("grad_centralization", False)) for g in new.param_groups] == [(0.02, True), (0.05, False)]
    assert new.param_groups[0]["weight_decay"] == 0.1
    train(model, new, range(2, 5))

    twin, plain = build(kind, options)
    train(twin, plain, range(2))
    GradientCentralization().attach(Target(twin, plain))
    train(twin, plain, range(2, 5))
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


def test_groups_split_by_structure_and_others_pass_through():
    model = cnn()
    process = OptimizerProcess(torch.optim.SGD(model.parameters(), lr=0.1))
    owners = process.build_params_dict(model)
    assert owners[id(model[0].weight)] is model[0]
    assert len(owners) == len(list(model.parameters()))
    order = {"order_params": list(model.parameters())}
    left = {"params": [model[4].weight], "grad_centralization": False}
    groups = process.build_gc_params_group(
        owners, [{"params": [model[0].weight, model[1].weight], "lr": 1.0}, left, order]
    )
    assert [g.get("grad_centralization") for g in groups] == [True, None, False, None]
    assert groups[0]["params"] == [model[0].weight]
    assert groups[0]["lr"] == groups[1]["lr"] == 1.0
    assert groups[1]["params"] == [model[1].weight]
    assert groups[2:] == [left, order]


def test_adding_twice_changes_nothing_and_names_survive():
    model = cnn()
    process = OptimizerProcess(torch.optim.AdamW(model.named_parameters(), lr=0.1))
    process.add_grad_centralization(model)
    process.opt = process.generate_new_optimizer()
    process.add_grad_centralization(model)
    groups = process.generate_new_optimizer().param_groups
    assert [len(group["params"]) for group in groups] == [3, 5]
    assert groups[0]["param_names"] == ["0.weight", "4.weight", "9.weight"]


class Odd(torch.optim.Optimizer):
    def __init__(self, params: Any, trust: float) -> None:
        super().__init__(params, {})


class Open(torch.optim.SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


def test_a_class_that_hides_its_arguments_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(IncompatibleError, match=r"Odd takes trust.*centralize_gradients\(optimizer\)"):
        OptimizerProcess(Odd(model.parameters(), 0.1)).generate_new_optimizer()
    rebuilt = OptimizerProcess(Open(model.parameters(), lr=0.3)).generate_new_optimizer()
    assert rebuilt.param_groups[0]["lr"] == 0.3


def test_optimizer_process_refuses_bad_input():
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="opt: found Linear"):
        OptimizerProcess(model)
    process = OptimizerProcess(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="network: found list"):
        process.add_grad_centralization([model])
    with pytest.raises(ValueError, match="empty list"):
        process.build_gc_params_group({}, [])
    for bad in (
        [1],
        [model.weight, {"params": []}],
        [{"lr": 0.1}],
        [{"params": ["weight"]}],
        "text",
        model.weight,
        None,
    ):
        with pytest.raises(TypeError, match="parameters: found"):
            process.build_gc_params_group({}, bad)
    process.opt.param_groups[0]["grad_centralization"] = "yes"
    with pytest.raises(TypeError, match="grad_centralization: found 'yes'"):
        process.generate_new_optimizer()


def test_fusion_indices_start_at_one_and_rise_at_each_split_point():
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(9)]
    process = ParameterProcess()
    assert process.assign_parameter_group(parameters) == parameters
    index = process.fusion_index(parameters)
    assert index.indices == (1,) * 4 + (2,) * 5
    assert [len(segment) for segment in index.segments(parameters)] == [4, 5]
    assert not any(vars(parameter) for parameter in parameters)
    other = ParameterProcess()
    other.assign_parameter_group(parameters, [3, 6])
    assert other.fusion_index(parameters[2:4]).indices == (1, 2)


def test_parameter_process_refuses_bad_input():
    parameters = list(nn.Linear(2, 2).parameters())
    process = ParameterProcess()
    with pytest.raises(ValueError, match="2 of 2 parameters have no index"):
        process.fusion_index(parameters)
    for call in (process.assign_parameter_group, lambda ps: process.generate_group_params(ps, parameters)):
        with pytest.raises(ValueError, match="empty list"):
            call([])
        for bad in ([1], [{"params": parameters}], "text", None):
            with pytest.raises(TypeError, match="parameters: found"):
                call(bad)
    with pytest.raises(ValueError, match="empty list"):
        process.generate_group_params(parameters, [])


@given(st.one_of(st.integers(), st.text(), st.lists(st.floats(), min_size=1), st.lists(st.booleans(), min_size=1)))
def test_bad_split_points_are_refused(bad):
    with pytest.raises(TypeError, match=r"split_point|split points"):
        ParameterProcess().assign_parameter_group(list(nn.Linear(2, 2).parameters()), bad)


# Muon takes no vectors, and a mixed optimizer has more than the two groups of this comparison.
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("Muon", "Mixed"))])
def test_every_rule_of_ours_continues_over_the_new_groups(name):
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


def test_an_optimizer_in_front_of_another_is_refused():
    model = nn.Linear(4, 2)
    front = FreezeOpt(torch.optim.SGD(model.parameters(), lr=0.1), [list(model.parameters())], [0])
    with pytest.raises(IncompatibleError, match="found FreezeOpt, which wraps a SGD"):
        OptimizerProcess(front)


def test_split_points_past_the_end_are_left_out():
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(20)]
    process = ParameterProcess()
    process.assign_parameter_group(parameters, [50, 100])
    assert process.fusion_index(parameters).indices == (1,) * 20
    process.assign_parameter_group(parameters, [10, 20, 50])
    assert process.fusion_index(parameters).indices == (1,) * 10 + (2,) * 10
    for bad in ([50, 3], [-1], [3, 3]):
        with pytest.raises(ValueError, match="split points"):
            process.assign_parameter_group(parameters, bad)
