from __future__ import annotations

import doctest
import io
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, SequentialLR

from tests.support.versions import COPIES_LAST_RATES
from torchboost.optim import learning_rates
from torchboost.optim.learning_rates import Listed, ScheduleLR, factor, resolve_lr
from torchboost.optim.schedules import Constant, CosineDecay, ExponentialDecay, Schedule, Warmup, as_list

WARM = Warmup(CosineDecay(0.2, decay_steps=8), steps=3)
STEEP = ExponentialDecay(0.1, decay_rate=0.5, decay_steps=2)


def optimizer_of(groups: int = 1, kind: Any = torch.optim.SGD, lr: Any = 1.0, **settings: Any) -> torch.optim.Optimizer:
    return kind([{"params": [nn.Parameter(torch.ones(3) + i)]} for i in range(groups)], lr=lr, **settings)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def train(optimizer: torch.optim.Optimizer, scheduler: Any, updates: range) -> None:
    for update in updates:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.cos(param.detach() * (update + 1))
        optimizer.step()
        scheduler.step()


def stored(state: Any) -> Any:
    """Save and load as a checkpoint is: only tensors and plain values pass."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("value", [0.1, 0, 1, np.float32(0.1), torch.tensor(0.1), torch.tensor(1), np.array(0.1)])
def test_a_number_stays_as_it_is(value):
    assert resolve_lr(value) is None


@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=20))
def test_a_list_gives_entry_t_at_update_t(entries):
    for given_as in (list, tuple, torch.tensor, np.array, Listed):
        rate = resolve_lr(given_as(entries))
        assert rate is not None
        assert as_list(rate, len(entries)) == entries
        with pytest.raises(IndexError, match=f"ended at step {len(entries) - 1}, but step {len(entries)} was requ"):
            rate(len(entries))


@pytest.mark.parametrize("result", [0.25, np.float32(0.25), torch.tensor(0.25), np.array(0.25)])
def test_a_function_is_called_with_the_step(result):
    rate = resolve_lr(lambda step: step * result)
    assert rate is not None
    assert (rate(3), type(rate(3))) == (0.75, float)
    assert resolve_lr(rate) is rate


def test_a_resolved_schedule_can_be_pickled():
    rate = resolve_lr(WARM)
    assert pickle.loads(pickle.dumps(rate)) == rate


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (math.nan, ValueError, "lr: found nan; give a finite number, at least 0"),
        (math.inf, ValueError, "lr: found inf"),
        (-1, ValueError, "lr: found -1"),
        (torch.tensor(-1.0), ValueError, "lr: found -1.0"),
        (True, TypeError, "lr: found True; give a number, a list or 1-d tensor"),
        ("0.1", TypeError, "lr: found '0.1'; give a number, a list"),
        (None, TypeError, "lr: found None; give a number, a list"),
        ({0: 0.1}, TypeError, r"lr: found \{0: 0.1\}; give a number, a list"),
        ([], ValueError, "lr: found an empty list; give one entry per update"),
        (torch.ones(0), ValueError, "lr: found an empty list"),
        (torch.ones(2, 2), ValueError, r"lr: found a tensor of shape \(2, 2\); give a 0-d tensor"),
        ([0.1, math.nan], ValueError, r"lr\[1\]: found nan"),
        ([0.1, "0.1"], TypeError, r"lr\[1\]: found '0.1'"),
        ([False], TypeError, r"lr\[0\]: found False"),
        (CosineDecay, TypeError, "lr: found <class.*such as Constant"),
    ],
)
def test_bad_learning_rates_are_refused(value, error, text):
    with pytest.raises(error, match=text):
        resolve_lr(value)


@pytest.mark.parametrize("result", [math.nan, -0.1, None, True, "0.1", torch.ones(2)], ids=repr)
def test_a_bad_result_names_the_step(result):
    rate = resolve_lr(lambda step: result, name="weight_decay")
    assert rate is not None
    with pytest.raises((TypeError, ValueError), match=r"weight_decay at step 4: found .*; give a finite number"):
        rate(4)


@pytest.mark.parametrize("rates", [[], [math.nan], ["0.1"], 0.1])
def test_a_bad_list_is_refused(rates):
    with pytest.raises((TypeError, ValueError), match="rates"):
        Listed(rates)


def test_one_schedule_sets_every_group_and_later_ones():
    optimizer = optimizer_of(2)
    scheduler = ScheduleLR(optimizer, WARM)
    train(optimizer, scheduler, range(2))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    train(optimizer, scheduler, range(2, 5))
    assert rates_of(optimizer) == scheduler.get_last_lr() == [WARM(5)] * 3


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_groups_may_have_their_own_schedules_and_a_tensor_is_filled_in_place(tensor):
    lr = torch.tensor(1.0, dtype=torch.float64) if tensor else 1.0
    optimizer = optimizer_of(2, torch.optim.AdamW, lr)
    for group in optimizer.param_groups:
        group["lr"] = lr.clone() if isinstance(lr, torch.Tensor) else lr
    held = [group["lr"] for group in optimizer.param_groups]
    scheduler = ScheduleLR(optimizer, [WARM, STEEP])
    for step in range(12):
        assert rates_of(optimizer) == [WARM(step), STEEP(step)]
        assert [float(rate) for rate in scheduler.get_last_lr()] == [WARM(step), STEEP(step)]
        train(optimizer, scheduler, range(step, step + 1))
    if tensor:
        assert all(group["lr"] is own for group, own in zip(optimizer.param_groups, held, strict=True))
        assert not COPIES_LAST_RATES or all(
            last is not own for last, own in zip(scheduler.get_last_lr(), held, strict=True)
        )


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("scheduler_last", [False, True])
@given(st.integers(0, 9))
def test_a_resumed_run_is_bit_identical(kind, tensor, scheduler_last, at):
    def build() -> tuple[torch.optim.Optimizer, ScheduleLR]:
        optimizer = optimizer_of(2, kind, torch.tensor(1.0) if tensor else 1.0, fused=True)
        return optimizer, ScheduleLR(optimizer, [WARM, WARM])

    whole, scheduler = build()
    train(whole, scheduler, range(10))
    first, scheduler = build()
    train(first, scheduler, range(at))
    saved = stored({"optimizer": first.state_dict(), "scheduler": scheduler.state_dict()})
    second, scheduler = build()
    for old, new in zip(first.param_groups, second.param_groups, strict=True):
        new["params"][0].data.copy_(old["params"][0].data)
    for part in ("optimizer", "scheduler") if scheduler_last else ("scheduler", "optimizer"):
        (second if part == "optimizer" else scheduler).load_state_dict(saved[part])
    train(second, scheduler, range(at, 10))
    assert rates_of(second) == rates_of(whole)
    for ours, theirs in zip(second.param_groups, whole.param_groups, strict=True):
        assert torch.equal(ours["params"][0], theirs["params"][0])


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_the_step_alone_is_enough_to_resume(tensor):
    loaded = optimizer_of(lr=torch.tensor(1.0, dtype=torch.float64) if tensor else 1.0)
    scheduler = ScheduleLR(loaded, WARM)
    scheduler.load_state_dict({"last_epoch": 5, "lr_lambdas": [None]})
    built = optimizer_of()
    assert ScheduleLR(built, WARM, last_epoch=4).last_epoch == scheduler.last_epoch == 5
    assert rates_of(loaded) == rates_of(built) == scheduler.get_last_lr() == [WARM(5)]
    assert "lr_lambdas" not in scheduler.state_dict()


def test_a_list_lasts_for_its_updates():
    optimizer = optimizer_of()
    scheduler = ScheduleLR(optimizer, Listed([0.3, 0.2]))
    train(optimizer, scheduler, range(2))
    assert rates_of(optimizer) == [0.2]
    with pytest.raises(IndexError, match="ended at step 1, but step 3 was requested"):
        scheduler.step()


def test_a_function_without_any_step_is_refused():
    def ended(step: int) -> float:
        raise IndexError("none at all")

    with pytest.raises(IndexError, match="none at all"):
        ScheduleLR(optimizer_of(), ended)


def test_it_works_under_torchs_own_schedulers():
    optimizer = optimizer_of()
    scheduler = SequentialLR(optimizer, [ScheduleLR(optimizer, STEEP), ScheduleLR(optimizer, WARM)], [3])
    seen = []
    for update in range(6):
        seen += rates_of(optimizer)
        train(optimizer, scheduler, range(update, update + 1))
    assert seen == [*as_list(STEEP, 3), *as_list(WARM, 3)]
    chained = ChainedScheduler([ScheduleLR(optimizer, STEEP)])
    train(optimizer, chained, range(1))
    assert rates_of(optimizer) == [STEEP(1)]


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: ScheduleLR(optimizer_of(), 0.1), TypeError, "schedule: found 0.1; give a function of the step"),
        (lambda: ScheduleLR(optimizer_of(), [0.1]), TypeError, r"schedule\[0\]: found 0.1; give .* or Listed"),
        (lambda: ScheduleLR(optimizer_of(), CosineDecay), TypeError, "schedule: found <class"),
        (lambda: ScheduleLR(optimizer_of(2), [WARM]), ValueError, "1 schedules and 2 param groups; give one"),
        (lambda: ScheduleLR(optimizer_of(), WARM, -2), ValueError, "last_epoch: found -2"),
        (lambda: ScheduleLR(optimizer_of(), lambda step: -1.0), ValueError, "schedule at step 0: found -1.0"),
        (lambda: ScheduleLR(nn.Linear(1, 1), WARM), TypeError, "not an Optimizer"),
        (
            lambda: ScheduleLR(optimizer_of(), WARM).load_state_dict({"step": 1}),
            ValueError,
            r"keys \['step'\]; it must",
        ),
        (lambda: ScheduleLR(optimizer_of(), WARM).load_state_dict({"last_epoch": -1}), ValueError, "found -1; give"),
    ],
)
def test_bad_schedulers_are_refused(build, error, text):
    with pytest.raises(error, match=text):
        build()


def test_factor_scales_the_rate_of_every_group_and_leaves_no_state():
    optimizer = optimizer_of(2)
    optimizer.param_groups[1]["lr"] = 0.5
    schedule: Schedule = Warmup(Constant(0.2), steps=4)
    scheduler = LambdaLR(optimizer, factor(schedule, base=0.2))
    train(optimizer, scheduler, range(2))
    assert rates_of(optimizer) == [0.5, 0.25]
    assert stored(scheduler.state_dict())["lr_lambdas"] == [None, None]


@pytest.mark.parametrize("schedule", [WARM, STEEP], ids=repr)
def test_a_schedule_may_be_a_lambda_of_torch(schedule):
    optimizer = optimizer_of()
    scheduler = LambdaLR(optimizer, schedule)
    train(optimizer, scheduler, range(4))
    assert rates_of(optimizer) == [schedule(4)]
    LambdaLR(optimizer_of(), schedule).load_state_dict(scheduler.state_dict())


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: factor(WARM), ValueError, "base: the schedule begins at 0; give the learning rate that counts as 1"),
        (lambda: factor(STEEP, base=0), ValueError, "base: found 0; give"),
        (lambda: factor(STEEP, base=math.nan), ValueError, "base: found nan"),
        (lambda: factor(0.1), TypeError, "schedule: found 0.1"),
    ],
)
def test_bad_factors_are_refused(build, error, text):
    with pytest.raises(error, match=text):
        build()


def test_examples():
    assert doctest.testmod(learning_rates).attempted
    assert doctest.testmod(learning_rates).failed == 0
