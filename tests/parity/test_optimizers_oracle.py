"""Every dense optimizer case of the reference: weights, state and learning rate after each update."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.parity.networks import parameters_of, single
from torchboost.optim import (
    FTRL,
    LARS,
    SGD,
    Adam,
    AdamWeightDecay,
    Centralize,
    CosineDecay,
    Decay,
    ExponentialDecay,
    Lamb,
    LazyAdam,
    Momentum,
    PolynomialDecay,
    RMSProp,
    Unscale,
)

ADAM = ["adam_basic", "adam_eps_placement", "adam_weight_decay", "adam_nesterov", "adam_amsgrad", "adam_loss_scale"]
ADAM += ["adam_lazy_dense", "adam_offload", "adam_offload_class", "adam_lr_list", "adam_groups_noorder"]
ADAM += ["lazyadam_dense", "adam_gc_loss_scale"]
DECOUPLED = [f"adamweightdecay_{kind}" for kind in ("basic", "eps", "groups", "dynamic_decay")]
DESCENT = ["sgd_plain", "sgd_momentum_dampening", "sgd_nesterov", "sgd_loss_scale"]
DESCENT += ["momentum_basic", "momentum_nesterov_derived", "momentum_dynamic_decay", "momentum_loss_scale"]
DESCENT += ["momentum_schedule", "momentum_groups", "momentum_groups_dynamic_lr", "momentum_groups_schedule"]
DESCENT += ["momentum_gc", "momentum_gc_gate_quirk"]
OTHERS = ["lars_momentum", "lars_clip", "lamb_derived", "rmsprop", "rmsprop_eps_derived", "rmsprop_centered", "ftrl"]
CASES = [*ADAM, *DECOUPLED, *DESCENT, *OTHERS]
PIPED = ["adam_weight_decay", "adam_loss_scale", "adam_groups_noorder", "lazyadam_dense", "adam_offload"]
PIPED += ["sgd_momentum_dampening", "sgd_loss_scale", "momentum_loss_scale", "momentum_groups", "rmsprop", "ftrl"]
STATES = {
    "m": "exp_avg",
    "v": "exp_avg_sq",
    "vhat": "max_exp_avg_sq",
    "moment": "momentum_buffer",
    "ms": "square_avg",
    "mg": "grad_avg",
    "mom": "momentum_buffer",
    "linear": "linear",
}
OPTIONS = {
    "eps": "eps",
    "epsilon": "eps",
    "momentum": "momentum",
    "dampening": "dampening",
    "nesterov": "nesterov",
    "use_nesterov": "nesterov",
    "use_amsgrad": "amsgrad",
    "centered": "centered",
    "decay": "alpha",
    "coefficient": "coefficient",
    "use_clip": "clip",
    "initial_accum": "initial_accumulator_value",
    "lr_power": "lr_power",
    "l1": "l1",
    "l2": "l2",
}
FORMS = [{}, {"foreach": False}, {"foreach": True}, {"fused": True}]


class Run(NamedTuple):
    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]
    params: list[nn.Parameter]
    optimizer: torch.optim.Optimizer


def schedule_of(hyper: dict[str, Any]) -> Any:
    kind = hyper["cls"]
    if kind == "ExponentialDecayLR":
        return ExponentialDecay(
            hyper["learning_rate"], decay_rate=hyper["decay_rate"], decay_steps=hyper["decay_steps"]
        )
    if kind == "CosineDecayLR":
        return CosineDecay(hyper["max_lr"], min_lr=hyper["min_lr"], decay_steps=hyper["decay_steps"])
    assert kind == "PolynomialDecayLR"
    end, power = hyper["end_learning_rate"], hyper["power"]
    return PolynomialDecay(hyper["learning_rate"], end_lr=end, decay_steps=hyper["decay_steps"], power=power)


def groups_of(meta: dict[str, Any], params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Groups by position; without any, names with beta or gamma are exempt from decay (not so in FTRL)."""
    hyper = meta["hyper"]
    decay = hyper.get("weight_decay", 0.0)
    if "weight_decay_schedule" in hyper:
        decay = schedule_of(hyper["weight_decay_schedule"])
    if "groups" not in hyper:
        names = [entry["name"] for entry in meta["params"]]
        groups = []
        for name, param in zip(names, params, strict=True):
            exempt = ("beta" in name or "gamma" in name) and meta["api"] != "nn.FTRL"
            group = {"params": [param], "weight_decay": 0.0 if exempt else decay}
            if "LARS" in meta["api"] and ("bias" in name or "LayerNorm" in name):
                group |= {"adapt": False, "weight_decay": 0.0}
            groups.append(group)
        return groups
    groups = []
    for given in hyper["groups"]:
        group = {"params": [params[i] for i in given["idx"]], "weight_decay": given.get("weight_decay", decay)}
        group["grad_centralization"] = given.get("grad_centralization", False)
        if "schedule" in given:
            group["lr"] = schedule_of(given["schedule"])
        elif "lr" in given:
            group["lr"] = single(given["lr"])
        groups.append(group)
    return groups


