from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.tuning.test_training import make
from torchboost.bench.factory import made_by, source_of
from torchboost.errors import ConfigError, FactoryError
from torchboost.registry import LEVELS, REGISTRY
from torchboost.tuning.candidates import (
    fingerprint_of,
    fresh,
    looked_at,
    named_candidates,
    recipe_candidates,
    standard_candidates,
    try_levers,
)
from torchboost.tuning.report import Candidate, Finding


def test_the_standard_candidates_are_the_settings_of_the_levels():
    trial = try_levers(make, steps=2000, seconds=0.5)
    assert {*trial.kept, *trial.left_out} == {name for name, entry in REGISTRY.items() if entry.lever}
    assert all(trial.left_out.values())
    found = {one.name: one for one in standard_candidates(trial.kept)}
    both = "less_bn and gradient_centralization"
    for level, name, called in (("O1", "less_bn", both), ("O2", "less_bn", both), ("O2", "grad_freeze", "grad_freeze")):
        one = found[f"{called} as in {level}"]
        assert one.skips_work
        assert one.extra[name] == LEVELS[level][name]
    assert "grad_freeze from 30 % on" in found
    levers = [one for name, one in found.items() if name.startswith("levers")]
    for one in levers:
        assert not one.skips_work
        assert one.extra
        assert all(REGISTRY[name].lever for name in one.extra)
    if levers and "autocast" in levers[0].extra and len(levers[0].extra) > 1:
        assert "autocast" not in levers[1].extra


def test_named_candidates():
    found = named_candidates({"fast": {"channels_last": True}, "both": {"channels_last": True, "less_bn": {}}})
    assert [one.skips_work for one in found] == [False, True]
    on = {"autocast": True}
    for name in ("stock", "stock, 50% of the steps", "a + b", "", 1, None):
        with pytest.raises(ValueError, match="give a name without ' \\+ ' that does not begin with 'stock'"):
            named_candidates({name: on})  # pyright: ignore[reportArgumentType]
    for wrong in ({"nothing": {"less_bn": False}}, {"empty": {}}):
        with pytest.raises(ValueError, match="candidates: found"):
            named_candidates(wrong)
    with pytest.raises(ValueError, match="give a section extra"):
        named_candidates({"a": "autocast"})  # pyright: ignore[reportArgumentType]


def linear(seed: int) -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    data = [(torch.randn(8, 4), torch.randint(0, 2, (8,)))]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, data, lambda model: 0.0


def plain(seed: int) -> Any:
    stages = [
        layer
        for inputs, outputs in ((3, 8), (8, 16), (16, 32))
        for layer in (nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
    ]
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2))
    data = [(torch.randn(4, 3, 8, 8), torch.randint(0, 2, (4,)))]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, data, lambda model: 0.0


def look(candidate: Candidate, make: Callable[[int], Any], steps: int) -> Finding:
    (found,) = looked_at([candidate], make, steps)
    assert found.candidate == candidate
    return found


def test_what_cannot_work_here_has_a_reason_and_a_wrong_setting_is_an_error():
    for extra, said in (
        ({"less_bn": {"keep": "narrowest"}}, "less_bn"),
        ({"channels_last": True}, "convolution"),
        ({"fused_optimizer": True, "less_bn": {}}, "less_bn: "),  # whole, if a part of it cannot work
    ):
        found = look(Candidate(name="a", extra=extra), linear, 100)
        assert found.outcome == "not usable"
        assert said in found.reason
    assert look(Candidate(name="a", extra={"fused_optimizer": True}), linear, 100).outcome is None
    assert look(Candidate(name="a", extra={"gradient_centralization": True}), make, 100).outcome is None
    for extra, said in (
        ({"les_bn": True}, "Did you mean 'less_bn'"),
        ({"grad_freeze": {"full_share": 3}}, "full_share"),
    ):
        with pytest.raises(ConfigError, match=said):
            look(Candidate(name="a", extra=extra), linear, 100)


