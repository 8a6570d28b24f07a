"""A configuration with a recipe: the loop equals the one written by hand, resumes to the bit, and leaves no trace."""

from __future__ import annotations

import copy
import gc
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

import torchboost
from tests.support.ranks import run_ranks
from torchboost import (
    AutoBoost,
    Boosted,
    ConfigError,
    Facts,
    IncompatibleError,
    NoEffectWarning,
    Plan,
    boost,
    front,
    prepare,
)
from torchboost.core.torch_private import step_post_hooks, step_pre_hooks
from torchboost.optim import SGD, Constant, MixedOptimizer, ScheduleFreeAdamW, Shortened, muon_from

N = 20
Loop = tuple[nn.Sequential, torch.optim.Optimizer]

MUON: dict[str, Any] = {"optimizer": "muon", "lr": 0.03, "rate": 0.5, "length": 0.55}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def pair(seed: int = 0, **options: Any) -> Loop:
    model = network(seed)
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01} | options
    return model, torch.optim.SGD(model.parameters(), **settings)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def train(model: nn.Module, optimizer: Any, steps: range, scheduler: Any = None) -> None:
    for number in steps:
        inputs, labels = batch(number)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def recipe(model: nn.Module, given: Any, /, *, total: int | None = N, level: str = "O0", **section: Any) -> Boosted:
    config = {"recipe": section}
    return boost(model, given, level=level, config=config, total_steps=total, calibrate=False, verify=False)


def equal(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(left.parameters(), right.parameters(), strict=True))


def rates(optimizer: Any) -> list[Any]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_the_loop_equals_the_one_written_by_hand(level: str):
    boosted = recipe(*pair(), level=level, **MUON)
    assert boosted.steps == 11
    train(*boosted, range(11), CosineAnnealingLR(boosted.optimizer, 11))
    model, optimizer = pair(lr=0.05)
    mixed = muon_from(optimizer, model, lr=0.03)
    if level != "O0":
        boost(model, mixed, level=level, total_steps=11, calibrate=False, verify=False)
    train(model, mixed, range(11), CosineAnnealingLR(mixed, 11))
    assert equal(boosted.model, model)
    assert not equal(model, network())


def test_a_schedule_of_the_full_length_can_be_shortened():
    boosted = recipe(*pair(), length=0.5)
    steps = boosted.steps
    assert steps == 10
    whole = CosineAnnealingLR(boosted.optimizer, N)
    train(*boosted, range(steps), Shortened(whole, steps=steps, total_steps=N))
    assert rates(boosted.optimizer) == pytest.approx([0.0])
    model, optimizer = pair()
    train(model, optimizer, range(steps), CosineAnnealingLR(optimizer, steps))
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(model.parameters(), boosted.model.parameters()))  # noqa: B905


def test_rates_alone_are_scaled_in_place():
    model, optimizer = pair()
    boosted = recipe(model, optimizer, rate=0.5)
    assert boosted.optimizer is optimizer
    assert rates(optimizer) == [0.05] == [optimizer.defaults["lr"]]
    train(*boosted, range(N), CosineAnnealingLR(optimizer, N))
    other, plain = pair(lr=0.05)
    train(other, plain, range(N), CosineAnnealingLR(plain, N))
    assert equal(model, other)


def test_shared_tensors_are_scaled_once_and_stay_the_same_objects():
    model, rate = network(), torch.tensor(0.1)
    optimizer = torch.optim.SGD([{"params": list(layer.parameters())} for layer in model[::2]], lr=rate)
    boosted = recipe(model, optimizer, rate=0.5)
    assert len(rates(optimizer)) == 3
    assert all(one is rate for one in rates(optimizer))
    assert float(rate) == pytest.approx(0.05)
    boosted.remove()
    assert torch.equal(rate, torch.tensor(0.1))


def test_an_initial_rate_that_the_user_wrote_is_scaled_too():
    model = network()
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "initial_lr": 0.4}], lr=0.1)
    recipe(model, optimizer, rate=0.5)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["initial_lr"]) == (0.05, 0.2)
    assert CosineAnnealingLR(optimizer, N, last_epoch=3).base_lrs == [0.2]