def build(oracle: Any, name: str, *, piped: bool = False, **form: Any) -> Run:
    """Set a rule up as in the case; ``piped`` decays by transforms in the reference's order."""
    meta, arrays = oracle[name]
    hyper, api = meta["hyper"], meta["api"]
    params = parameters_of(oracle[name])
    groups = groups_of(meta, params)
    rules = {
        "Adam": Adam, "AdamOffload": Adam, "LazyAdam": LazyAdam, "AdamWeightDecay": AdamWeightDecay, "SGD": SGD,
        "Momentum": Momentum, "LARS": LARS, "Lamb": Lamb, "RMSProp": RMSProp, "FTRL": FTRL,
    }  # fmt: skip
    rule = rules[api.removeprefix("nn.").split("(")[0]]
    options = {ours: single(hyper[key]) for key, ours in OPTIONS.items() if key in hyper}
    if "beta1" in hyper:
        options["betas"] = (single(hyper["beta1"]), single(hyper["beta2"]))
    if rule in (Adam, LazyAdam):
        options["eps_uncorrected"] = True
    if rule is Lamb:
        options["eps_in_root"] = True
    if rule is LARS:
        options["vectors"] = True
    lr = single(hyper["learning_rate"]) if "learning_rate" in hyper else schedule_of(hyper["learning_rate_schedule"])
    scale = hyper.get("loss_scale", 1.0)
    transforms: list[Any] = []
    if piped:
        for group in groups:
            group["coupled_weight_decay"], group["weight_decay"] = group["weight_decay"] * scale, 0.0
        transforms = [Decay(0.0), Centralize(flag="grad_centralization", multiple_of=16)]
    if scale != 1.0:
        transforms.append(Unscale(scale))
    return Run(meta, arrays, params, rule(groups, lr, transforms=transforms, **options, **form))


def close(got: Tensor, want: np.ndarray, meta: dict[str, Any]) -> None:
    wanted = torch.from_numpy(np.ascontiguousarray(want)).to(got.dtype)  # derived cases are in float64
    torch.testing.assert_close(got.detach(), wanted, **meta["tolerance"])


def lr_of(optimizer: torch.optim.Optimizer, param: Tensor) -> float:
    return next(float(g["lr"]) for g in optimizer.param_groups if any(p is param for p in g["params"]))


