"""A user's training as a factory: what it may return, and what is said if it does not fit."""

from __future__ import annotations

import functools
import random
import sys
import textwrap
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from torchboost import Target
from torchboost.algorithms import DimReduction
from torchboost.bench import factory as module
from torchboost.bench.contestants import Recipe, build_loop
from torchboost.bench.factory import (
    Epoch,
    Factory,
    function_at,
    loop_body,
    made_by,
    metric_of,
    one_epoch,
    score_of,
    source_of,
)
from torchboost.core import attach_all
from torchboost.core.step import ClosureOptimizer
from torchboost.errors import FactoryError

GOOD = """
    import torch
    from torch import nn

    def make(seed):
        x = torch.arange(40.0).reshape(20, 2) / 40
        y = (x.sum(1) > 1).long()
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(
            [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}], lr=0.1, momentum=0.9
        )
        data = torch.utils.data.TensorDataset(x, y)
        loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
        return model, optimizer, nn.functional.cross_entropy, loader, lambda m: (m(x).argmax(1) == y).float().mean()
"""
ODD = """
    def changed(**given):
        names = ("model", "optimizer", "loss", "batches", "evaluate", "schedule", "validate", "before_step")
        parts = lambda seed: (*make(seed), None, None, None)
        return lambda seed: tuple(given.get(name, part) for name, part in zip(names, parts(seed)))

    class Stream(torch.utils.data.IterableDataset):
        def __init__(self, count):
            self.count = count

        def __iter__(self):
            number = 0
            while number != self.count:
                yield torch.zeros(2), 0
                number += 1

    class Sized(Stream):
        def __len__(self):
            return self.count

    wrong = lambda seed: 3
    empty = changed(batches=[])
    unpaired = changed(batches=[torch.zeros(5, 2)])
    other = changed(model=nn.Linear(2, 2))
    number = changed(loss=lambda outputs, targets: 0.5)
    words = changed(evaluate=lambda model: "good")
    negative = changed(evaluate=lambda model: -0.5)
    validated = changed(validate=lambda model: 0.25 if not model.training else 0.0)
    unvalidated = changed(validate=0.5)
    unclipped = changed(before_step=1.0)
    wordy = changed(validate=lambda model: "good")
    longer = lambda seed: (*validated(seed), None)
    stepless = changed(schedule=lambda optimizer, steps: None)
    judging = changed(schedule=lambda optimizer, steps: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))

    def searching(seed):
        model, _, *others = make(seed)
        return model, torch.optim.LBFGS(model.parameters()), *others

    loader = changed(batches=torch.utils.data.DataLoader(Stream(-1), batch_size=5))
    sized = changed(batches=torch.utils.data.DataLoader(Sized(20), batch_size=5))

    def generator(seed):
        return changed(batches=iter(Stream(-1)))(seed)

    def once(seed):
        return changed(batches=(pair for pair in list(make(seed)[3])))(seed)

    def swapped(seed):
        model, optimizer, loss, batches, evaluate = make(seed)
        return optimizer, model, loss, batches

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, inputs):
            return self.layer(inputs["x"])

    def named(seed):
        model = Named()
        batches = [({"x": x, "more": [x]}, y) for x, y in make(seed)[3]]
        return model, torch.optim.SGD(model.parameters(), lr=0.1), make(seed)[2], batches

    class ByName(Named):
        def forward(self, *, x, more=None, labels=None):
            return nn.functional.cross_entropy(self.layer(x), labels)

    def by_name(seed):
        model = ByName()
        batches = [{"x": x, "labels": y} for x, y in make(seed)[3]]
        return model, torch.optim.SGD(model.parameters(), lr=0.1), lambda loss, batch: loss, batches

    model, norm = None, nn.BatchNorm1d(2, affine=False)

    def shared(seed):
        global model
        parts = make(seed)
        model = model or parts[0]
        return (model, torch.optim.SGD(model.parameters(), lr=0.1), *parts[2:])

    def normed(seed):
        model, _, *rest = make(seed)
        model = nn.Sequential(model, norm)
        return (model, torch.optim.SGD(model.parameters(), lr=0.1), *rest)

    def penalised(seed):
        model, optimizer, loss, *rest = make(seed)
        size = lambda: sum(p.square().sum() for p in model.parameters())
        return (model, optimizer, lambda o, t: 0 * loss(o, t) + size(), *rest)
"""
CPU = torch.device("cpu")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(GOOD) + textwrap.dedent(ODD))
    return path


