from __future__ import annotations

import inspect
import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.conftest import ROOT
from tests.support.optimizers import RULES, all_rules, parameters, shapes_of, train
from torchboost import optim
from torchboost.errors import IncompatibleError
from torchboost.optim import SGD, Adam
from torchboost.optim.rules.options import FLAGS, HERE, NOT_NEGATIVE, check_fused, check_options, miscomputes

COMPAT = ROOT / "docs" / "compat.md"

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lr": None}, TypeError, "lr: found None"),
    ({"lr": "0.1"}, TypeError, "lr: found '0.1'"),
    ({"lr": True}, TypeError, "lr: found True"),
    ({"lr": [0.1]}, TypeError, "lr: found"),
    ({"lr": -0.1}, ValueError, "lr: found -0.1"),
    ({"lr": math.nan}, ValueError, "lr: found nan"),
    ({"lr": Fraction(1, 2)}, TypeError, "give a float"),
    ({"lr": 10**400}, ValueError, "lr: found"),
    ({"lr": 1e31}, ValueError, "to 1e"),
    ({"lr": 2**63}, ValueError, "give a float"),
    ({"lr": torch.ones(2)}, ValueError, r"shape \(2,\)"),
    ({"lr": torch.ones(0)}, ValueError, r"shape \(0,\)"),
    ({"lr": torch.tensor(-1.0)}, ValueError, "lr: found -1.0"),
    ({"lr": torch.tensor(1j)}, TypeError, "lr: found 1j"),
    ({"lr": torch.tensor(True)}, TypeError, "lr: found True"),
    ({"lr": torch.tensor(0.1), "foreach": True, "capturable": False}, ValueError, "capturable=True only"),
    ({"eps": torch.tensor(0.1)}, TypeError, "eps: found a tensor"),
    ({"betas": 0.9}, TypeError, "betas: found 0.9"),
    ({"betas": (0.9,)}, TypeError, "betas"),
    ({"betas": (0.9, 1.0)}, ValueError, "below 1"),
    ({"betas": (0.9, math.nan)}, ValueError, "below 1"),
    ({"betas": (0.9, "x")}, ValueError, "below 1"),
    ({"betas": (0.9, Fraction(1, 2))}, ValueError, "below 1"),
    ({"betas": (0.9, torch.tensor(0.5))}, ValueError, "a number and a tensor"),
    ({"betas": (torch.tensor(0.9), torch.ones(2))}, ValueError, "one element"),
    ({"betas": (torch.tensor(1.9), torch.tensor(0.5))}, ValueError, "below 1"),
    ({"betas": (torch.tensor(0.9),) * 2, "foreach": True, "capturable": False}, ValueError, "betas: found a tensor"),
    ({"dampening": math.inf}, ValueError, "dampening: found inf"),
    ({"dampening": "x"}, ValueError, "dampening: found 'x'"),
    ({"foreach": 1}, TypeError, "foreach: found 1"),
    ({"fused": "yes"}, TypeError, "fused: found 'yes'"),
    ({"foreach": True, "fused": True}, ValueError, "foreach and fused exclude each other"),
    ({"nesterov": True, "momentum": 0.0, "dampening": 0.0}, ValueError, "nesterov: needs"),
    ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, ValueError, "nesterov: needs"),
    ({"differentiable": True}, ValueError, "differentiable: found True"),
    ({"updates": -1}, ValueError, "updates: found -1"),
    ({"updates": 1.5}, TypeError, "updates: found 1.5"),
    ({"updates": torch.tensor(True)}, TypeError, "updates: found"),
]


def test_senseless_options_are_refused():
    for options, error, text in BAD:
        with pytest.raises(error, match=text):
            check_options(options)


OUT_OF_RANGE: dict[str, list[tuple[str, object]]] = {
    "RMSProp": [("alpha", 1.0), ("alpha", -0.1), ("alpha", "x"), ("eps", 0.0), ("eps", math.nan), ("centered", 1)],
    "FTRL": [
        ("lr", 1e-200),
        ("lr_power", 0.5),
        ("lr_power", -64),
        ("lr_power", math.nan),
        ("lr_power", "x"),
        ("l1", -1),
        ("l2", None),
        ("initial_accumulator_value", 0),
        ("initial_accumulator_value", "x"),
    ],
    "Lamb": [("max_ratio", bad) for bad in (-1.0, "x", None, math.nan)],
}


def test_numbers_out_of_the_range_of_a_rule_are_named():
    for rule, cases in OUT_OF_RANGE.items():
        for name, bad in cases:
            with pytest.raises(TypeError if bad in ("x", None) or name == "centered" else ValueError, match=name):
                getattr(optim, rule)(parameters(shapes_of(rule)), **{name: bad})


def test_every_number_and_flag_is_checked():
    for name in NOT_NEGATIVE:
        for bad in (None, "x", True):
            with pytest.raises(TypeError, match=f"{name}: found"):
                check_options({name: bad})
        for bad in (-1, math.inf, -math.inf):
            with pytest.raises(ValueError, match=f"{name}: found"):
                check_options({name: bad})
    for name in FLAGS:
        for bad in (None, 1, 0, "yes"):
            with pytest.raises(TypeError, match=f"{name}: found"):
                check_options({name: bad})


