"""Optimizers by name: what is built, with which rate, and what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from tests.support.models import cnn, mlp
from torchboost.errors import NoEffectWarning
from torchboost.optim import MixedOptimizer, ScheduleFreeAdamW, named_optimizer


def test_muon_takes_one_rate_for_all_groups():
    model = cnn()
    optimizer = named_optimizer("muon", model, 3e-3)
    assert isinstance(optimizer, MixedOptimizer)
    assert {group["rule"] for group in optimizer.param_groups} == {"muon", "adamw"}
    assert {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups} == {(3e-3, 0.01)}
    assert optimizer.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
    assert {param for group in optimizer.param_groups for param in group["params"]} == set(model.parameters())
    with pytest.warns(NoEffectWarning, match="no hidden matrix or filter in this Sequential, so AdamW trains all"):
        optimizer = named_optimizer("muon", torch.nn.Sequential(torch.nn.Linear(4, 2)))
    assert [group["rule"] for group in optimizer.param_groups] == ["adamw"]


def test_every_name_trains():
    for name in ("muon", "schedule_free_adamw"):
        torch.manual_seed(0)
        model = mlp()
        optimizer = named_optimizer(name, model, 0.01)
        x, y = torch.randn(64, model[0].in_features), torch.randint(0, 4, (64,))
        losses = []
        for _ in range(40):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0], name


def test_the_default_rate_is_torchs_and_what_is_refused():
    optimizer = named_optimizer("schedule_free_adamw", mlp())
    assert isinstance(optimizer, ScheduleFreeAdamW)
    assert optimizer.param_groups[0]["lr"] == torch.optim.AdamW(mlp().parameters()).param_groups[0]["lr"]
    with pytest.raises(ValueError, match=r"found the name 'mun'.*muon, schedule_free_adamw.*Did you mean 'muon'"):
        named_optimizer("mun", mlp())
    wrong: Any
    for wrong, error in ((0.0, ValueError), (-1.0, ValueError), ("fast", TypeError)):
        with pytest.raises(error, match="lr"):
            named_optimizer("muon", mlp(), wrong)


def test_an_evaluation_on_the_weights_of_training_warns_once():
    model = mlp()
    optimizer: Any = named_optimizer("schedule_free_adamw", model, 0.01)
    x = torch.randn(8, model[0].in_features)

    def evaluated(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.eval()(x)
        model.train()

    evaluated(model)  # nothing is trained yet
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.eval()
    evaluated(model)
    optimizer.train()
    model.eval()(x)  # with gradients: training with the norms at rest
    evaluated(copy.deepcopy(model))
    evaluated(pickle.loads(pickle.dumps(model)))
    with pytest.warns(UserWarning, match=r"weights of training.*optimizer.eval\(\)") as warned:
        evaluated(model)
    evaluated(model)
    assert len(warned) == 1
    assert warned[0].filename == __file__
