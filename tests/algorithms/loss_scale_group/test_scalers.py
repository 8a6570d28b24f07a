"""The rule of a scale, and fixed, dynamic and grouped loss scales in loops, with overflows put in by hand."""

from __future__ import annotations

import copy
import io
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tests.support.models import batch_for, mlp
from torchboost import (
    DynamicLossScale,
    FixedLossScale,
    GroupGradScaler,
    GroupLossScaleManager,
    ScaleRule,
    Target,
    TrainStep,
    optim,
)
from torchboost.algorithms.grad_accumulation import Accumulator
from torchboost.algorithms.loss_scale_group.scalers import MovingScale
from torchboost.errors import IncompatibleError
from torchboost.optim import Centralize, ClipNorm, GradientPipeline

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "ours": lambda p: optim.Adam(p, lr=1e-2),
    "ours with a pipeline": lambda p: optim.Adam(p, lr=1e-2, transforms=(Centralize(), ClipNorm(0.1))),
}


def frozen(*objects) -> bytes:
    buffer = io.BytesIO()
    torch.save([o.state_dict() for o in objects], buffer)
    return buffer.getvalue()


def batch(seed: int, size: int = 6):
    return batch_for(mlp(), torch.Generator().manual_seed(seed), size)


def setup(name: str = "sgd", scaler=None, window: int = 0):
    torch.manual_seed(0)
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    target = Target(model, optimizer, scaler, Accumulator(window, model) if window else None)
    poison = {"value": 1.0}
    step = TrainStep(target, lambda x, y: F.cross_entropy(model(x), y) * poison["value"])
    return model, optimizer, step, poison


def test_an_overflow_changes_nothing_but_the_scale():
    for name, value in [*zip(OPTIMIZERS, [math.inf, math.nan, -math.inf, math.nan], strict=True)]:
        scaler = DynamicLossScale(1024.0, window=2)
        model, optimizer, step, poison = setup(name, scaler)
        for number in range(7):
            poison["value"] = value if number in (0, 3, 4) else 1.0
            before, scale = frozen(model, optimizer), scaler.get_scale()
            out = step(*batch(number))
            assert bool(out.overflow) == (number in (0, 3, 4)) == (not step.updated)
            assert (frozen(model, optimizer) == before) == bool(out.overflow)
            assert float(out.loss_scale) == (scale / 2 if out.overflow else scale * (2 if number in (2, 6) else 1))


def test_without_overflow_the_weights_are_those_without_a_scale():
    for name in OPTIMIZERS:
        plain, optimizer, plain_step, _ = setup(name)
        scaled, other, step, _ = setup(name, DynamicLossScale(2.0**16, window=2))
        if name == "adamw fused":  # clipping sees true gradients
            for each in (optimizer, other):
                GradientPipeline(Centralize(), ClipNorm(0.05)).attach(each)
        for number in range(5):
            plain_step(*batch(number))
            step(*batch(number))
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True))


def test_one_micro_batch_with_overflow_skips_the_window_and_the_next_is_normal():
    scaler = DynamicLossScale(1024.0)
    model, optimizer, step, poison = setup("sgd", scaler, window=3)
    clean, _, clean_step, _ = setup("sgd", None, window=3)
    for number in range(6):
        poison["value"] = math.inf if number == 1 else 1.0
        before = frozen(model, optimizer)
        out = step(*batch(number))
        if number == 2:
            assert out.overflow
            assert frozen(model, optimizer) == before
    for number in range(3, 6):
        clean_step(*batch(number))
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), clean.parameters(), strict=True))


def test_resume_in_a_growth_window_and_in_a_window_of_accumulation_is_bit_identical():
    def start():
        return setup("sgd", DynamicLossScale(1024.0, window=3), window=2)

    model, optimizer, step, poison = start()
    for number in range(7):
        poison["value"] = math.nan if number == 2 else 1.0
        step(*batch(number))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.state_dict()))
    again, again_optimizer, again_step, again_poison = start()
    again.load_state_dict(saved[0])
    again_optimizer.load_state_dict(saved[1])
    again_step.load_state_dict(saved[2])
    for number in range(7, 16):
        poison["value"] = again_poison["value"] = math.inf if number in (9, 12) else 1.0
        assert step(*batch(number))[1:] == again_step(*batch(number))[1:]
    assert frozen(model, optimizer) == frozen(again, again_optimizer)
    assert step.state_dict()["scaler"] == again_step.state_dict()["scaler"]


