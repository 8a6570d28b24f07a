"""A user's training as a factory: what it may return, and what is said if it does not fit."""

from __future__ import annotations

import sys
import textwrap
from typing import Any

import pytest
import torch

from torchboost.bench import factory as module
from torchboost.bench.contestants import Recipe, build_loop
from torchboost.bench.factory import (
    Epoch,
    Factory,
    function_at,
    loss_of,
    made_by,
    metric_of,
    one_epoch,
    scheduled,
    source_of,
    with_flags,
)
from torchboost.errors import FactoryError, NoEffectWarning

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

    def without(seed):
        return make(seed)[:4]

    def once(seed):
        *first, batches, evaluate = make(seed)
        return (*first, ((a, b) for a, b in batches), evaluate)
"""
ODD = """
    def wrong(seed):
        return 3

    def swapped(seed):
        model, optimizer, loss, batches, evaluate = make(seed)
        return optimizer, model, loss, batches

    def empty(seed):
        return (*make(seed)[:3], [])

    def closure(seed):
        model, *rest = make(seed)
        return (model, torch.optim.LBFGS(model.parameters()), *rest[1:])

    def unpaired(seed):
        return (*make(seed)[:3], [{"inputs": torch.zeros(5, 2)}])

    def plateau(seed):
        return (*make(seed), lambda optimizer, steps: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))

    def stepless(seed):
        return (*make(seed), lambda optimizer, steps: None)

    def other(seed):
        return (make(seed)[0], *make(seed)[1:])

    def number(seed):
        return (*make(seed)[:2], lambda outputs, targets: 0.5, *make(seed)[3:])

    def words(seed):
        return (*make(seed)[:4], lambda model: "good")

    def negative(seed):
        return (*make(seed)[:4], lambda model: -0.5)

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, inputs):
            return self.layer(inputs["x"])

    def named(seed):
        _, _, loss, batches, evaluate = make(seed)
        model = Named()
        batches = [({"x": x, "more": [x]}, y) for x, y in batches]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, loss, batches, lambda m: -loss(m(batches[0][0]), batches[0][1])

    model, norm = None, nn.BatchNorm1d(2, affine=False)

    def shared(seed):
        global model
        found = make(seed)
        model = model or found[0]
        return (model, torch.optim.SGD(model.parameters(), lr=0.1), *found[2:])

    def normed(seed):
        model, _, *rest = make(seed)
        model = nn.Sequential(model, norm)
        return (model, torch.optim.SGD(model.parameters(), lr=0.1), *rest)

    def penalised(seed):
        model, optimizer, loss, *rest = make(seed)
        size = lambda: sum(p.square().sum() for p in model.parameters())
        return (model, optimizer, lambda o, t: 0 * loss(o, t) + size(), *rest)

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield torch.zeros(2), 0

    class Sized(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from [(torch.zeros(2), 0)] * 20

        def __len__(self):
            return 20

    def loader(seed):
        return (*make(seed)[:3], torch.utils.data.DataLoader(Endless(), batch_size=5), make(seed)[4])

    def generator(seed):
        return (*make(seed)[:3], iter(Endless()), make(seed)[4])

    def sized(seed):
        return (*make(seed)[:3], torch.utils.data.DataLoader(Sized(), batch_size=5), make(seed)[4])
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(GOOD) + textwrap.dedent(ODD))
    return path


@pytest.fixture
def at(file):
    return lambda name, **options: Factory.at(f"{file}:{name}", **options)


def epoch(factory: Factory, seed: int, number: int) -> list[Any]:
    return list(one_epoch(factory.build(seed).batches, seed=seed, epoch=number, device=torch.device("cpu")))


def test_a_factory_builds_its_parts_from_a_seed(at, file):
    factory = at("make")
    assert (factory.name, factory.title, factory.epochs) == (f"{file}:make", "train.py", 1)
    parts = factory.build(7)
    assert factory.measured(parts) == Epoch(steps=4, batch=5, samples=20)
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


