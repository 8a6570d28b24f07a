"""torch's own table of optimizer inputs over our rules: bit for bit as torch, and errors where torch has errors."""

from __future__ import annotations

import copy
import sys
import types
import unittest
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.optimizers import FORMS, frozen, give_grads, parameters
from torchboost.errors import IncompatibleError
from torchboost.optim.rules.adam import Adam, AdamWeightDecay
from torchboost.optim.rules.options import miscomputes
from torchboost.optim.rules.sgd import SGD

PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "Adam": (Adam, torch.optim.Adam, {}),
    # AdamW decays by default, and its eps is another.
    "AdamW": (AdamWeightDecay, torch.optim.AdamW, {"bias_correction": True, "eps": 1e-8, "weight_decay": 1e-2}),
    "SGD": (SGD, torch.optim.SGD, {}),
}
NOT_OURS = {
    "Adadelta": "no such rule here",
    "Adafactor": "no such rule here",
    "Adagrad": "no such rule here: torch's own equals the reference",
    "Adamax": "no such rule here",
    "ASGD": "no such rule here",
    "LBFGS": "no such rule here",
    "Muon": "no such rule here",
    "NAdam": "no such rule here",
    "RAdam": "no such rule here",
    "RMSprop": "another rule: the mean square starts at 0, eps stands outside the root",
    "Rprop": "no such rule here",
    "SparseAdam": "for sparse gradients only",
}
EXCLUDED = {"differentiable=True": "the update is not part of the graph; refused with a ValueError (tested)"}
ERRORS_EXCLUDED = {"Tensor lr must be 1-element": "a tensor with several elements is a rate per update here"}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@pytest.fixture(scope="module")
def database() -> Any:
    """The table; its module needs a package for tests of text that nothing here uses, and closes torch's switches."""
    absent = "expecttest" not in sys.modules
    if absent:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_optimizers
    if absent:
        del sys.modules["expecttest"]
    vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True
    return common_optimizers


def inputs(database: Any, name: str) -> list[Any]:
    """Each entry in each form; the table's own helper leaves foreach out on machines without a GPU."""
    info = next(info for info in database.optim_db if info.optim_cls.__name__ == name)
    assert set(info.supported_impls) == {"foreach", "differentiable", "fused"}
    forms = [*FORMS.values(), {"differentiable": True}]
    return [
        database.OptimizerInput(None, {**entry.kwargs, **form}, entry.desc)
        for entry in info.optim_inputs_func("cpu")
        for form in forms
    ]


def test_the_table_of_rules_is_complete(database):
    assert {info.optim_cls.__name__ for info in database.optim_db} == {*PAIRS, *NOT_OURS}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_every_input_is_bit_identical_to_torch(database, name, dtype, record_property):
    ours, theirs, named = PAIRS[name]
    counts: Counter[str] = Counter()
    for entry in inputs(database, name):
        if entry.kwargs.get("differentiable"):
            with pytest.raises(ValueError, match="differentiable"):
                ours_from(ours, parameters(dtype=dtype), named | entry.kwargs)
            counts["excluded: differentiable=True"] += 1
            continue
        if dtype.is_complex and entry.kwargs.get("fused"):
            with pytest.raises(RuntimeError, match="floating"):
                theirs_step(theirs, parameters(dtype=dtype), entry.kwargs)
            with pytest.raises(RuntimeError, match="floating"):
                theirs_step(ours, parameters(dtype=dtype), ours_kwargs(named | entry.kwargs))
            counts["refused by both: fused with complex"] += 1
            continue
        if entry.kwargs.get("fused") and miscomputes(theirs, dtype, torch.device("cpu")):
            with pytest.raises(IncompatibleError, match=r"fused=True: torch's fused .* computes wrong steps"):
                theirs_step(ours, parameters(dtype=dtype), ours_kwargs(named | entry.kwargs))
            counts["refused: a kernel of torch that computes wrong steps"] += 1
            continue
        compare(ours, theirs, named, entry, dtype)
        counts["bit-identical"] += 1
    record_property("cases", dict(counts))
    configs = 9 if name == "SGD" else 5
    # loop, foreach, fused, and neither set; differentiable.
    complex_ = dtype.is_complex
    wrong = counts["refused: a kernel of torch that computes wrong steps"]
    assert counts["bit-identical"] == configs * (3 if complex_ or wrong else 4)
    assert wrong in (0, configs)
    assert counts["refused by both: fused with complex"] == (configs if complex_ else 0)
    assert counts["excluded: differentiable=True"] == configs
    assert len(EXCLUDED) == 1


def compare(ours: Any, theirs: Any, named: dict[str, Any], entry: Any, dtype: torch.dtype) -> None:
    mine, other = parameters(dtype=dtype), parameters(dtype=dtype)
    left = ours_from(ours, mine, named | copy.deepcopy(entry.kwargs))
    right = theirs(other, **copy.deepcopy(entry.kwargs))
    for step in range(5):
        give_grads(mine, step)
        give_grads(other, step)
        if step == 3:  # a parameter may sit out
            mine[1].grad = other[1].grad = None
        left.step()
        right.step()
        for a, b in zip(mine, other, strict=True):
            assert frozen(a) == frozen(b), (entry.desc, entry.kwargs, step)
            wanted = {key: frozen(value) for key, value in right.state[b].items() if value is not None}
            assert {key: frozen(value) for key, value in left.state[a].items()} == wanted, (entry.desc, entry.kwargs)


def ours_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """``differentiable`` is no argument of ours; it may only stand in a group."""
    return {key: value for key, value in kwargs.items() if key != "differentiable"}


def ours_from(rule: Any, params: list[nn.Parameter], kwargs: dict[str, Any]) -> Any:
    group: dict[str, Any] = {"params": params}
    if "differentiable" in kwargs:
        group["differentiable"] = kwargs["differentiable"]
    return rule([group], **ours_kwargs(kwargs))


def theirs_step(rule: Any, params: list[nn.Parameter], kwargs: dict[str, Any]) -> None:
    optimizer = rule(params, **kwargs)
    give_grads(params, 0)
    optimizer.step()


@pytest.mark.parametrize("name", PAIRS)
def test_every_error_of_torch_is_an_error(database, name, record_property):
    ours, _, named = PAIRS[name]
    info = next(info for info in database.optim_db if info.optim_cls.__name__ == name)
    entries = info.optim_error_inputs_func("cpu", torch.float32)
    counts: Counter[str] = Counter()
    for entry in entries:
        given = entry.optimizer_error_input
        params = parameters() if given.params is None else given.params
        if given.desc in ERRORS_EXCLUDED:
            ours(params, **named | given.kwargs)
            counts[f"excluded: {given.desc}"] += 1
        elif entry.error_type is UserWarning:
            with pytest.warns(UserWarning, match=entry.error_regex):
                ours(params, **named | given.kwargs)
            counts["warns"] += 1
        else:
            with pytest.raises((entry.error_type, TypeError, ValueError, RuntimeError)):
                ours(params, **named | given.kwargs)
            counts["raises"] += 1
    record_property("cases", dict(counts))
    excluded = {f"excluded: {name}": 1 for name in ERRORS_EXCLUDED}
    assert counts == {"raises": 5 if name == "SGD" else 10, "warns": 1, **excluded}