def test_two_optimizers_share_one_scale_and_only_the_bad_one_is_skipped():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    before = frozen(first), frozen(second)
    scaler = DynamicLossScale(4.0)
    x = torch.ones(1, 2)
    scaled = scaler.scale([first(x).sum() * math.inf, second(x).sum()])
    (scaled[0] + scaled[1]).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert (frozen(first) == before[0], frozen(second) == before[1]) == (True, False)
    assert scaler.get_scale() == 2.0
    assert scaler.overflowed


def test_the_first_param_group_may_be_empty():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": []}, {"params": [weight]}], lr=1.0)
    scaler = DynamicLossScale(4.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(weight, torch.zeros(2))


def test_a_fixed_scale_set_inside_a_window_waits_for_the_next():
    scaler = FixedLossScale(32.0)
    plain, _, plain_step, _ = setup("sgd", None, window=2)
    model, _, step, _ = setup("sgd", scaler, window=2)
    for number in range(4):
        plain_step(*batch(number))
        step(*batch(number))
        scaler.set(1024.0)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_the_order_of_calls_is_checked():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = DynamicLossScale()
    with pytest.raises(RuntimeError, match="before scale"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"update\(\) before"):
        scaler.update()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="call it once"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="call it once"):
        scaler.step(optimizer)
    scaler.update()
    with pytest.raises(TypeError, match="optimizer must be"):
        scaler.unscale_(model)  # pyright: ignore[reportArgumentType]


def test_a_closure_is_refused():
    model = nn.Linear(2, 2)
    scaler = DynamicLossScale()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(IncompatibleError, match=r"DynamicLossScale\.step was given a closure"):
        scaler.step(torch.optim.LBFGS(model.parameters()), lambda: 0.0)


def test_a_checkpoint_of_another_scaler_is_refused_unchanged():
    scaler = DynamicLossScale(64.0)
    with pytest.raises(ValueError, match="load it into the kind of scaler that saved it"):
        scaler.load_state_dict(FixedLossScale(2.0).state_dict())
    assert scaler.get_scale() == 64.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("state", value) for value in ([math.nan, 0], [0.0, 0], ["64", 0], [64.0, None], [64.0, -1], None)),
        *(("alarm", value) for value in ([0, 0], ["0", 0, 0], 3)),
        *(("in_use", value) for value in ([math.inf], [64.0, 64.0], ["64"], 64.0)),
    ],
)
def test_a_damaged_checkpoint_is_refused_unchanged(key: str, value: Any):
    scaler, group = DynamicLossScale(64.0), GroupGradScaler(mlp(), ["0", "2"])
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="the checkpoint of the scaler is damaged"):
        scaler.load_state_dict({**DynamicLossScale(2.0).state_dict(), key: value})
    assert scaler.state_dict() == before
    before, saved = group.state_dict(), copy.deepcopy(group.state_dict())
    if key == "in_use":
        saved["in_use"] = value
    else:
        saved["states" if key == "state" else "alarms"][-1] = value
    saved["states"][0][0] = 2.0
    with pytest.raises(ValueError, match="the checkpoint of the scaler is damaged"):
        group.load_state_dict(saved)
    assert group.state_dict() == before


RULES = st.builds(
    dict,
    growth=st.sampled_from([1.0, 2.0, 4.0, 2 ** (1 / 1000)]),
    shrink=st.sampled_from([0.5, 0.25, 2**-0.5]),
    window=st.integers(1, 5),
    floor=st.sampled_from([2.0**-20, 1.0]),
    ceiling=st.sampled_from([2.0**16, 2.0**30]),
)


