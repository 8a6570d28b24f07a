from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import ROOT
from tests.support.optimizers import RULES, all_rules
from torchboost.optim.rules.adam import Adam
from torchboost.optim.rules.foreign_names import HERE
from torchboost.optim.rules.sgd import SGD

COMPAT = ROOT / "docs" / "compat.md"


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("rule", RULES)
def test_a_name_of_mindspore_is_refused_with_ours(rule, name):
    params = list(nn.Linear(2, 2).parameters())
    with pytest.raises(TypeError) as raised:
        RULES[rule](params, **{name: 1})
    assert f"{rule} takes no {name!r}" in str(raised.value)
    assert HERE[name] in str(raised.value)
    with pytest.raises(TypeError) as raised:
        RULES[rule]([{"params": params, name: 1}])
    assert HERE[name] in str(raised.value)


@pytest.mark.parametrize("name", HERE)
def test_the_migration_page_has_the_name(name):
    assert f"| `{name}` |" in COMPAT.read_text(encoding="utf-8")


@pytest.mark.parametrize("rule", sorted(all_rules(), key=lambda rule: rule.__name__))
def test_signatures_are_explicit_and_annotated(rule):
    arguments = inspect.signature(rule).parameters.values()
    assert all(a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY) for a in arguments)
    assert all(a.annotation is not a.empty for a in arguments)
    assert [a.name for a in arguments if a.default is a.empty] == ["params"]


def test_other_names_get_the_nearest_one_and_a_key_of_the_users_own_stays():
    params = list(nn.Linear(2, 2).parameters())
    with pytest.raises(TypeError, match="takes no 'weight_dekay'; did you mean 'weight_decay'"):
        Adam(params, weight_dekay=0.1)
    with pytest.raises(TypeError, match="takes no 'zzz'; it takes params, lr, betas"):
        Adam(params, zzz=0.1)
    assert SGD([{"params": params, "my_name": "head"}]).param_groups[0]["my_name"] == "head"


def test_a_subclass_with_arguments_of_its_own_is_left_alone():
    class Decayed(SGD):
        def __init__(self, params: Any, decay: float, **options: Any) -> None:
            super().__init__(params, lr=decay, **options)

    assert Decayed([torch.zeros(1, requires_grad=True)], decay=0.5).param_groups[0]["lr"] == 0.5
    with pytest.raises(TypeError, match="unexpected keyword argument 'learning_rate'"):
        Decayed([torch.zeros(1, requires_grad=True)], decay=0.5, learning_rate=1.0)