def test_fused_wants_real_parameters_where_there_is_a_kernel():
    check_fused(torch.ones(2), {"fused": True}, torch.optim.SGD)
    check_fused(torch.ones(2, dtype=torch.complex64), {"fused": None}, torch.optim.SGD)
    with pytest.raises(IncompatibleError, match="floating-point parameters"):
        check_fused(torch.ones(2, dtype=torch.complex64), {"fused": True}, torch.optim.SGD)
    with pytest.raises(IncompatibleError, match="on meta"):
        check_fused(torch.ones(2, device="meta"), {"fused": True}, torch.optim.SGD)


def test_numpy_numbers_work_in_an_update():
    for rule in RULES:
        taken = {"lr", "weight_decay", "eps", "momentum", "max_ratio", "l1", "l2", "alpha", "dampening"}
        for kind in (np.float32, np.float64, np.int64):
            params = parameters(shapes_of(rule))
            optimizer = RULES[rule](params)
            for group in optimizer.param_groups:
                chosen = taken & set(group) - ({"momentum"} if rule == "ScheduleFreeSGD" else set())
                group |= {key: kind(key in ("lr", "eps", "max_ratio")) for key in chosen}
            train(optimizer, params, range(2))
            assert all(param.isfinite().all() for param in params)


def test_a_name_of_mindspore_is_refused_with_ours():
    for rule in RULES:
        params = list(nn.Linear(2, 2).parameters())
        for name, ours in HERE.items():
            with pytest.raises(TypeError, match=f"{rule} takes no {name!r}") as raised:
                RULES[rule](params, **{name: 1})
            assert ours in str(raised.value)
            with pytest.raises(TypeError) as raised:
                RULES[rule]([{"params": params, name: 1}])
            assert ours in str(raised.value)


def test_the_migration_page_has_all_names():
    page = COMPAT.read_text(encoding="utf-8")
    first = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert [name for name in HERE if f"`{name}`" not in first] == []


def test_signatures_are_explicit_and_annotated():
    for rule in all_rules():
        arguments = inspect.signature(rule).parameters.values()
        assert all(a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY) for a in arguments), rule
        assert all(a.annotation is not a.empty for a in arguments), rule
        assert [a.name for a in arguments if a.default is a.empty] == ["params"], rule


def test_other_names_get_the_nearest_one_and_a_key_of_the_users_own_stays():
    params = list(nn.Linear(2, 2).parameters())
    with pytest.raises(TypeError, match="takes no 'weight_dekay'; did you mean 'weight_decay'"):
        Adam(params, weight_dekay=0.1)
    with pytest.raises(TypeError, match="takes no 'zzz'; it takes params, lr, betas"):
        Adam(params, zzz=0.1)
    assert SGD([{"params": params, "my_name": "head"}]).param_groups[0]["my_name"] == "head"


def test_a_subclass_with_arguments_of_its_own_is_left_alone():
    class Decayed(SGD):
        def __init__(self, params: Any, decay: float, **options: Any) -> None:
            super().__init__(params, lr=decay, **options)

    assert Decayed([torch.zeros(1, requires_grad=True)], decay=0.5).param_groups[0]["lr"] == 0.5
    with pytest.raises(TypeError, match="takes no 'learning_rate'"):
        Decayed([torch.zeros(1, requires_grad=True)], decay=0.5, learning_rate=1.0)


# Fused kernels that compute something else are found, and no optimizer is given to them.

CPU = torch.device("cpu")
KINDS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]


def test_kernels_of_full_precision_are_right():
    for kind, dtype in itertools.product(KINDS, [torch.float32, torch.float64]):
        assert not miscomputes(kind, dtype, CPU)


def test_the_verdict_is_that_of_a_step_in_double_precision():
    for kind, dtype in itertools.product(KINDS, [torch.bfloat16, torch.float16]):
        generator = torch.Generator().manual_seed(0)
        weights, gradient = torch.randn(2, 200, generator=generator, dtype=torch.float64).to(dtype)
        low, high = weights.clone().requires_grad_(), weights.double().requires_grad_()
        for parameter, fused in ((low, True), (high, False)):
            optimizer = kind([parameter], lr=0.5, fused=fused)
            parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
        far = (low.double() - high).abs().max() > 0.1
        assert miscomputes(kind, dtype, CPU) == far


def test_a_kernel_that_is_wrong_is_found_in_inference_mode_too_and_no_numbers_are_drawn():
    class Wrong(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if self.param_groups[0]["fused"]:
                self.param_groups[0]["params"][0].data[8:16] += 1

    state = torch.get_rng_state()
    with torch.inference_mode():
        assert miscomputes(Wrong, torch.float32, CPU)
    assert torch.equal(state, torch.get_rng_state())
    assert not miscomputes(torch.optim.SGD, torch.float8_e4m3fn, CPU)  # which cannot be tried
