"""What every update rule promises: resumed, copied, pickled, scheduled and compiled runs equal the plain one."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from tests.support.optimizers import (
    CASES,
    DISTINCT,
    RULES,
    SCHEDULED,
    SHAPES,
    all_rules,
    give_grads,
    parameters,
    same,
    shapes_of,
    train,
    values,
)
from torchboost.optim.pipeline import GradientPipeline
from torchboost.optim.transforms import Centralize, ClipNorm, ClipValue, Coalesce, Decay, Unscale

STEPS = 6
RATES = [0.05 / (1 + update) for update in range(STEPS)]

UNSCHEDULED = [name for name in CASES if name.split("-")[0] not in SCHEDULED]


def halved(update: int) -> float:
    return 0.05 * 0.5**update


def saved(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_every_rule_is_under_contract():
    assert {rule.__name__ for rule in all_rules()} == set(RULES)
    assert {name.split("-")[0] for name in CASES} == set(RULES)


def test_resuming_at_every_step_is_bit_identical():
    for name in CASES:
        decays = {"weight_decay": lambda t: 0.1 / (1 + t)}
        rates = [{}, decays] if name in UNSCHEDULED else [{}, {"lr": RATES}, {"lr": halved, **decays}]
        for rate in rates if name in DISTINCT else rates[:1]:
            resume_at_every_step(name, rate)


def resume_at_every_step(name: str, rate: dict[str, Any]) -> None:
    params = parameters(shapes_of(name))
    whole = CASES[name](params, **rate)
    checkpoints = []
    for step in range(STEPS):
        checkpoints.append(([p.detach().clone() for p in params], saved(whole.state_dict())))
        train(whole, params, [step])
    for step, (weights, state) in enumerate(checkpoints):
        resumed = [nn.Parameter(weight.clone()) for weight in weights]
        optimizer = CASES[name](resumed, **rate)
        optimizer.load_state_dict(state)
        train(optimizer, resumed, range(step, STEPS))
        assert values(optimizer) == values(whole), step


def test_copies_go_on_alike_and_alone():
    for name in DISTINCT:
        for copied in [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]:
            params = parameters(shapes_of(name))
            rate = 0.05 if name in UNSCHEDULED else RATES
            optimizer = CASES[name](params, lr=rate, transforms=(Centralize(skip=[params[0]]), ClipValue(0.5)))
            train(optimizer, params, range(3))
            twin = copied(optimizer)
            theirs = [param for group in twin.param_groups for param in group["params"]]
            before = values(optimizer)
            train(twin, theirs, range(3, 6))
            assert values(optimizer) == before
            train(optimizer, params, range(3, 6))
            assert values(twin) == values(optimizer)
            assert twin.transforms[1:] == optimizer.transforms[1:]
            assert theirs[0] in twin.transforms[0].skip


CHAINS = {
    "clip": (ClipNorm(0.5),),
    "all": (Unscale(4.0), Coalesce(), Decay(0.1), Centralize(), ClipNorm(2.0), ClipValue(0.3)),
}


def test_transforms_inside_equal_a_pipeline_in_front():
    for name in [name for name in DISTINCT if not name.startswith("LARS")]:
        for chain in CHAINS.values():
            inner, outer = parameters(shapes_of(name)), parameters(shapes_of(name))
            inside, behind = CASES[name](inner, transforms=chain), CASES[name](outer)
            GradientPipeline(*chain).attach(behind)
            for step in range(4):
                train(inside, inner, [step])
                train(behind, outer, [step])
                assert values(inside) == values(behind)
                assert same([p.grad for p in inner], [p.grad for p in outer])


def test_a_scheduler_equals_a_function_and_a_list():
    for rule in SCHEDULED:
        runs = []
        for rate in (
            {"lr": 0.1},
            {"lr": lambda t: 0.1 * 0.5 ** (t // 2)},
            {"lr": [0.1 * 0.5 ** (t // 2) for t in range(6)]},
        ):
            params = parameters(shapes_of(rule))
            optimizer = RULES[rule](params, **rate)
            scheduler = StepLR(optimizer, 2, 0.5) if rate["lr"] == 0.1 else None
            for step in range(6):
                train(optimizer, params, [step])
                if scheduler is not None:
                    scheduler.step()
            runs.append(params)
        assert same(runs[0], runs[1])
        assert same(runs[0], runs[2])


def test_groups_have_their_own_rates_and_decays():
    for rule in SCHEDULED:
        together, apart = parameters(shapes_of(rule)), parameters(shapes_of(rule))
        rates = [0.1, [0.1, 0.05, 0.02], lambda t: 0.1 / (1 + t), torch.tensor(0.07), 0.01]
        decays = [0.0, 0.1, lambda t: 0.1 * t, [0.1, 0.2, 0.3], 0.2]
        options = [{"lr": lr, "weight_decay": decay} for lr, decay in zip(rates, decays, strict=True)]
        optimizer = RULES[rule]([{"params": [p], **o} for p, o in zip(together, options, strict=True)])
        train(optimizer, together, range(3))
        rows = [group["weight_decay"] for group in optimizer.param_groups]
        assert rows == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.2])
        for param, option, other in zip(apart, options, together, strict=True):
            alone = RULES[rule]([param], **option)
            for step in range(3):
                give_grads(apart, step)
                alone.step()
            assert same([param], [other])


def test_param_groups_may_be_written_mid_run():
    for rule in RULES:
        params = parameters(shapes_of(rule))
        optimizer = RULES[rule](params[:2], lr=0.1)
        optimizer.add_param_group({"params": params[2:], "weight_decay": 0.1})
        train(optimizer, params, range(2))
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"], group["maximize"] = 0.03, 0.2, True
        state = copy.deepcopy(optimizer.state_dict())
        fresh = [nn.Parameter(param.detach().clone()) for param in params]
        other = RULES[rule](fresh[:2], lr=0.03, weight_decay=0.2, maximize=True)
        other.add_param_group({"params": fresh[2:]})
        other.load_state_dict(state)
        told = (
            pytest.warns(UserWarning, match="changed by hand") if "ScheduleFree" in rule else contextlib.nullcontext()
        )
        with told:
            train(optimizer, params, [2])
        assert same(params, train(other, fresh, [2]))


@pytest.mark.parametrize("rule", RULES)
def test_hooks_closures_and_zero_grad(rule):
    params, plain = parameters(shapes_of(rule)), parameters(shapes_of(rule))
    optimizer, other = RULES[rule](params, lr=0.01), RULES[rule](plain, lr=0.01)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: called.append("saved"))

    def closure() -> str:
        assert torch.is_grad_enabled()
        called.append("closure")
        optimizer.zero_grad()
        assert all(param.grad is None for param in params)
        give_grads(params, 0)
        return "loss"

    assert optimizer.step(closure) == "loss"
    optimizer.state_dict()
    assert called == ["before", "closure", "after", "saved"]
    assert same(params, train(other, plain, [0]))
    assert optimizer.step() is None
    optimizer.zero_grad(set_to_none=False)
    assert all(not param.grad.any() for param in params)
    assert repr(optimizer).startswith(rule)


def test_parameters_without_gradients_keep_their_bytes():
    for rule in RULES:
        params = parameters(shapes_of(rule))
        optimizer = RULES[rule](params, lr=0.1, weight_decay=0.1)
        train(optimizer, params, [0])
        before = values(optimizer)
        optimizer.zero_grad()
        optimizer.step()
        assert values(optimizer) == before
        give_grads(params[:1], 1)
        optimizer.step()
        after = values(optimizer)
        assert after[1][1:] == before[1][1:]
        assert after[2][1:] == before[2][1:]
        assert after[2][0] != before[2][0]


def test_named_parameters_find_their_state_by_name():
    for rule in RULES:
        params = dict(zip("abcd", parameters([(3, 2)] * 4), strict=True))
        optimizer = RULES[rule](params.items(), lr=0.1)
        train(optimizer, list(params.values()), range(2))
        state = saved(optimizer.state_dict())
        assert state["param_groups"][0]["param_names"] == list("abcd")
        turned = {name: nn.Parameter(params[name].detach().clone()) for name in "dbac"}
        other = RULES[rule](turned.items(), lr=0.1)
        other.load_state_dict(state)
        assert other.param_groups[0]["param_names"] == list("dbac")
        for ours, theirs in ((params, optimizer), (turned, other)):
            train(theirs, [ours[name] for name in "abcd"], range(2, 5))
        assert same([params[name] for name in "abcd"], [turned[name] for name in "abcd"])


def test_some_other_names_at_the_places_of_a_file_are_new_names_and_moved_ones_are_refused():
    for rule in RULES:
        optimizer = RULES[rule]([*zip("abcd", parameters([(3, 2)] * 4), strict=True)], lr=0.1)
        train(optimizer, optimizer.param_groups[0]["params"], range(2))
        state = saved(optimizer.state_dict())
        for names, moved in (("abce", False), ("wxyz", False), ("bace", True)):
            other = RULES[rule]([*zip(names, parameters([(3, 2)] * 4), strict=True)], lr=0.1)
            before = values(other)
            if moved:
                with pytest.raises(ValueError, match="'a' at place 0, here it is at place 1"):
                    other.load_state_dict(state)
                assert values(other) == before
            else:
                other.load_state_dict(state)
                assert values(other)[1] == values(optimizer)[1]


def test_grad_scaler_equals_plain_gradients():
    """On CPU; a power of two as scale loses nothing. One step overflows and must not happen."""
    for rule in RULES:
        for form in ({}, {"fused": True}) if f"{rule}-fused" in CASES else ({},):
            scaled, plain = parameters(shapes_of(rule)[:2]), parameters(shapes_of(rule)[:2])
            optimizer = RULES[rule](scaled, lr=0.01, weight_decay=0.1, **form)
            other = RULES[rule](plain, lr=0.01, weight_decay=0.1, **form)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
            for step in range(5):
                give_grads(scaled, step, scale=scaler.get_scale())
                scaler.scale(torch.zeros(()))
                if step == 2:
                    scaled[0].grad[0, 0] = float("inf")
                else:
                    train(other, plain, [step])
                scaler.step(optimizer)
                scaler.update()
                assert values(optimizer) == values(other), (form, step)
            assert not {"grad_scale", "found_inf"} & set(vars(optimizer))


def test_a_fused_rule_under_grad_scaler_sees_true_gradients_where_it_must():
    for rule in ["Adam", "AdamWeightDecay", "SGD"]:
        for options in [{"lr": halved}, {"transforms": (ClipNorm(1.0),)}, {"nonfinite": "skip"}]:
            scaled, plain = parameters(shapes_of(rule)[:2]), parameters(shapes_of(rule)[:2])
            optimizer, other = (RULES[rule](p, **{"lr": 0.01, "fused": True, **options}) for p in (scaled, plain))
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step in range(4):
                give_grads(scaled, step, scale=scaler.get_scale())
                scaler.scale(torch.zeros(()))
                if step == 1:
                    scaled[1].grad[0] = float("nan")
                else:
                    train(other, plain, [step])
                scaler.step(optimizer)
                scaler.update()
                assert values(optimizer) == values(other), step


def test_one_group_without_the_fused_kernel_is_unscaled_too():
    scaled, plain = parameters(SHAPES[:2]), parameters(SHAPES[:2])
    groups = [[{"params": p[:1]}, {"params": p[1:], "fused": False, "nesterov": True}] for p in (scaled, plain)]
    optimizer, other = (RULES["Adam"](group, lr=0.01, fused=True) for group in groups)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    give_grads(scaled, 0, scale=1024.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    train(other, plain, [0])
    assert values(optimizer) == values(other)


def test_an_error_under_grad_scaler_leaves_no_scale_behind():
    params = parameters(SHAPES[:2])
    optimizer = RULES["Adam"](params, lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    give_grads(params, 0, scale=1024.0)
    scaler.scale(torch.zeros(()))
    optimizer.param_groups[0]["eps"] = "junk"
    with pytest.raises(TypeError, match="eps"):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))


COMPILED = ["Adam-fused", "SGD-fused", "LARS-default", "Muon", "ScheduleFreeAdamW"]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Converting a tensor with requires_grad")
def test_a_compiled_step_equals_the_plain_one(name, backend):
    torch._dynamo.reset()
    params, plain = parameters(shapes_of(name)[:2]), parameters(shapes_of(name)[:2])
    optimizer, other = CASES[name](params), CASES[name](plain)
    step = torch.compile(optimizer.step, backend=backend)
    for number in range(3):
        give_grads(params, number)
        step()
        train(other, plain, [number])
    # Traced, torch's Adam corrects the moments in tensors, not in Python's floats.
    for ours, theirs in zip(params, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


WIDE = {
    "masters": (torch.bfloat16, {"master_weights": True}),
    "clipped": (torch.float32, {"transforms": (Centralize(), ClipNorm(0.1))}),
    "checked": (torch.float32, {"nonfinite": "skip"}),
}


def test_a_step_that_cannot_be_traced_is_run_as_it_is():
    for rule in ["AdamW", "Momentum"]:
        for setting in WIDE:
            torch._dynamo.reset()
            dtype, options = WIDE[setting]
            params, plain = parameters(dtype=dtype), parameters(dtype=dtype)
            optimizer, other = (RULES[rule](held, lr=0.1, **options) for held in (params, plain))
            step = torch.compile(optimizer.step, backend="eager")
            for number in range(3):
                give_grads(params, number)
                step()
                train(other, plain, [number])
            assert values(optimizer) == values(other)


def test_a_scheduler_on_top_of_a_function_is_refused():
    for rule in SCHEDULED:
        params = parameters(shapes_of(rule))
        optimizer = RULES[rule](params, lr=halved)
        CosineAnnealingLR(optimizer, 5)
        give_grads(params, 0)
        before = values(optimizer)
        with pytest.raises(RuntimeError, match=r"scheduler is attached.*use one of the two.*ScheduleLR"):
            optimizer.step()
        assert values(optimizer) == before