def reference(rule: dict, scale: float, script: list[bool]) -> list[float]:
    """The history of overflows looked at anew at each step, without any state but the scale."""
    scales = []
    for now in range(len(script)):
        if script[now]:
            scale = max(scale * rule["shrink"], rule["floor"])
        else:
            run = 0
            while run <= now and not script[now - run]:
                run += 1
            if run % rule["window"] == 0:
                scale = min(scale * rule["growth"], rule["ceiling"])
        scales.append(scale)
    return scales


@settings(max_examples=500)
@given(RULES, st.sampled_from([1.0, 1024.0, 2.0**16]), st.lists(st.booleans(), min_size=1, max_size=25))
def test_random_scripts_equal_the_reference_and_stay_within_bounds(options, scale, script):
    rule = ScaleRule(**options)
    moving, scales = MovingScale(rule, scale, "a scale"), []
    for overflow in script:
        moving.move(overflow)
        scales.append(moving.scale)
    assert scales == reference(options, scale, script)
    assert all(rule.floor <= s <= rule.ceiling for s in scales)


def test_settings_that_make_no_sense():
    for make, text in (
        (lambda: ScaleRule(growth=0.5), "give 1 or more"),
        (lambda: ScaleRule(shrink=1.0), "give less than 1"),
        (lambda: ScaleRule(shrink=0.0), "above 0"),
        (lambda: ScaleRule(window=0), "window: found 0; give an integer of 1 or more"),
        (lambda: ScaleRule(floor=8.0, ceiling=4.0), "the floor must not be above the ceiling"),
        (lambda: ScaleRule(ceiling=2.0**101), r"between 2\*\*-100 and 2\*\*100"),
        (lambda: DynamicLossScale(factor=1.0), "factor: found 1.0"),
        (lambda: DynamicLossScale(0.5), r"init_scale: found 0.5; allowed are 1.0 \(floor\)"),
        (lambda: FixedLossScale(0.0), "scale: found 0.0"),
        (lambda: FixedLossScale(math.inf), "scale: found inf"),
        (lambda: FixedLossScale(2.0**101), r"allowed are 2\*\*-100 to 2\*\*100"),
        (lambda: GroupLossScaleManager([1.0], [params(1), params(1)]), "1 scales for 2"),
        (lambda: GroupLossScaleManager([1.0, -1.0], [params(1), params(1)]), "above 0"),
    ):
        with pytest.raises(ValueError, match=text):
            make()
    with pytest.raises(TypeError, match="init_scale"):
        DynamicLossScale("8")  # pyright: ignore[reportArgumentType]


def outcomes(scaler: DynamicLossScale, optimizer: torch.optim.Optimizer, overflows: list[bool]) -> list[str]:
    """Return the warnings of updates that overflow or do not."""
    (param,) = optimizer.param_groups[0]["params"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for overflow in overflows:
            scaler.scale(torch.ones(()))
            param.grad = torch.full((1,), math.inf if overflow else 1.0)
            scaler.step(optimizer)
            scaler.update()
    return [str(warning.message) for warning in caught]


def test_the_alarm_warns_once_while_the_scale_collapses_and_again_after_it_recovered():
    optimizer = torch.optim.SGD(params(1), lr=0.0)
    scaler, other = DynamicLossScale(2.0**16, window=1), DynamicLossScale(2.0**16, window=1)
    (text,) = outcomes(scaler, optimizer, [True] * 11)
    assert text.startswith("the loss scale fell from 65536 to 256 (floor 1): 8 overflows in a row, 8 in all")
    other.load_state_dict(scaler.state_dict())
    for each in (scaler, other):
        (again,) = outcomes(each, optimizer, [False] * 5 + [True] * 3)
        assert "3 overflows in a row, 14 in all" in again
    assert not outcomes(DynamicLossScale(2.0**16, window=1), optimizer, [True, False] * 50), "now and then is no alarm"


def params(count: int, size: int = 1) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for _ in range(count)]


def with_gradient(gradient: torch.Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.zeros_like(gradient))
    param.grad = gradient
    return param