def check(run: Run) -> None:
    meta, arrays, params, optimizer = run
    states = STATES | ({"accum": "accumulator"} if meta["api"] == "nn.FTRL" else {"accum": "momentum_buffer"})
    if isinstance(optimizer, torch.optim.Adagrad):
        states["accum"] = "sum"
    for step in range(meta["steps"]):
        for i, param in enumerate(params):
            param.grad = torch.from_numpy(arrays[f"p{i}.grad"][step].copy())
        optimizer.step()
        for i, param in enumerate(params):
            close(param, arrays[f"p{i}.param"][step], meta)
            state = optimizer.state[param]
            compared = set()
            for theirs, ours in states.items():
                if f"p{i}.{theirs}" in arrays and ours in state:
                    close(state[ours], arrays[f"p{i}.{theirs}"][step], meta)
                    compared.add(ours)
            # Whatever the rule keeps was compared, but for the count, and SGD's sign of a first momentum step.
            assert set(state) - {"step"} == compared
            if "step" in state and "global_step" in arrays:
                assert state["step"] == arrays["global_step"][step]
            if f"p{i}.stat" in arrays:
                assert bool(arrays[f"p{i}.stat"][step].any()) is ("momentum_buffer" not in state)
            rates = arrays["lr"][step] if "lr" in arrays else np.float32(meta["hyper"]["learning_rate"])
            assert lr_of(optimizer, param) == pytest.approx(float(rates if rates.ndim == 0 else rates[i]), rel=1e-6)
        for group in optimizer.param_groups:
            assert group.get("updates", step + 1) == step + 1


def test_the_rule_and_its_own_decay(oracle):
    for name in [name for name in CASES if "_gc" not in name]:
        check(build(oracle, name))


def test_decay_centralisation_and_loss_scale_in_the_order_of_the_reference(oracle):
    for name in [*PIPED, *(name for name in CASES if "_gc" in name)]:
        check(build(oracle, name, piped=True))


def test_every_form_of_the_kernels(oracle):
    for name in [*DECOUPLED, *(name for name in DESCENT if "_gc" not in name)]:
        for form in FORMS[1:]:
            check(build(oracle, name, **form))


def test_adagrad_is_that_of_torch(oracle):
    """With eps=0 and an initial value torch has the rule: no class of our own."""
    for form in [{"foreach": False}, {"foreach": True}, {"fused": True}]:
        meta, arrays = oracle["adagrad"]
        hyper = meta["hyper"]
        params = parameters_of(oracle["adagrad"])
        options = {"initial_accumulator_value": single(hyper["accum"]), "eps": 0.0, **form}
        optimizer = torch.optim.Adagrad(groups_of(meta, params), single(hyper["learning_rate"]), **options)
        check(Run(meta, arrays, params, optimizer))


def test_a_tiny_learning_rate_keeps_its_digits(oracle):
    """The reference passes it through lr + 1 - 1 in float32 where another group has a list; we do not."""
    run = build(oracle, "momentum_groups_tiny_lr_quirk")
    wanted, theirs = run.meta["hyper"]["learning_rate"], run.arrays["lr"][:, 2]
    assert abs(theirs / wanted - 1).min() > 0.01
    for step in range(run.meta["steps"]):
        for i, param in enumerate(run.params):
            param.grad = torch.from_numpy(run.arrays[f"p{i}.grad"][step].copy())
        run.optimizer.step()
        for i, param in enumerate(run.params[:2]):
            close(param, run.arrays[f"p{i}.param"][step], run.meta)
            assert lr_of(run.optimizer, param) == pytest.approx(run.arrays["lr"][step, i], rel=1e-6)
        assert lr_of(run.optimizer, run.params[2]) == single(wanted)


def test_bugs_of_the_reference_are_not_copied(oracle):
    for name in ["momentum_nesterov_cpu_quirk", "ftrl_l1_quirk"]:
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            check(build(oracle, name))


NOT_COMPUTED = {"e2e_cnn_momentum", "sens_values", "dim_reduce_sens_quirk", "auto_boost_config"}
"""Whole runs whose parts are other cases, and switches that only configure MindSpore."""


def test_no_case_is_left_out(oracle):
    """A case is named in a file of this folder; the lists of schedules follow from their classes."""
    text = "".join(file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_*.py"))
    named = {*CASES, *(n for n in oracle.names() if f'"{n}"' in text or f'"{n.replace("dyn_", "sched_")}"' in text)}
    assert set(oracle.names()) == named | NOT_COMPUTED