NEUTRAL: list[dict[str, Any]] = [{}, {"optimizer": None, "lr": None, "rate": 1.0, "length": 1.0}, {"rate": 1}]


@pytest.mark.parametrize("section", NEUTRAL)
def test_a_neutral_recipe_changes_nothing(section: dict[str, Any]):
    model, optimizer = pair()
    scheduler = CosineAnnealingLR(optimizer, N)  # built before, as one may without a recipe
    boosted = recipe(model, optimizer, **section)
    assert (boosted.optimizer, boosted.steps) == (optimizer, N)
    assert "recipe" not in boosted.explain()
    train(*boosted, range(N), scheduler)
    other, plain = pair()
    train(other, plain, range(N), CosineAnnealingLR(plain, N))
    assert equal(model, other)
    assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]


RECIPES: dict[str, dict[str, Any]] = {
    "muon": MUON,
    "rate": {"rate": 0.5, "length": 0.55},
    "schedule-free": {"optimizer": "schedule_free_adamw", "length": 0.55},
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_resumed_run_is_bit_identical(name: str):
    def build(seed: int) -> tuple[Boosted, list[Any]]:
        boosted = recipe(*pair(seed), **RECIPES[name])
        free = isinstance(boosted.optimizer, ScheduleFreeAdamW)
        scheduler = [] if free else [CosineAnnealingLR(boosted.optimizer, 11)]
        return boosted, scheduler

    boosted, scheduler = build(0)
    train(*boosted, range(5), *scheduler)
    parts = [boosted.model, boosted.optimizer, *scheduler, boosted]
    saved = copy.deepcopy([part.state_dict() for part in parts])
    train(*boosted, range(5, 11), *scheduler)
    resumed, other = build(1)
    for part, state in zip([resumed.model, resumed.optimizer, *other, resumed], saved, strict=True):
        part.load_state_dict(state)
    train(*resumed, range(5, 11), *other)
    assert equal(boosted.model, resumed.model)
    assert rates(boosted.optimizer) == rates(resumed.optimizer)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_checkpoint_that_is_loaded_before_is_not_scaled_again(momentum: float):
    boosted = recipe(*pair(momentum=momentum), rate=0.5)
    train(*boosted, range(3))
    saved = boosted.optimizer.state_dict()
    model, optimizer = pair(momentum=momentum)
    optimizer.load_state_dict(saved)
    with pytest.raises(IncompatibleError, match=r"load a checkpoint afterwards, into boosted.optimizer"):
        recipe(model, optimizer, rate=0.5)
    assert rates(optimizer) == [0.05]


def test_removal_gives_rates_back_unless_they_have_changed():
    model, optimizer = pair()
    before = copy.deepcopy(optimizer.state_dict())
    recipe(model, optimizer, rate=0.3).remove()
    assert optimizer.state_dict() == before
    assert optimizer.defaults["lr"] == 0.1
    boosted = recipe(model, optimizer, rate=0.3)
    optimizer.param_groups[0]["lr"] = 0.07  # by hand
    boosted.remove()
    assert rates(optimizer) == [0.07]
    boosted = recipe(model, optimizer, rate=0.5)
    scheduler = CosineAnnealingLR(optimizer, N)
    train(model, optimizer, range(3), scheduler)
    reached = rates(optimizer)
    boosted.remove()
    assert rates(optimizer) == reached
    assert optimizer.param_groups[0].keys() == pair()[1].param_groups[0].keys() | {"initial_lr"}


@pytest.mark.parametrize("name", ["muon", "schedule-free"])
def test_removal_leaves_the_given_optimizer_as_it_was(name: str):
    model, optimizer = pair()
    before = copy.deepcopy(optimizer.state_dict())
    boosted = recipe(model, optimizer, **RECIPES[name])
    assert boosted.optimizer is not optimizer
    inputs, labels = batch(0)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    with pytest.raises(
        IncompatibleError, match=r"a step of the SGD that was given would train twice.*boosted.optimizer"
    ):
        optimizer.step()
    built = boosted.optimizer
    built.step()
    boosted.remove()
    boosted.remove()
    assert optimizer.state_dict() == before
    for one in (optimizer, built):
        assert not step_pre_hooks(one)
        assert not step_post_hooks(one)
    weights = copy.deepcopy(model.state_dict())
    built.step()  # may train on
    optimizer.step()
    assert not torch.equal(weights["0.weight"], model.state_dict()["0.weight"])
    with torch.no_grad():
        model.eval()(inputs)  # the hook that warns of the weights of training is gone


def test_a_second_boost_begins_like_the_first():
    for section in (MUON, {"rate": 0.5}):
        model, optimizer = pair()
        recipe(model, optimizer, **section)
        gc.collect()
        second = recipe(model, optimizer, **section)
        assert rates(second.optimizer)[0] == 0.05
        third = recipe(model, optimizer)
        assert third.optimizer is optimizer
        assert rates(optimizer) == [0.1]
        train(*third, range(2))


def test_the_built_optimizer_is_not_built_upon():
    model, optimizer = pair()
    boosted = recipe(model, optimizer, **MUON)
    with pytest.raises(IncompatibleError, match="has Muon already"):
        recipe(model, boosted.optimizer, **MUON)
    kept = recipe(model, boosted.optimizer)  # without a recipe it is an optimizer like any other
    train(*kept, range(2))


def test_a_schedule_that_was_built_before_is_refused():
    for section in (MUON, {"rate": 0.5}, {"length": 0.5}, {"optimizer": "schedule_free_adamw"}):
        model, optimizer = pair()
        CosineAnnealingLR(optimizer, N)
        with pytest.raises(
            IncompatibleError, match=r"found a schedule on the SGD.*on boosted.optimizer, for boosted.steps"
        ):
            recipe(model, optimizer, **section)
        assert rates(optimizer) == [0.1]
        optimizer.step()


def test_a_schedule_on_the_given_optimizer_is_refused_at_the_first_step():
    model, optimizer = pair()
    boosted = recipe(model, optimizer, **MUON)
    scheduler = CosineAnnealingLR(optimizer, 11)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises(IncompatibleError, match=r"scheduler = ...\(boosted.optimizer, ...\)"):
            train(*boosted, range(1), scheduler)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("section", [MUON, {"optimizer": "schedule_free_adamw"}])
def test_a_plateau_on_the_given_optimizer_is_said_once_to_have_no_effect(section: dict[str, Any]):
    model, optimizer = pair()
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    boosted = recipe(model, optimizer, **section)
    train(*boosted, range(1))
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    with pytest.warns(NoEffectWarning, match=r"as by ReduceLROnPlateau, which has no effect.*on boosted\.optimizer"):
        train(*boosted, range(1))
    scheduler.step(3.0)
    train(*boosted, range(1))


def test_a_plateau_follows_the_scaled_rates():
    model, optimizer = pair()
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    recipe(model, optimizer, rate=0.5)
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    assert rates(optimizer) == pytest.approx([0.005])


def refusals() -> dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any], str]]:
    both = lambda m: [torch.optim.SGD(m[:3].parameters(), lr=0.1), torch.optim.AdamW(m[3:].parameters())]  # noqa: E731
    return {
        "two optimizers": (both, MUON, "found recipe.optimizer='muon' and 2 optimizers"),
        "another rule": (lambda m: torch.optim.Adagrad(m.parameters()), {"optimizer": "muon"}, "found torch.*Adagrad"),
        "a schedule as rate": (lambda m: SGD(m.parameters(), lr=Constant(0.1)), {"rate": 0.5}, "a schedule as lr"),
        "its length": (lambda m: SGD(m.parameters(), lr=Constant(0.1)), {"length": 0.5}, "a schedule as lr"),
        "no rate": (lambda m: torch.optim.SGD(m.parameters(), lr=0.0), {"optimizer": "schedule_free_adamw"}, "rate 0"),
    }