def unscaled(scale: float, *trained: nn.Parameter) -> bool:
    """Unscale the gradients; return whether one is not finite."""
    scaler = FixedLossScale(scale)
    optimizer = torch.optim.SGD(trained, lr=0.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.overflowed


def test_gradients_of_every_kind_are_divided_and_looked_at():
    plain, lazy = with_gradient(torch.tensor([8 + 4j])), with_gradient(torch.tensor([4 + 2j]))
    lazy.grad = torch.tensor([4 + 2j]).conj()
    half = with_gradient(torch.tensor([2.0], dtype=torch.bfloat16))
    assert not unscaled(2.0, plain, lazy, half, nn.Parameter(torch.zeros(2)))
    assert [p.grad.tolist() for p in (plain, lazy, half)] == [[4 + 2j], [2 - 1j], [1.0]]
    table = nn.Embedding(4, 2, sparse=True)
    (table(torch.tensor([1, 1])).sum() * 8.0).backward()
    assert not unscaled(8.0, table.weight)
    assert table.weight.grad.to_dense()[1].tolist() == [2.0, 2.0]
    for value in (math.inf, -math.inf, math.nan, complex(1.0, math.nan)):
        assert unscaled(1.0, with_gradient(torch.tensor([1.0, value])))
    refused = [with_gradient(torch.tensor([4.0])), with_gradient(torch.tensor([4.0], dtype=torch.float16))]
    with pytest.raises(IncompatibleError, match=r"shape \(1,\) has its gradient in float16.*under torch.autocast"):
        unscaled(2.0, *refused)
    assert refused[0].grad.tolist() == [4.0], "nothing was divided"


def play(manager: GroupLossScaleManager, optimizer: torch.optim.Optimizer, values: list[float]) -> None:
    manager.scaler.scale(torch.ones(()))
    for param, value in zip(optimizer.param_groups[0]["params"], values, strict=True):
        param.grad = torch.full((2,), value)
    manager.scaler.step(optimizer)
    manager.scaler.update()


def test_the_group_that_overflows_shrinks_and_the_others_grow():
    a, b = params(2, 2)
    optimizer = torch.optim.SGD([a, b], lr=1.0)
    manager = GroupLossScaleManager(2.0**10, [[a], [b]])
    play(manager, optimizer, [1024.0, math.inf])
    assert [p.tolist() for p in (a, b)] == [[1.0, 1.0]] * 2
    one, two = manager.scaler.report
    assert (one.scale, two.scale) == pytest.approx((2.0**10 * 2 ** (1 / 1000), 2.0**9.5))
    assert (one.overflows, two.overflows, two.in_a_row) == (0, 1, 1)
    assert manager.scaler.get_scale() == two.scale
    assert manager.scaler.overflowed
    play(manager, optimizer, [one.scale, two.scale])
    assert torch.stack([a, b]).abs().max() < 1e-6
    assert not manager.scaler.overflowed


def test_a_checkpoint_of_groups_goes_on_and_another_is_refused():
    a, b = params(2, 2)
    optimizer = torch.optim.SGD([a, b], lr=0.0)
    rule = ScaleRule(growth=2.0, shrink=0.5, window=3)
    manager, again = (GroupLossScaleManager(2.0**10, [[a], [b]], rule=rule) for _ in range(2))
    for values in ([1.0, 1.0], [1.0, math.nan], [1.0, 1.0]):
        play(manager, optimizer, values)
    manager.scaler.scale(torch.ones(()))
    again.scaler.load_state_dict(copy.deepcopy(manager.scaler.state_dict()))
    for each in (manager, again):
        play(each, optimizer, [1.0, 1.0])
        play(each, optimizer, [1.0, 1.0])
    assert manager.scaler.state_dict() == again.scaler.state_dict()
    other = GroupLossScaleManager(4.0, [[a]])
    with pytest.raises(ValueError, match=r"holds the groups \['ends', '0', '1'\], but this scaler has \['ends', '0'\]"):
        other.scaler.load_state_dict(manager.scaler.state_dict())
