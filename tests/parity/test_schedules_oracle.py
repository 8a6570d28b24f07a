"""Schedules by the numbers of the reference: its classes, its list functions, and what its optimizers read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from torchboost.optim import (
    CosineDecay,
    ExponentialDecay,
    InverseDecay,
    NaturalExponentialDecay,
    PerEpoch,
    PiecewiseConstant,
    PolynomialDecay,
    Warmup,
    as_list,
)
from torchboost.optim.schedules import Schedule, resolve_lr

CLASSES = [
    "sched_exponential",
    "sched_natural_exp",
    "sched_inverse",
    "sched_exponential_stair",
    "sched_natural_exp_stair",
    "sched_inverse_stair",
    "sched_cosine",
    "sched_polynomial",
    "sched_polynomial_update",
    "sched_warmup",
]
FUNCTIONS = ["dyn_piecewise", *(name.replace("sched_", "dyn_") for name in CLASSES)]
FAMILIES = {"ExponentialDecay": "exponential", "NaturalExpDecay": "natural_exp", "InverseDecay": "inverse"}


def schedule_of(kind: str, hyper: dict[str, Any], unit: str = "steps") -> Schedule:
    """Build a schedule from the reference's settings; ``unit`` is what its list functions end their names in."""
    decay = hyper.get(f"decay_{unit}")
    if kind.startswith(("exponential", "natural_exp", "inverse")):
        name = {"e": ExponentialDecay, "n": NaturalExponentialDecay, "i": InverseDecay}[kind[0]]
        # The reference does not divide the natural exponential by decay_steps, against its documentation.
        named = {"per_step": True} if name is NaturalExponentialDecay else {}
        staircase = hyper.get("is_stair", False)
        return name(
            hyper["learning_rate"], decay_rate=hyper["decay_rate"], decay_steps=decay, staircase=staircase, **named
        )
    if kind.startswith("cosine"):
        return CosineDecay(hyper["max_lr"], min_lr=hyper["min_lr"], decay_steps=decay)
    if kind.startswith("polynomial"):
        return PolynomialDecay(
            hyper["learning_rate"],
            end_lr=hyper["end_learning_rate"],
            decay_steps=decay,
            power=hyper["power"],
            cycle=hyper.get(f"update_decay_{unit}", False),
        )
    return Warmup(hyper["learning_rate"], steps=hyper[f"warmup_{unit}"])


def kind_of(cls: str) -> str:
    """Return the family of a reference class, such as ``CosineDecayLR``."""
    name = cls.removesuffix("LR")
    return FAMILIES.get(name, name.removesuffix("Decay").lower())


def check(got: list[float], wanted: np.ndarray, meta: dict[str, Any]) -> None:
    np.testing.assert_allclose(got, wanted.astype(np.float64), **meta["tolerance"])


@pytest.mark.parametrize("name", CLASSES)
def test_classes(oracle, name):
    meta, arrays = oracle[name]
    schedule = schedule_of(name.removeprefix("sched_"), meta["hyper"])
    check([schedule(step) for step in arrays["step"].tolist()], arrays["lr"], meta)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "dyn_piecewise"])
def test_list_functions(oracle, name):
    meta, arrays = oracle[name]
    hyper = meta["hyper"]
    schedule = schedule_of(name.removeprefix("dyn_"), hyper, "epoch")
    check(as_list(PerEpoch(schedule, steps_per_epoch=hyper["step_per_epoch"]), hyper["total_step"]), arrays["lr"], meta)


def test_piecewise_list(oracle):
    meta, arrays = oracle["dyn_piecewise"]
    *milestones, length = meta["hyper"]["milestone"]
    check(as_list(PiecewiseConstant(milestones, meta["hyper"]["learning_rates"]), length), arrays["lr"], meta)


@pytest.mark.parametrize("name", ["momentum_schedule", "momentum_groups_schedule"])
def test_what_an_optimizer_reads(oracle, name):
    meta, arrays = oracle[name]
    hyper = meta["hyper"]
    given = hyper.get("learning_rate_schedule") or hyper["groups"][0]["schedule"]
    rate = resolve_lr(schedule_of(kind_of(given["cls"]), given))
    assert rate is not None
    read = arrays["lr"] if arrays["lr"].ndim == 1 else arrays["lr"][:, 0]
    check([rate(step) for step in range(meta["steps"])], read, meta)