@pytest.mark.parametrize("name", refusals())
def test_what_is_refused_changes_nothing(name: str):
    build, section, message = refusals()[name]
    model = network()
    given = build(model)
    each = given if isinstance(given, list) else [given]
    before = [
        copy.deepcopy(one.state_dict()["param_groups"]) if not isinstance(one, SGD) else rates(one) for one in each
    ]
    with pytest.raises(IncompatibleError, match=message):
        recipe(model, given, **section)
    after = [one.state_dict()["param_groups"] if not isinstance(one, SGD) else rates(one) for one in each]
    assert before == after
    assert not any(step_post_hooks(one) for one in each)


def test_an_error_after_the_recipe_leaves_the_optimizer_as_it_was(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any, **__: Any) -> None:
        raise IncompatibleError("planted")

    monkeypatch.setattr(front, "Levers", fails)
    for section in (MUON, {"rate": 0.5}):
        model, optimizer = pair()
        before = optimizer.state_dict()
        with pytest.raises(IncompatibleError, match="planted"):
            recipe(model, optimizer, **section)
        assert optimizer.state_dict() == before
        optimizer.step()


def test_several_optimizers_are_scaled_together():
    model = network()
    optimizers = [torch.optim.SGD(model[:3].parameters(), lr=0.1), torch.optim.AdamW(model[3:].parameters(), lr=0.01)]
    boosted = recipe(model, optimizers, rate=0.5)
    assert boosted.optimizer == optimizers
    assert [rates(one) for one in optimizers] == [[0.05], [0.005]]
    boosted.remove()
    assert [rates(one) for one in optimizers] == [[0.1], [0.01]]