@pytest.fixture
def at(file):
    return lambda name, **options: Factory.at(f"{file}:{name}", **options)


def epoch(factory: Factory, seed: int, number: int) -> list[Any]:
    return list(one_epoch(factory.build(seed).batches, seed=seed, epoch=number, device=CPU))


def test_a_factory_builds_its_parts_from_a_seed(at, file):
    factory, before = at("make"), torch.get_rng_state()
    assert (factory.name, factory.title, factory.epochs) == (f"{file}:make", "train.py", 1)
    parts = factory.build(7)
    assert torch.equal(torch.get_rng_state(), before)
    sizes = {limit: replace(factory, train_limit=limit).measured(parts) for limit in (11, 1, 20, 99, None)}
    assert sizes[11] == Epoch(steps=2, batch=5, samples=10)
    assert sizes[1].steps == 1
    assert sizes[20] == sizes[99] == sizes[None] == Epoch(steps=4, batch=5, samples=20)
    assert 0.0 <= factory.evaluate(parts, parts.model) <= 1.0
    assert torch.equal(parts.model.weight, factory.build(7).model.weight)
    assert not torch.equal(parts.model.weight, factory.build(8).model.weight)
    first, again, later, other = (
        torch.cat([x for x, _ in epoch(factory, seed, number)]) for seed, number in ((3, 0), (3, 0), (3, 1), (4, 0))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert not torch.equal(first, other)


def test_the_metric_of_a_factory_is_an_accuracy_only_if_that_is_said(at):
    factory = at("make")
    assert (factory.metric, factory.drops, factory.higher_is_better) == ("metric", None, True)
    factory = at("negative", accuracy=True)
    assert (factory.metric, factory.drops) == ("accuracy", (0.005, 0.03))
    parts = factory.build(0)
    with pytest.raises(FactoryError, match=r"evaluate returned -0.5; needed with --accuracy"):
        factory.evaluate(parts, parts.model)
    assert at("negative").evaluate(parts, parts.model) == -0.5


def test_choices_are_made_on_the_data_for_validation_if_there_are_some(at):
    parts = at("validated").build(0)
    assert score_of(parts, parts.model) == 0.25
    assert metric_of(parts, parts.model) != 0.25
    assert parts.model.training
    parts = at("make").build(0)
    assert parts.validate is None
    assert score_of(parts, parts.model) == metric_of(parts, parts.model)


def test_an_evaluation_draws_the_same_whatever_the_training_drew(at):
    def drawing(model: Any) -> float:
        return float(torch.rand(())) + random.random() + float(np.random.rand())

    parts = at("make").build(0)._replace(evaluate=drawing)
    first = metric_of(parts, parts.model, seed=1)
    torch.manual_seed(3)
    drawn = torch.rand(2)  # as dropout does, of which some contestants draw more
    torch.manual_seed(3)
    assert (metric_of(parts, parts.model, seed=1), score_of(parts, parts.model, seed=1)) == (first, first)
    assert metric_of(parts, parts.model, seed=2) != first
    assert torch.equal(torch.rand(2), drawn)


def test_the_batches_of_a_generator_are_there_in_every_epoch(at):
    batches = at("once").build(0).batches
    assert [len(list(one_epoch(batches, seed=0, epoch=e, device=CPU))) for e in range(3)] == [4, 4, 4]
    with pytest.raises(FactoryError, match="gave nothing in pass 2"):
        list(one_epoch(iter([]), seed=0, epoch=1, device=CPU))


def lines_of(batches: Any, epoch: int = 0, *, draws: int = 0) -> list[list[float]]:
    """The inputs of an epoch, if the model draws random numbers between two batches."""
    lines = []
    for inputs, _ in one_epoch(batches, seed=1, epoch=epoch, device=CPU):
        lines.append(inputs.flatten().tolist())
        torch.rand(draws)
    return lines


class Augmented(torch.utils.data.Dataset[Any]):
    """Samples that draw from all generators when they are read."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()]), 0


def test_what_a_loss_does_to_a_batch_does_not_reach_the_next_reader():
    batches = [{"input_ids": torch.ones(2, 3), "labels": torch.zeros(2)}]
    for _ in range(2):
        for inputs, _targets in one_epoch(batches, seed=0, epoch=0, device=CPU):
            assert inputs.pop("labels").sum() == 0
            assert inputs["input_ids"].mul_(2).sum() == 12


def test_a_loss_finds_the_gradient_of_an_input_that_requires_one():
    points = torch.ones(2, 3, requires_grad=True)
    for _ in range(2):
        for inputs, _targets in one_epoch([(points, torch.zeros(2))], seed=0, epoch=0, device=CPU):
            inputs.mul(2).sum().backward()
            assert inputs.grad.unique().tolist() == [2]
    assert points.grad is None


@pytest.mark.parametrize("paired", [True, False])
def test_a_batch_of_mappings_for_reading_goes_to_the_device(paired: bool):
    read_only = types.MappingProxyType({"input_ids": torch.ones(2, 3)})
    batch = (read_only, read_only) if paired else read_only
    ((inputs, targets),) = one_epoch([batch], seed=0, epoch=0, device=torch.device("meta"))
    assert inputs["input_ids"].is_meta
    assert targets["input_ids"].is_meta


def test_every_contestant_gets_the_same_batches():
    """Whatever was drawn before, and whatever the model draws meanwhile."""
    own = torch.Generator()
    loader = functools.partial(torch.utils.data.DataLoader, Augmented(), batch_size=2)
    for batches in (
        loader(shuffle=True),
        loader(shuffle=True, generator=own),
        loader(sampler=torch.utils.data.RandomSampler(range(6), generator=own)),
        loader(shuffle=True, num_workers=1),
    ):
        first = lines_of(batches)
        assert lines_of(batches, draws=3) == first
        assert lines_of(batches, epoch=1) != first


def test_a_generator_draws_its_batches_from_the_seed():
    def make(seed: int) -> Any:
        model = torch.nn.Linear(4, 2)
        batches = ((torch.rand(2, 4) + random.random() + np.random.rand(), torch.tensor([0, 1])) for _ in range(3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.cross_entropy, batches

    factory = Factory(make=make, name="drawn", title="drawn")
    first, again, other = (torch.stack([x for x, _ in factory.build(seed).batches]) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_weights_depend_on_the_seed_alone():
    def make(seed: int) -> Any:
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, random.random() + np.random.rand())
        return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss, []

    first, again, other = (made_by(make, seed).model.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_what_does_not_fit_is_named(at):
    for name, message in {
        "wrong": "returned int",
        "swapped": "model is a SGD",
        "empty": "batches are empty",
        "unpaired": "found Tensor; needed: pairs",
        "other": "optimizer has no parameter of its model",
        "gone": "does not define a function 'gone'; it defines: make, changed",
        "shared": r"returned the same parameter twice \(weight\)",
        "normed": r"returned the same buffer twice \(1.running_mean\)",
        "number": "loss returned a float",
        "words": "evaluate returned a str",
        "unvalidated": r"validate is a float; needed: .*evaluate, schedule, validate and before_step",
        "unclipped": r"before_step is a float; needed: .*evaluate, schedule, validate and before_step",
        "wordy": "validate returned a str",
        "longer": "returned a tuple of 9",
        "stepless": "schedule returned a NoneType, which has no step",
        "judging": "schedule returned a ReduceLROnPlateau, which decides by a metric",
        "searching": "optimizer is LBFGS, whose step needs a closure",
    }.items():
        with pytest.raises(ValueError, match=message):  # noqa: PT012
            factory = at(name)
            parts = factory.build(0)
            factory.measured(parts)
            loop_body(parts, parts.model, parts.optimizer, 9)(*next(iter(parts.batches)))
            metric_of(parts, parts.model)
            score_of(parts, parts.model)
            factory.build(1)


def test_inputs_may_be_named_tensors(at):
    factory = at("named")
    parts = factory.build(0)
    assert factory.measured(parts).batch == 5
    ((inputs, targets), *_) = one_epoch(parts.batches, seed=0, epoch=0, device=torch.device("meta"))
    assert {inputs["x"].device.type, inputs["more"][0].device.type, targets.device.type} == {"meta"}


def test_a_model_gets_the_entries_of_a_dict_by_name_if_it_takes_them(at):
    for name in ("named", "by_name"):
        factory = at(name)
        parts = factory.build(0)
        assert factory.measured(parts).batch == 5
        loss = loop_body(parts, parts.model, parts.optimizer, 9)(
            *next(iter(one_epoch(parts.batches, seed=0, epoch=0, device=CPU)))
        )
        assert loss.shape == ()


def test_an_optimizer_that_evaluates_the_loss_again_gets_it(at):
    parts = at("make").build(0)
    target = Target(parts.model, parts.optimizer)
    attach_all(target, [DimReduction(n_components=2, snapshot_every=1)])
    step, batch = loop_body(parts, target.model, target.optimizer, 40), next(iter(parts.batches))
    losses = [float(step(*batch)) for _ in range(40)]
    assert losses[-1] < losses[0]


def test_gradients_of_an_optimizer_that_evaluates_the_loss_again_are_clipped_before_its_step(at):
    def trained(most: float) -> tuple[list[float], torch.Tensor]:
        found, weight = list[float](), list[torch.Tensor]()

        def clip(model: torch.nn.Module) -> None:
            limit = most if len(found) == 9 else 1e9
            found.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
            weight[:] = [model.get_parameter("weight")]

        parts = at("make").build(0)._replace(before_step=clip)
        target = Target(parts.model, parts.optimizer)
        attach_all(target, [DimReduction(n_components=2, snapshot_every=1)])
        torch.manual_seed(0)  # of the order of the loader
        step, batch = loop_body(parts, target.model, target.optimizer, 10), next(iter(parts.batches))
        for _ in range(10):
            step(*batch)
        assert isinstance(target.optimizer, ClosureOptimizer)
        return found, weight[0]

    (free, moved), (held, kept) = trained(1e9), trained(0.0)
    assert free == held
    assert len(free) == 10
    assert min(free) > 0
    assert not torch.equal(moved, kept)


def test_every_run_has_the_loss_of_its_own_model(at):
    for way in ("stock", "hand", "O0"):
        factory = at("penalised")
        loops = [build_loop(Recipe.parse(way), factory, seed=seed, steps=4) for seed in (0, 1)]
        inputs, targets = next(iter(loops[0].parts.batches))
        for loop in loops:
            size = sum(p.square().sum() for p in loop.parts.model.parameters())
            torch.testing.assert_close(loop.step(inputs, targets), size)


def test_batches_must_end_in_time_unless_they_have_a_length(at, monkeypatch):
    for name, bound, value in (
        ("loader", "SECONDS_OF_AN_EPOCH", 0.05),
        ("generator", "SECONDS_OF_AN_EPOCH", 0.05),
        ("generator", "MOST_KEPT", 10),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, bound, value)
            factory = at(name)
            with pytest.raises(FactoryError, match=r"did not end \([0-9,]+ were read in [0-9]+ s\); give those of one"):
                factory.measured(factory.build(0))
    monkeypatch.setattr(module, "SECONDS_OF_AN_EPOCH", -1.0)
    assert at("sized").measured(at("sized").build(0)).steps == 4


def test_a_file_runs_as_a_program_would_and_its_faults_are_located(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.modules", {**sys.modules})
    (tmp_path / "beside.py").write_text("FACTOR = 0.5\n")
    extra = """
    from dataclasses import dataclass

    @dataclass
    class Settings:
        lr: float = 0.1

    def late(seed):
        from beside import FACTOR
        *first, batches, evaluate = make(seed)
        return (*first, batches, lambda m: FACTOR * Settings().lr)
    """
    path = tmp_path / "tr\udcff.py"  # a path that is no text
    path.write_text("from __future__ import annotations\n" + textwrap.dedent(GOOD) + textwrap.dedent(extra))
    factory = Factory.at(f"{path}:late")
    parts = factory.build(0)
    assert factory.evaluate(parts, parts.model) == 0.05
    assert factory.name.endswith("tr\\udcff.py:late")
    assert factory.title == "tr\\udcff.py"
    for name, content, message in (
        ("none.py", None, "found no file"),
        ("train.txt", "", "not a Python file"),
        ("broken.py", "import torch\nraise KeyError('x')\n", r"broken.py, line 2: KeyError: 'x'"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            function_at(f"{tmp_path / name}:make")


def test_the_source_tells_versions_functions_and_arguments_apart(at, file):
    extra = """
    import functools

    def wide(seed, *, width=2, inner=None):
        return make(seed)

    @functools.wraps(wide)
    def decorated(seed):
        return wide(seed)

    two, twenty = functools.partial(wide, width=2), functools.partial(wide, width=20)
    nested = functools.partial(wide, inner=make)
    again = functools.partial(wide, inner=make)
    """
    file.write_text(file.read_text() + textwrap.dedent(extra))
    names = ("make", "swapped", "wide", "two", "twenty", "nested")
    sources = {name: at(name).source for name in (*names, "again", "decorated")}
    assert "" not in sources.values()
    assert len({sources[name] for name in names}) == len(names)
    assert sources["nested"] == sources["again"]
    assert sources["decorated"] == sources["wide"]
    file.write_text(file.read_text() + "\n# changed\n")
    assert at("make").source not in ("", sources["make"])
    assert source_of(print) == ""
