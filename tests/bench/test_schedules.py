"""What the schedule of a factory does to rates, and what it leaves of a recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchboost.bench.factory import made_by
from torchboost.bench.schedules import schedule_sets_rates, without_effect
from torchboost.cli.doctor import measure_step
from torchboost.config import RecipeSection
from torchboost.errors import FactoryError, IncompatibleError

LRS = torch.optim.lr_scheduler


def with_schedule(schedule: Any) -> Any:
    """A factory of a perceptron with a hidden matrix, and the number of its calls so far."""
    calls: list[int] = []

    def make(seed: int) -> Any:
        calls.append(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        parts = model, optimizer, F.cross_entropy, [(torch.ones(2, 4), torch.tensor([0, 1]))], None
        return (*parts, schedule) if schedule else parts[:4]

    return make, calls


def warm_up(optimizer: Any, steps: int) -> Any:
    """A schedule of the user that climbs to a rate in steps of its own."""

    class ToRate(LRS.LRScheduler):
        def get_lr(self) -> list[float]:
            return [0.1 * (self.last_epoch + 1) / steps for _ in self.optimizer.param_groups]

    return ToRate(optimizer)


def rates(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_a_schedule_that_writes_its_own_rates_is_seen():
    for schedule, own in (
        (None, False),
        (lambda o, n: LRS.CosineAnnealingLR(o, n), False),
        (lambda o, n: LRS.LambdaLR(o, lambda step: min(1.0, step / 2)), False),
        (lambda o, n: LRS.OneCycleLR(o, max_lr=0.1, total_steps=n), True),
        (lambda o, n: LRS.OneCycleLR(o, max_lr=rates(o), total_steps=n), False),
        (lambda o, n: LRS.CyclicLR(o, base_lr=0.01, max_lr=0.1), True),
        (warm_up, True),
        (lambda o, n: LRS.SequentialLR(o, [LRS.ConstantLR(o), LRS.ExponentialLR(o, 0.9)], [2]), False),
    ):
        assert schedule_sets_rates(with_schedule(schedule)[0], 50) is own


def test_what_cannot_be_stepped_after_every_update_is_refused_before_any_training():
    make, _ = with_schedule(lambda o, n: LRS.ReduceLROnPlateau(o))
    with pytest.raises(FactoryError, match="ReduceLROnPlateau, which decides by a metric"):
        schedule_sets_rates(make, 50)

    def searching(seed: int) -> Any:
        model, _, *others = make(seed)
        return model, torch.optim.LBFGS(model.parameters()), *others

    with pytest.raises(FactoryError, match="LBFGS, whose step needs a closure"):
        schedule_sets_rates(searching, 50)
    with pytest.raises(FactoryError, match="LBFGS, whose step needs a closure"):
        measure_step(made_by(searching, 0), steps=1, device=torch.device("cpu"))


def test_what_a_schedule_leaves_of_a_recipe():
    for schedule, recipe, said in (
        (warm_up, {"rate": 0.5}, "recipe.rate=0.5 has no effect: the schedule writes rates of its own"),
        (warm_up, {"length": 0.5}, ""),
        (warm_up, {"optimizer": "schedule_free_adamw"}, ""),  # it is trained without the schedule
        (lambda o, n: LRS.CosineAnnealingLR(o, n), {"rate": 0.5}, ""),
        (lambda o, n: LRS.OneCycleLR(o, rates(o), n, cycle_momentum=False), {"optimizer": "muon", "rate": 0.5}, ""),
        (None, {"optimizer": "muon"}, ""),
    ):
        assert without_effect(with_schedule(schedule)[0], RecipeSection(**recipe), 50).startswith(said)
        assert said or without_effect(with_schedule(schedule)[0], RecipeSection(**recipe), 50) == ""
    for schedule, said in (
        (warm_up, "recipe.optimizer='muon': the schedule writes rates of its own"),
        (lambda o, n: LRS.OneCycleLR(o, rates(o), n), "the schedule raises .*cycle_momentum=False"),
        (lambda o, n: LRS.OneCycleLR(o, rates(o)[0], n, cycle_momentum=False), "gives all groups one rate"),
    ):
        with pytest.raises(IncompatibleError, match=said):
            without_effect(with_schedule(schedule)[0], RecipeSection(optimizer="muon"), 50)


def test_a_factory_is_called_only_for_a_recipe_that_a_schedule_may_spoil():
    make, calls = with_schedule(warm_up)
    without_effect(make, RecipeSection(length=0.5), 50)
    assert calls == []