def test_an_optimizer_by_name(tmp_path: Path):
    model = network()
    with pytest.raises(ConfigError, match=r"recipe.optimizer: found 'muon', and the optimizer 'muon' by name"):
        boost(model, "muon", config={"recipe": {"optimizer": "muon"}})
    file = tmp_path / "chosen.json"
    file.write_text('{"recipe": {"optimizer": "muon"}}')
    with pytest.raises(ConfigError, match=r"chosen\.json"):
        boost(model, "muon", config=file)
    boosted = boost(model, "muon", lr=0.01, level="O0", config={"recipe": {"rate": 0.5}}, total_steps=N)
    assert {group["lr"] for group in boosted.optimizer.param_groups} == {0.005, 0.0005}


def test_schedule_free():
    model, optimizer = pair()
    boosted = recipe(model, optimizer, optimizer="schedule_free_adamw", lr=0.004)
    built = boosted.optimizer
    assert isinstance(built, ScheduleFreeAdamW)
    assert rates(built) == [0.004]
    assert built.param_groups[0]["weight_decay"] * 0.004 == pytest.approx(0.01 * 0.1)
    assert boosted.explain().splitlines()[1] == "recipe: schedule-free AdamW at 0.004 in place of SGD"
    train(*boosted, range(3))
    model.eval()
    with torch.no_grad(), pytest.warns(UserWarning, match="evaluated on the weights of training"):
        model(batch(0)[0])
    default = recipe(*pair(), optimizer="schedule_free_adamw")
    assert rates(default.optimizer) == [0.001]


def test_accumulation_stands_in_front_of_what_was_built():
    model, optimizer = pair()
    config = {"recipe": MUON, "extra": {"grad_accumulation": {"steps": 2}}}
    boosted = boost(model, optimizer, level="O0", config=config, total_steps=N)
    train(*boosted, range(4), CosineAnnealingLR(boosted.optimizer, 11))
    assert isinstance(boosted.optimizer.opt, MixedOptimizer)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(IncompatibleError, match=r"boosted.optimizer"):
        optimizer.step()


