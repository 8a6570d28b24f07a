"""Optimizers by name: what is built, with which rate, and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from tests.support.models import cnn, mlp
from torchboost.errors import NoEffectWarning
from torchboost.optim.named import NAMED, named_optimizer
from torchboost.optim.rules.mixed import MixedOptimizer
from torchboost.optim.rules.schedule_free import ScheduleFreeAdamW


def test_muon_takes_one_rate_for_all_groups():
    model = cnn()
    optimizer = named_optimizer("muon", model, 3e-3)
    assert isinstance(optimizer, MixedOptimizer)
    assert {group["rule"] for group in optimizer.param_groups} == {"muon", "adamw"}
    assert {group["lr"] for group in optimizer.param_groups} == {3e-3}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.01}
    assert optimizer.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
    held = {param for group in optimizer.param_groups for param in group["params"]}
    assert held == set(model.parameters())


@pytest.mark.parametrize("name", NAMED)
def test_every_name_trains(name):
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
    assert losses[-1] < 0.8 * losses[0]


def test_the_default_rate_is_torchs():
    optimizer = named_optimizer("schedule_free_adamw", mlp())
    assert isinstance(optimizer, ScheduleFreeAdamW)
    assert optimizer.param_groups[0]["lr"] == torch.optim.AdamW(mlp().parameters()).param_groups[0]["lr"]


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"found the name 'mun'.*muon, schedule_free_adamw.*Did you mean 'muon'"):
        named_optimizer("mun", mlp())
    for bad, error in ((0.0, ValueError), (-1.0, ValueError), ("fast", TypeError)):
        with pytest.raises(error, match="lr"):
            named_optimizer("muon", mlp(), bad)  # pyright: ignore


def test_muon_without_a_matrix_says_so():
    with pytest.warns(NoEffectWarning, match="no hidden matrix or filter in this Sequential, so AdamW trains all"):
        optimizer = named_optimizer("muon", torch.nn.Sequential(torch.nn.Linear(4, 2)))
    assert [group["rule"] for group in optimizer.param_groups] == ["adamw"]


def test_an_evaluation_on_the_weights_of_training_warns_once():
    model = mlp()
    optimizer = named_optimizer("schedule_free_adamw", model, 0.01)
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
    with pytest.warns(UserWarning, match=r"weights of training.*optimizer.eval\(\)") as said:
        evaluated(model)
    evaluated(model)
    assert len(said) == 1
    assert said[0].filename == __file__
