"""A step that raises changes nothing; junk in any option is refused clearly; finite gradients give finite weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.optimizers import (
    CASES,
    RULES,
    SCHEDULED,
    frozen,
    give_grads,
    parameters,
    rate_for,
    shapes_of,
    train,
    values,
)
from tests.support.versions import needs_gradient_dtypes
from torchboost.optim.pipeline import Gradients
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.transforms import Centralize, ClipNorm, Decay

CLEAR = (TypeError, ValueError, RuntimeError)  # IncompatibleError is a RuntimeError
OPTIONS = (
    "lr", "betas", "eps", "weight_decay", "amsgrad", "nesterov", "decoupled_weight_decay", "bias_correction",
    "eps_uncorrected", "maximize", "foreach", "fused", "capturable", "master_weights", "momentum", "dampening",
    "max_ratio", "eps_in_root", "alpha", "centered", "lr_power", "l1", "l2", "initial_accumulator_value", "adapt",
    "updates", "differentiable",
)  # fmt: skip
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=3),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.lists(st.floats(), max_size=2),
    st.tuples(st.floats(), st.floats()),
    st.tuples(st.none(), st.text(max_size=2)),
    st.sampled_from(
        [
            10**400,
            -(10**400),
            Fraction(1, 3),
            object(),
            dict,
            {"a": 1},
            b"x",
            torch.tensor(math.nan),
            torch.tensor(-1.0),
            torch.tensor([0.1, 0.2]),
            torch.tensor([[0.1]]),
            torch.tensor(True),
            torch.tensor(1j),
            torch.ones(0),
            torch.ones(2, 2),
            (torch.tensor(0.9), 0.99),
            (torch.tensor(0.9), torch.tensor([0.9, 0.8])),
            lambda: 1.0,
            lambda step: "fast",
            lambda step: -1.0,
            math.sin,
        ]
    ),
)
# What comes of these is finite as long as the numbers are no larger than a float32 holds comfortably.
SENSIBLE = 1e3


def sensible(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(sensible(entry) for entry in value)
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and sensible(value.item())
    return not isinstance(value, (int, float)) or isinstance(value, bool) or 1e-6 <= abs(value) <= SENSIBLE


def attempt(change: Callable[[], Any]) -> bool:
    """Whether it went through; errors must be clear ones."""
    try:
        change()
    except (*CLEAR, IndexError) as error:
        if isinstance(error, IndexError) and "Give one entry per update" not in str(error):
            raise
        return False
    return True


def finite(optimizer: UpdateRule) -> bool:
    return all(bool(p.isfinite().all()) for group in optimizer.param_groups for p in group["params"])


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(rule=st.sampled_from(list(RULES)), option=st.sampled_from(OPTIONS), junk=JUNK)
def test_junk_at_construction(rule, option, junk):
    params = parameters(shapes_of(rule)[:3])
    before = [frozen(param) for param in params]
    built: list[UpdateRule] = []

    def build() -> None:
        built.append(RULES[rule]([{"params": params, option: junk}]))

    if attempt(build) and attempt(lambda: train(built[0], params, range(2))):
        assert finite(built[0]) or not sensible(junk)
    elif not built:
        assert [frozen(param) for param in params] == before


@pytest.mark.filterwarnings("ignore:.*rate of a group was changed by hand")  # which of the junk is a rate
@settings(max_examples=600, suppress_health_check=[HealthCheck.too_slow])
@given(
    rule=st.sampled_from(list(RULES)),
    option=st.sampled_from(OPTIONS),
    junk=JUNK,
    started=st.booleans(),
    added=st.booleans(),
)
def test_junk_in_a_group_that_is_added_or_written_to(rule, option, junk, started, added):
    params = parameters(shapes_of(rule)[:3])
    groups = [{"params": params[:1]}, *([] if added else [{"params": params[1:]}])]
    optimizer = RULES[rule](groups, lr=rate_for(rule, lambda step: 0.01))
    if started:
        train(optimizer, params[:1] if added else params, [0])
    if added:
        before = values(optimizer)
        if not attempt(lambda: optimizer.add_param_group({"params": params[1:], option: junk})):
            assert values(optimizer) == before
            return
    else:
        optimizer.param_groups[1][option] = junk
    give_grads(params, 1)
    before = values(optimizer)
    if attempt(optimizer.step):
        assert finite(optimizer) or not sensible(junk)
    else:
        assert values(optimizer) == before


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(
    rule=st.sampled_from(list(RULES)),
    lr=st.floats(1e-6, 1.0),
    decay=st.floats(0.0, 1.0),
    scale=st.sampled_from([0.0, 1e-30, 1e-10, 1e-3, 1.0, 1e3, 1e10, 1e15]),
    constant=st.booleans(),
)
def test_finite_gradients_give_finite_weights(rule, lr, decay, scale, constant):
    """Up to 1e15: the square of more is no float32, with torch's kernels as well."""
    params = parameters(shapes_of(rule)[:3])
    optimizer = RULES[rule](params, lr=lr, weight_decay=decay)
    for step in range(6):
        give_grads(params, 0 if constant else step, scale=scale)
        optimizer.step()
    assert finite(optimizer)