def test_the_plan_says_it_in_one_line(tmp_path: Path):
    boosted = recipe(*pair(), total=600, optimizer="muon", rate=0.5, length=0.55)
    line = (
        "recipe: 0.55 of the steps (330 of 600), learning rates times 0.5, Muon at 0.02 for 1 matrix, SGD for the rest"
    )
    first, *others = boosted.explain().splitlines()
    assert others[:2] == [line, "nothing is on"]
    assert re.fullmatch(r"level O0 for .*Muon at 0\.02.*, 330 steps", first)
    plan = Plan.of("O0", {"recipe": MUON})
    general = "recipe: 0.55 of the steps, learning rates times 0.5, Muon at 0.03 for the hidden matrices"
    assert plan.explain().splitlines()[1] == general
    assert plan.total_steps is None
    assert "recipe" not in Plan.of("O0").explain()
    boosted.plan.save(tmp_path / "boost.json")
    saved = json.loads((tmp_path / "boost.json").read_text())
    assert saved["recipe"] == {"optimizer": "muon", "lr": None, "rate": 0.5, "length": 0.55}
    assert Plan.of("O2", tmp_path / "boost.json").recipe == boosted.plan.recipe
    again = boost(*pair(), config=tmp_path / "boost.json", total_steps=600)
    assert (again.steps, rates(again.optimizer)) == (330, rates(boosted.optimizer))
    Plan.of("O0").save(tmp_path / "plain.json")
    assert "recipe" not in json.loads((tmp_path / "plain.json").read_text())


def test_only_boost_applies_a_recipe():
    model, optimizer = pair()
    plan = Plan.of("O0", {"recipe": MUON})
    for use in (
        lambda: plan.attach(torchboost.Target(model, optimizer)),
        lambda: prepare(model, config={"recipe": MUON}),
    ):
        with pytest.raises(IncompatibleError, match=r"found a recipe .*which only torchboost.boost applies"):
            use()
    booster = AutoBoost("O0", {"recipe": MUON}, total_steps=N)
    same, built = booster.network_auto_process_train(model, optimizer)
    assert same is model
    assert isinstance(built, MixedOptimizer)
    train(model, built, range(2))


def test_the_length_of_every_algorithm_is_the_shortened_one(tmp_path: Path):
    freezing = {"extra": {"grad_freeze": {}}, "recipe": {"length": 0.5}}
    plan = Plan.of("O0", freezing, Facts(), total_steps=3001)
    assert (plan.total_steps, plan.full_steps) == (1500, 3001)
    assert plan.algorithms[0].total_steps == 1500  # pyright: ignore[reportAttributeAccessIssue]
    plan.save(tmp_path / "boost.json")
    again = Plan.of("O0", tmp_path / "boost.json", Facts(), total_steps=3001)
    assert again.algorithms == plan.algorithms
    with pytest.raises(
        ConfigError, match=r"total_steps in .*: found 1500, and total_steps=2000 as an argument, of which recipe"
    ):
        Plan.of("O0", tmp_path / "boost.json", Facts(), total_steps=2000)
    alone = Plan.of("O0", tmp_path / "boost.json", Facts())
    assert (alone.total_steps, alone.full_steps) == (1500, None)
    assert Plan.of("O0", {"recipe": {"length": 0.1}}, Facts(total_steps=3)).total_steps == 1


def test_without_a_length_it_says_that_nothing_is_shortened():
    with pytest.warns(NoEffectWarning, match="recipe.length = 0.5 shortens nothing"):
        boosted = recipe(*pair(), total=None, length=0.5)
    assert boosted.steps is None


def on_ranks() -> tuple[bool, list[float]]:
    """Whether a boosted run equals the one by hand, each with a share of the batches, and the weights at the end."""
    rank, ends = torch.distributed.get_rank(), []
    for boosting in (True, False):
        model, given = pair(lr=0.1 if boosting else 0.05)
        optimizer = recipe(model, given, **MUON).optimizer if boosting else muon_from(given, model, lr=0.03)
        wrapped, scheduler = DistributedDataParallel(model), CosineAnnealingLR(optimizer, 11)
        for number in range(11):
            train(wrapped, optimizer, range(2 * number + rank, 2 * number + rank + 1), scheduler)
        ends.append([float(weight) for param in model.parameters() for weight in param.flatten()])
    return ends[0] == ends[1], ends[0]


@pytest.mark.dist
def test_ranks_train_alike():
    first, second = run_ranks(on_ranks, 2)
    assert first == second
    assert first[0]
