"""A scheduler that was built for a longer run ends with the shorter one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from torchboost.optim import CosineDecay, ScheduleLR, Shortened

N = 60


def optimizer_of(groups: int = 2) -> torch.optim.Optimizer:
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(groups)]
    rates = (0.1, 0.03)
    return torch.optim.SGD([{"params": [p], "lr": r} for p, r in zip(params, rates, strict=False)], momentum=0.9)


def sequential(optimizer: torch.optim.Optimizer) -> LRScheduler:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    rest = lr_scheduler.CosineAnnealingLR(optimizer, N - 10)
    return lr_scheduler.SequentialLR(optimizer, [warm, rest], [10])


def chained(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10), lr_scheduler.ExponentialLR(optimizer, 0.95)]
    )


def of_transformers(name: str) -> Callable[[torch.optim.Optimizer], LRScheduler]:
    return partial(transformers.get_scheduler, name, num_warmup_steps=6, num_training_steps=N)


SCHEDULES: dict[str, Callable[[Any], LRScheduler]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 1 - n / N, lambda n: 0.9**n]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.05], total_steps=N + 1),
    "OneCycleLR of the length": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.05], total_steps=N),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, N),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 15),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [20, 45]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.97),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, N, 2.0),
    "ScheduleLR": lambda o: ScheduleLR(o, CosineDecay(0.1, decay_steps=N)),
    "cosine": of_transformers("cosine"),
    "linear": of_transformers("linear"),
    "constant_with_warmup": lambda o: transformers.get_scheduler("constant_with_warmup", o, num_warmup_steps=6),
}


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def whole(name: str) -> list[list[float]]:
    """The rates after every number of steps."""
    optimizer = optimizer_of()
    scheduler, found = SCHEDULES[name](optimizer), [rates(optimizer)]
    optimizer.step()
    for _ in range(N):
        try:
            scheduler.step()
        except ValueError:  # OneCycleLR has one rate per update, and none after the last one
            break
        found.append(rates(optimizer))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 7, 33, N])
def test_every_scheduler_reaches_its_end(name: str, steps: int):
    expected = whole(name)
    optimizer = optimizer_of()
    scheduler = Shortened(SCHEDULES[name](optimizer), steps=steps, total_steps=N)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(steps):
            assert rates(optimizer) == scheduler.get_last_lr() == expected[number * N // steps]
            optimizer.step()
            if number == steps - 1 and len(expected) == N:
                break
            scheduler.step()
    if len(expected) > N:
        assert rates(optimizer) == scheduler.get_last_lr() == expected[N]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resumed_run_has_the_same_rates(name: str):
    optimizer = optimizer_of()
    scheduler, found = Shortened(SCHEDULES[name](optimizer), steps=33, total_steps=N), []
    saved: Any = None
    for number in range(30):
        if number == 11:
            saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
        found.append(rates(optimizer))
        optimizer.step()
        scheduler.step()
    optimizer = optimizer_of()
    scheduler = Shortened(SCHEDULES[name](optimizer), steps=33, total_steps=N)
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    for number in range(11, 30):
        assert rates(optimizer) == found[number]
        optimizer.step()
        scheduler.step()


def test_torchs_warning_stays_for_a_step_that_comes_too_early():
    scheduler = Shortened(SCHEDULES["MultiStepLR"](optimizer_of()), steps=33, total_steps=N)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


def test_what_is_refused():
    optimizer = optimizer_of()
    plateau: Any = lr_scheduler.ReduceLROnPlateau(optimizer)
    named: Any = transformers.get_scheduler("reduce_lr_on_plateau", optimizer)
    wrong: Any
    for wrong in (plateau, named, None, optimizer, lambda: 0.1):
        with pytest.raises(TypeError, match="follows the number of updates"):
            Shortened(wrong, steps=3, total_steps=6)
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(TypeError, match="follows the number"):
        Shortened(Shortened(scheduler, steps=3, total_steps=6), steps=3, total_steps=6)  # pyright: ignore
    for steps, total, error in ((0, 6, ValueError), (7, 6, ValueError), (True, 6, TypeError), (3.0, 6, TypeError)):
        with pytest.raises(error, match="steps"):
            Shortened(scheduler, steps=steps, total_steps=total)  # pyright: ignore[reportArgumentType]
    optimizer.step()
    scheduler.step()
    with pytest.raises(ValueError, match="has made 1 steps"):
        Shortened(scheduler, steps=3, total_steps=6)


def test_a_state_of_another_length_is_refused():
    scheduler = Shortened(SCHEDULES["cosine"](optimizer_of()), steps=33, total_steps=N)
    other = Shortened(SCHEDULES["cosine"](optimizer_of()), steps=30, total_steps=N)
    before = scheduler.state_dict()
    for state in (other.state_dict(), scheduler.scheduler.state_dict(), {}):
        with pytest.raises(ValueError, match="shorten it as when the state was saved"):
            scheduler.load_state_dict(state)
    assert scheduler.state_dict() == before