def test_any_shape_and_gradients_of_zero():
    for name in CASES:
        shapes = [(3,), (3, 1), (1,), (0,), (0, 2), (), (2, 1, 2), (1, 3, 2, 2)]
        if name.startswith("Muon"):
            shapes = [shape if len(shape) > 1 else (*shape, 2, 3) for shape in shapes]
        params = [nn.Parameter(make(shape)) for make in (torch.zeros, torch.ones) for shape in shapes]
        optimizer = CASES[name](params)
        for _ in range(3):
            for param in params:
                param.grad = torch.zeros_like(param)
            optimizer.step()
        assert finite(optimizer)
        assert not any(param.any() for param in params[: len(shapes)])


class Spoilt:
    """A transform that fails after it has worked."""

    scale_free = True

    def __call__(self, gradients: Gradients) -> None:
        gradients.grads[0].mul_(2)
        raise OSError("out of paper")


def gradient(param: nn.Parameter) -> Any:
    grad = param.grad
    return frozen(grad.to_dense()) if grad is not None and grad.is_sparse else frozen(grad)


def sparse_grad(params: list[nn.Parameter]) -> None:
    params[0].grad = torch.ones_like(params[0]).to_sparse()


def row_sparse_grad(params: list[nn.Parameter]) -> None:
    params[0].grad = torch.ones_like(params[0]).to_sparse(1)


def wide_grad(params: list[nn.Parameter]) -> None:
    params[0].grad = None
    params[0].grad_dtype = torch.float64
    params[0].grad = torch.ones_like(params[0], dtype=torch.float64)


def infinite_grad(params: list[nn.Parameter]) -> None:
    params[0].grad[0, 0] = math.inf


FAULTS: dict[str, tuple[dict[str, Any], Callable[[list[nn.Parameter]], None] | None, type[Exception]]] = {
    "sparse": ({"weight_decay": 0.1}, sparse_grad, RuntimeError),
    "sparse after transforms": ({"transforms": (Centralize(),), "weight_decay": 0.1}, row_sparse_grad, RuntimeError),
    "sparse at a transform": ({"transforms": (Decay(0.1),)}, sparse_grad, RuntimeError),
    "precision": ({}, wide_grad, RuntimeError),
    "nonfinite": ({"nonfinite": "raise"}, infinite_grad, FloatingPointError),
    "nonfinite after transforms": (
        {"nonfinite": "raise", "transforms": (Centralize(), ClipNorm(1.0))},
        infinite_grad,
        FloatingPointError,
    ),
    "late refusal": ({"transforms": (Centralize(), ClipNorm(1.0), Decay(0.1))}, row_sparse_grad, RuntimeError),
    "transform": ({"transforms": (Spoilt(),)}, None, OSError),
    "list": ({"lr": [0.1]}, None, IndexError),
    "function": ({"lr": lambda step: 0.1 if step < 1 else "late"}, None, TypeError),
    "decay": ({"weight_decay": lambda step: 0.1 if step < 1 else math.nan}, None, ValueError),
}


OWN_CHECKS = ("Adam", "SGD", "LazyAdam", "AdamOffload", "Muon", "LARS", "MixedOptimizer", "ScheduleFreeAdamW")
"""Rules that override a check or a part of the step; the others have the base class' own."""


