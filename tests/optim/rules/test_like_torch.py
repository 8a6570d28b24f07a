"""Rules that torch has too move as torch's to the bit, in every form, and read each other's files."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau

from tests.support.optimizers import FORMS, frozen, parameters, train
from torchboost.optim import SGD, Adam, AdamW, AdamWeightDecay
from torchboost.optim.rules.options import miscomputes

ADAM: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True, "weight_decay": 0.1},
    {"maximize": True, "weight_decay": 0.1, "betas": (0.5, 0.7), "eps": 1e-3},
]
MOMENTUM: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.9, "maximize": True, "weight_decay": 0.1},
]
CORRECTED = partial(AdamWeightDecay, bias_correction=True, eps=1e-8, weight_decay=0.01)
PAIRS: list[tuple[Any, Any, list[dict[str, Any]], list[str]]] = [
    (Adam, torch.optim.Adam, ADAM, list(FORMS)),
    (AdamW, torch.optim.AdamW, ADAM, list(FORMS)),
    (CORRECTED, torch.optim.AdamW, ADAM, list(FORMS)),
    (SGD, torch.optim.SGD, MOMENTUM, list(FORMS)),
]


def contents(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Weights and states, to the bit."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [{k: frozen(v) for k, v in optimizer.state[p].items() if v is not None} for p in params]
    return [[frozen(param) for param in params], states]


def every(*without: str) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    for ours, theirs, options, forms in PAIRS:
        for option in options:
            for form in forms:
                if form not in without:
                    yield ours, theirs, {**option, **FORMS[form]}


def step(optimizers: list[Any], params: list[list[Any]], number: int) -> None:
    for optimizer, own in zip(optimizers, params, strict=True):
        train(optimizer, own, [number])


def test_groups_schedulers_and_crossing_files():
    for ours, theirs, options in every():
        params = [parameters(), parameters()]
        pair = [
            make([{"params": p[:2]}, {"params": p[2:4], "lr": 0.02, "weight_decay": 0.3}], lr=0.01, **options)
            for make, p in zip((ours, theirs), params, strict=True)
        ]
        schedulers: list[Any] = [CosineAnnealingLR(optimizer, 10) for optimizer in pair]
        for number in range(8):
            if number == 2:
                for optimizer, own in zip(pair, params, strict=True):
                    optimizer.add_param_group({"params": own[4:], "lr": 0.005})
                schedulers = [ReduceLROnPlateau(optimizer, patience=0) for optimizer in pair]
            step(pair, params, number)
            for scheduler in schedulers:
                scheduler.step(*(() if number < 2 else (1.0,)))
            if number == 4:  # change sides
                files = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair]
                for optimizer, file in zip(pair, reversed(files), strict=True):
                    optimizer.load_state_dict(file)
            assert contents(pair[0]) == contents(pair[1]), (theirs, options, number)


def test_a_tensor_as_learning_rate():
    for ours, theirs, options in every("foreach"):  # which takes none, but for SGD
        params = [parameters(), parameters()]
        pair = [make(p, lr=torch.tensor(0.01), **options) for make, p in zip((ours, theirs), params, strict=True)]
        for number in range(4):
            step(pair, params, number)
            for optimizer in pair:
                optimizer.param_groups[0]["lr"].mul_(0.5)
        assert contents(pair[0]) == contents(pair[1]), (theirs, options)


def test_other_precisions_and_a_parameter_that_sits_out():
    for ours, theirs, options in every():
        for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.complex64):
            if options.get("fused") and (dtype.is_complex or miscomputes(theirs, dtype, torch.device("cpu"))):
                continue  # refused
            params = [parameters(dtype=dtype), parameters(dtype=dtype)]
            pair = [make(p, lr=0.01, **options) for make, p in zip((ours, theirs), params, strict=True)]
            for number in range(4):
                step(pair, [own[number == 2 :] for own in params], number)
                for own in params:
                    own[0].grad = None
            assert contents(pair[0]) == contents(pair[1]), (theirs, options, dtype)


def test_a_cycle_of_rates_and_momenta():
    """OneCycleLR writes betas and momentum too."""
    for ours, theirs, options in every():
        if not (theirs is torch.optim.Adam or options.get("momentum")):
            continue
        params = [parameters(), parameters()]
        pair = [make(p, lr=0.01, **options) for make, p in zip((ours, theirs), params, strict=True)]
        schedulers = [OneCycleLR(optimizer, 0.1, total_steps=10) for optimizer in pair]
        for number in range(6):
            step(pair, params, number)
            for scheduler in schedulers:
                scheduler.step()
        assert contents(pair[0]) == contents(pair[1]), (theirs, options)
        cycled = {key: pair[0].param_groups[0].get(key) for key in ("betas", "momentum")}
        assert cycled == {key: pair[1].param_groups[0].get(key) for key in cycled}
        assert cycled["momentum"] != options.get("momentum") or cycled["betas"] != options.get("betas")


def test_the_defaults_are_those_of_torch():
    for ours, theirs, _, _ in PAIRS:
        left, right = ours(parameters()).defaults, theirs(parameters()).defaults
        assert {key: left[key] for key in right if key in left} == {key: right[key] for key in right if key in left}