def residual(blocks: int) -> Callable[[int], Any]:
    """A factory of a network with so many residual blocks."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Sequential(
                *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
                *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)),
            )

        def forward(self, inputs: Tensor) -> Tensor:
            return F.relu(inputs + self.branch(inputs))

    def factory(seed: int) -> Any:
        stem = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        body = (Block() for _ in range(blocks))
        model = nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
        data = [(torch.randn(4, 3, 8, 8), torch.randint(0, 2, (4,)))]
        return model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, data, lambda model: 0.0

    return factory


@pytest.mark.parametrize(("factory", "outcome"), [(residual(1), "duplicate"), (residual(4), None)])
def test_two_candidates_that_come_to_the_same_training_are_one(factory, outcome):
    """The levels keep one BatchNorm in every block or in one of eight, which is the same for a single block."""
    norms = {"gradient_centralization": {}}
    given = {
        "mild": {"less_bn": dict(LEVELS["O1"]["less_bn"]), **norms},
        "strong": {"less_bn": dict(LEVELS["O2"]["less_bn"]), **norms},
        "alone": {"less_bn": dict(LEVELS["O1"]["less_bn"])},
    }
    mild, strong, alone = looked_at(named_candidates(given), factory, 100)
    assert (mild.outcome, alone.outcome) == (None, None)
    assert strong.outcome == outcome
    assert strong.reason == ("on this model it is the same as 'mild'" if outcome else "")


def test_settings_of_what_is_done_in_the_loop_tell_trainings_apart():
    shares = {"early": 0.3, "late": 0.7, "again": 0.7}
    given = {name: {"grad_freeze": {"pattern": "progressive", "full_share": share}} for name, share in shares.items()}
    assert [one.outcome for one in looked_at(named_candidates(given), residual(4), 100)] == [None, None, "duplicate"]


def test_two_recipes_are_never_taken_for_one():
    found = recipe_candidates({"a": (make, 0.5), "b": (make, 0.5)}, made_by(make, 0))
    assert [one.outcome for one in looked_at(found, make, 10)] == [None, None]


def test_recipes_are_candidates_that_must_beat_fewer_steps():
    stock = made_by(make, 0)
    (found,) = recipe_candidates({"half": (make, 0.5)}, stock)
    wanted = Candidate(name="half", recipe=True, share=0.5, skips_work=True, fingerprint=found.fingerprint)
    assert found == wanted
    assert found.fingerprint == f"{fingerprint_of(stock)} {source_of(make)}"
    assert look(found, make, 10).outcome is None


def test_recipes_are_checked():
    for recipes, said in (
        ({"": (make, 0.5)}, "a factory and a share above 0 and at most 1"),
        ({"a": (make, 0.0)}, "a factory and a share above 0 and at most 1"),
        ({"a": (make, 1.5)}, "a factory and a share above 0 and at most 1"),
        ({"a": (make, "half")}, "with 'half'"),
        ({"a": make}, "give a factory and a share of the steps"),
        ({"a": (0.5, make)}, "give a factory and a share of the steps"),
        ({"a": (make,)}, "give a factory and a share of the steps"),
        ([1], "found a list"),
        ({"a": (lambda seed: make(seed)[:4], 0.5)}, "the factory of 'a' has no evaluate"),
    ):
        with pytest.raises(ValueError, match=said):
            recipe_candidates(recipes, made_by(make, 0))  # pyright: ignore[reportArgumentType]


def test_a_recipe_that_trains_the_parameters_of_stock_is_refused():
    body = make(0)[0]

    def around(seed: int) -> Any:
        model = torch.nn.Sequential(body)
        return (model, torch.optim.SGD(model.parameters(), lr=0.1), *make(seed)[2:])

    with pytest.raises(FactoryError, match=r"the same parameter twice \(0.0.weight\)"):
        recipe_candidates({"a": (lambda seed: (torch.nn.Sequential(body), *around(seed)[1:]), 0.5)}, made_by(around, 0))
    with pytest.raises(FactoryError, match="the same parameter twice"):
        fresh(around)


def test_the_fingerprint_sees_modules_and_buffers():
    def changed(change: Callable[[torch.nn.Module], object]) -> str:
        parts = made_by(make, 0)
        change(parts.model)
        return fingerprint_of(parts)

    same = changed(lambda model: None)
    assert changed(lambda model: None) == same
    assert changed(lambda model: setattr(model, "2", torch.nn.Dropout(0.9))) != same
    assert changed(lambda model: model.get_submodule("1").get_buffer("running_mean").add_(1)) != same
    assert changed(lambda model: model.register_buffer("mask", torch.ones(3, dtype=torch.bool))) != same
    assert changed(lambda model: model.register_buffer("phase", torch.ones(3, dtype=torch.complex64))) != same