@pytest.mark.parametrize(
    "fault",
    [pytest.param("precision", marks=needs_gradient_dtypes), *(fault for fault in FAULTS if fault != "precision")],
)
def test_a_step_that_raises_changes_nothing(fault):
    for rule in RULES if fault in ("sparse", "precision") else OWN_CHECKS:
        if fault in ("list", "function") and rule not in SCHEDULED:
            continue  # such a rate is refused at once
        for started in (True,) if fault in ("list", "function", "decay") else (False, True):
            raises_and_changes_nothing(rule, fault, started)


def raises_and_changes_nothing(rule: str, fault: str, started: bool) -> None:
    options, spoil, error = FAULTS[fault]
    if rule == "LazyAdam" and fault == "sparse after transforms":
        spoil = sparse_grad  # rows are what it is for; single entries are not
    params = parameters(shapes_of(rule))
    # The faulty gradient stands in the last group, behind others that could have been updated.
    options = {"lr": rate_for(rule, lambda step: 0.1 / (1 + step)), **options}
    first = (
        {"params": params[1:], "weight_decay": lambda step: 0.1 * step} if fault != "decay" else {"params": params[1:]}
    )
    optimizer = RULES[rule]([first, {"params": params[:1]}], **options)
    if started and fault != "transform":
        train(optimizer, params, [0])
    give_grads(params, 1)
    if spoil is not None:
        spoil(params)
    before, grads = values(optimizer), [gradient(param) for param in params]
    with pytest.raises(error):
        optimizer.step()
    assert values(optimizer) == before, (rule, started)
    assert [gradient(param) for param in params] == grads or fault == "transform"  # whose own fault it is
    assert len(optimizer.state) == sum(state is not None for state in before[1])


def test_nonfinite_skip_changes_nothing_and_goes_on():
    for rule in RULES:

        def schedule(step: int) -> float:
            return 0.1 / (1 + step)

        params, plain = parameters(shapes_of(rule)), parameters(shapes_of(rule))
        rate = rate_for(rule, schedule)
        optimizer, other = RULES[rule](params, lr=rate, nonfinite="skip"), RULES[rule](plain, lr=rate)
        for step, bad in enumerate([math.nan, 0.0, -math.inf, 0.0]):
            give_grads(params, step)
            if bad:
                params[0].grad[1, 1] = bad
                before = values(optimizer)
                optimizer.step()
                assert values(optimizer) == before
            else:
                optimizer.step()
                train(other, plain, [step])
                assert values(optimizer) == values(other)
        optimizer.zero_grad()
        optimizer.step()


def test_groups_behind_the_back():
    for rule in RULES:
        params = parameters(shapes_of(rule))
        optimizer = RULES[rule](params[:2], lr=0.1)
        give_grads(params, 0)
        before = [frozen(param) for param in params]
        optimizer.param_groups.append({"params": params[2:], "lr": 0.1})
        with pytest.raises(ValueError, match="add groups with add_param_group"):
            optimizer.step()
        optimizer.param_groups.pop()
        del optimizer.param_groups[0]["weight_decay"]
        with pytest.raises(ValueError, match="has no 'weight_decay'"):
            optimizer.step()
        assert [frozen(param) for param in params] == before


def test_groups_that_are_none():
    for rule in ["SGD", "LazyAdam", "MixedOptimizer"]:
        optimizer = RULES[rule](parameters(shapes_of(rule))[:1], lr=0.1)
        before = values(optimizer)
        for group in (None, 3, [1], {}, {"params": "w"}, {"params": [3]}, {"params": [("n", 3)]}):
            with pytest.raises((TypeError, ValueError)):
                optimizer.add_param_group(group)
            assert values(optimizer) == before
        leafless = parameters(shapes_of(rule))[1].detach().requires_grad_() * 2
        with pytest.raises(ValueError, match="non-leaf"):
            optimizer.add_param_group({"params": [leafless]})
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": optimizer.param_groups[0]["params"]})
        assert values(optimizer) == before
        train(optimizer, optimizer.param_groups[0]["params"], [0])