def test_flags_keep_the_groups_of_the_user(at):
    optimizer = at("make").build(0).optimizer
    fused = with_flags(optimizer, fused=True)
    assert type(fused) is torch.optim.SGD
    assert [(g["lr"], g["momentum"], g["fused"]) for g in fused.param_groups] == [(0.5, 0.9, True), (0.1, 0.9, True)]
    assert fused.param_groups[0]["params"][0] is optimizer.param_groups[0]["params"][0]
    with pytest.warns(NoEffectWarning, match="SGD does not have the setting turbo"):
        assert "turbo" not in with_flags(optimizer, turbo=True).defaults


def test_the_batches_of_a_generator_are_there_in_every_epoch(at):
    parts = at("once").build(0)
    lengths = [len(list(one_epoch(parts.batches, seed=0, epoch=e, device=torch.device("cpu")))) for e in range(3)]
    assert lengths == [4, 4, 4]
    spent = iter(list(parts.batches)[:0])
    with pytest.raises(FactoryError, match="gave nothing in pass 2"):
        list(one_epoch(spent, seed=0, epoch=1, device=torch.device("cpu")))


def test_fewer_samples(at):
    parts = at("make").build(0)
    sizes = {limit: at("make").limited(limit).measured(parts) for limit in (11, 1, 20, 99, None)}
    assert sizes[11] == Epoch(steps=2, batch=5, samples=10)
    assert sizes[1].steps == 1
    assert sizes[20] == sizes[99] == sizes[None]


def test_what_does_not_fit_is_named(at):
    for name, message in {
        "wrong": "returned int",
        "swapped": "model is a SGD",
        "empty": "batches are empty",
        "closure": "LBFGS, whose step needs a closure",
        "unpaired": "found dict; needed: pairs",
        "other": "optimizer has no parameter of its model",
        "gone": "does not define a function 'gone'; it defines: make, without",
        "shared": r"returned the same parameter twice \(weight\)",
        "normed": r"returned the same buffer twice \(1.running_mean\)",
    }.items():
        with pytest.raises(ValueError, match=message):  # noqa: PT012
            factory = at(name)
            factory.measured(factory.build(0))
            factory.build(1)


def test_what_the_parts_return_is_checked(at):
    parts = at("number").build(0)
    with pytest.raises(FactoryError, match="loss returned a float"):
        loss_of(parts.loss, torch.zeros(2, 2), torch.zeros(2))
    with pytest.raises(FactoryError, match="evaluate returned a str"):
        metric_of(at("words").build(0), torch.nn.Linear(2, 2))
    for name, message in {"plateau": "ReduceLROnPlateau, whose step needs metrics", "stepless": "no step"}.items():
        parts = at(name).build(0)
        with pytest.raises(FactoryError, match=message):
            scheduled(parts, parts.optimizer, 10)
    assert scheduled(at("make").build(0), parts.optimizer, 10) is None


def test_inputs_may_be_named_tensors(at):
    factory = at("named")
    parts = factory.build(0)
    assert factory.measured(parts).batch == 5
    ((inputs, targets), *_) = one_epoch(parts.batches, seed=0, epoch=0, device=torch.device("meta"))
    assert {inputs["x"].device.type, inputs["more"][0].device.type, targets.device.type} == {"meta"}


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
    with pytest.raises(ValueError, match="found no file"):
        function_at(f"{tmp_path / 'none.py'}:make")
    (tmp_path / "train.txt").write_text("")
    with pytest.raises(ValueError, match="not a Python file"):
        function_at(f"{tmp_path / 'train.txt'}:make")
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\nraise KeyError('x')\n")
    with pytest.raises(ValueError, match=r"broken.py, line 2: KeyError: 'x'"):
        function_at(f"{broken}:make")


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
    names = ("make", "without", "wide", "two", "twenty", "nested")
    sources = {name: at(name).source for name in (*names, "again", "decorated")}
    assert "" not in sources.values()
    assert len({sources[name] for name in names}) == len(names)
    assert sources["nested"] == sources["again"]
    assert sources["decorated"] == sources["wide"]
    file.write_text(file.read_text() + "\n# changed\n")
    assert at("make").source not in ("", sources["make"])
    assert source_of(print) == ""


def test_what_a_factory_makes_is_seeded_and_leaves_the_generator_alone(at):
    before = torch.get_rng_state()
    parts = made_by(at("make").make, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(parts.model.weight, at("make").build(3).model.weight)
