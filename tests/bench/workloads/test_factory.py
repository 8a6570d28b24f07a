from __future__ import annotations

import sys
import textwrap

import pytest
import torch

from torchboost.bench.workloads import factory
from torchboost.bench.workloads.contestants import Recipe, build_loop
from torchboost.bench.workloads.factory import factory_of, function_at, job_from, parts_from, scheduled, source_of
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
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(GOOD))
    return path


def test_a_factory_becomes_a_job(file):
    job = job_from(f"{file}:make")
    data = job.load(None, None)
    assert (job.batch, job.epochs, data.steps(job.batch), data.samples) == (5, 1, 4, 20)
    model = job.model(data, 7)
    optimizer = job.optimizer(model.parameters())
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    for inputs, targets in data.train(5, seed=7, epoch=0):
        job.loss(model(inputs), targets).backward()
    optimizer.step()
    assert 0.0 <= job.evaluate(model, data) <= 1.0


def test_the_metric_of_a_factory_is_an_accuracy_only_if_that_is_said(file):
    job = job_from(f"{file}:make")
    assert (job.metric, job.margin, job.loose_margin, job.higher_is_better) == ("metric", None, None, True)
    job = job_from(f"{file}:make", accuracy=True)
    assert (job.metric, job.margin, job.loose_margin) == ("accuracy", 0.005, 0.03)


def test_an_accuracy_that_is_not_a_share_is_named(file):
    file.write_text(file.read_text() + "\ndef loss(seed):\n    return (*make(seed)[:4], lambda model: -0.5)\n")
    job = job_from(f"{file}:loss", accuracy=True)
    data = job.load(None, None)
    model = job.model(data, 0)
    with pytest.raises(FactoryError, match=r"evaluate returned -0.5; needed with --accuracy"):
        job.evaluate(model, data)
    job = job_from(f"{file}:loss")
    assert job.evaluate(job.model(data, 0), data) == -0.5


def test_the_parts_of_a_factory_as_they_are(file):
    parts = parts_from(f"{file}:once", seed=3)
    assert len(list(parts.batches)) == 4
    assert torch.equal(parts.model.weight, parts_from(f"{file}:make", seed=3).model.weight)
    with pytest.raises(ValueError, match="returned int"):
        parts_from(f"{file}:wrong")


def test_seeds_fix_weights_and_order(file):
    job = job_from(f"{file}:make")
    data = job.load(None, None)
    assert torch.equal(job.model(data, 3).weight, job.model(data, 3).weight)
    assert not torch.equal(job.model(data, 3).weight, job.model(data, 4).weight)
    first, again, later = (torch.cat([x for x, _ in data.train(5, seed=3, epoch=e)]) for e in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)


def test_flags_keep_the_groups_of_the_user(file):
    job = job_from(f"{file}:make")
    model = job.model(job.load(None, None), 0)
    fused = job.optimizer(model.parameters(), fused=True)
    assert type(fused) is torch.optim.SGD
    assert [(g["lr"], g["momentum"], g["fused"]) for g in fused.param_groups] == [(0.5, 0.9, True), (0.1, 0.9, True)]
    with pytest.warns(NoEffectWarning, match="SGD does not have the setting turbo"):
        assert "turbo" not in job.optimizer(model.parameters(), turbo=True).defaults


def test_generators_are_kept_for_the_next_epoch(file):
    data = job_from(f"{file}:once").load(None, None)
    assert [len(list(data.train(5, seed=0, epoch=e))) for e in range(3)] == [4, 4, 4]


def test_fewer_samples(file):
    data = job_from(f"{file}:make").load(None, 11)
    assert (data.samples, data.steps(5), len(list(data.train(5, seed=0, epoch=0)))) == (10, 2, 2)
    assert data.limited(1).steps(5) == 1


def test_without_evaluate_only_step_times(file):
    assert job_from(f"{file}:without").epochs == 0
    with pytest.raises(ValueError, match="has no evaluate"):
        job_from(f"{file}:without", epochs=2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong", "returned int"),
        ("swapped", "model is a SGD"),
        ("empty", "batches are empty"),
        ("closure", "LBFGS, whose step needs a closure"),
        ("unpaired", "found dict; needed: pairs"),
        ("gone", "does not define a function 'gone'; it defines: make, without"),
    ],
)
def test_what_does_not_fit_is_named(file, name, said):
    with pytest.raises(ValueError, match=said):
        job_from(f"{file}:{name}")


def test_a_scheduler_that_needs_a_metric_is_named(file):
    parts = parts_from(f"{file}:plateau")
    with pytest.raises(FactoryError, match="ReduceLROnPlateau, whose step needs metrics"):
        scheduled(parts, parts.optimizer, 10)
    assert scheduled(parts_from(f"{file}:make"), parts.optimizer, 10) is None


def test_inputs_may_be_named_tensors(file):
    job = job_from(f"{file}:named")
    assert job.batch == 5
    ((inputs, targets), *_) = job.load(None, None).to("meta").train(5, seed=0, epoch=0)
    assert {inputs["x"].device.type, inputs["more"][0].device.type, targets.device.type} == {"meta"}


def test_faults_in_the_file_are_located(tmp_path):
    with pytest.raises(ValueError, match="found no file"):
        job_from(f"{tmp_path / 'none.py'}:make")
    path = tmp_path / "broken.py"
    path.write_text("import torch\nraise KeyError('x')\n")
    with pytest.raises(ValueError, match=r"broken.py, line 2: KeyError: 'x'"):
        job_from(f"{path}:make")


def test_a_file_runs_as_a_program_would(tmp_path, monkeypatch):
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
    path = tmp_path / "train.py"
    path.write_text("from __future__ import annotations\n" + textwrap.dedent(GOOD) + textwrap.dedent(extra))
    job = job_from(f"{path}:late")
    data = job.load(None, None)
    assert job.evaluate(job.model(data, 0), data) == 0.05


def test_a_path_that_is_no_text_can_be_saved(tmp_path):
    odd = tmp_path / "tr\udcff.py"
    odd.write_text(textwrap.dedent(GOOD))
    job = job_from(f"{odd}:make")
    assert job.name.endswith("tr\\udcff.py:make")
    assert job.title == "tr\\udcff.py"


SHARED = """
    model = None

    def shared(seed):
        global model
        found = make(seed)
        model = model or found[0]
        return (model, torch.optim.SGD(model.parameters(), lr=0.1), *found[2:])

    def number(seed):
        return (*make(seed)[:2], lambda outputs, targets: 0.5, *make(seed)[3:])

    def text(seed):
        return (*make(seed)[:4], lambda model: "good")

    spent = iter(make(0)[3])

    def kept(seed):
        return (*make(seed)[:3], spent, make(seed)[4])
"""


def test_a_factory_that_returns_one_model_for_all_seeds_is_refused(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(GOOD) + textwrap.dedent(SHARED))
    job = job_from(f"{file}:shared")
    with pytest.raises(FactoryError, match=r"returned the same parameter twice \(weight\)"):
        job.model(job.load(None, None), 1)


def test_a_factory_whose_models_share_a_buffer_is_refused(file):
    extra = """
    norm = nn.BatchNorm1d(2, affine=False)

    def normed(seed):
        model, _, *rest = make(seed)
        model = nn.Sequential(model, norm)
        return (model, torch.optim.SGD(model.parameters(), lr=0.1), *rest)
    """
    file.write_text(file.read_text() + textwrap.dedent(extra))
    job = job_from(f"{file}:normed")
    with pytest.raises(FactoryError, match=r"returned the same buffer twice \(1.running_mean\)"):
        job.model(job.load(None, None), 1)


def test_what_the_parts_return_is_checked(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(GOOD) + textwrap.dedent(SHARED))
    job = job_from(f"{file}:number")
    with pytest.raises(FactoryError, match="loss returned a float"):
        job.loss(torch.zeros(2, 2), torch.zeros(2))
    job = job_from(f"{file}:text")
    with pytest.raises(FactoryError, match="evaluate returned a str"):
        job.evaluate(torch.nn.Linear(2, 2), job.load(None, None))
    job = job_from(f"{file}:kept")
    with pytest.raises(FactoryError, match="gave nothing in pass 1"):
        list(job.load(None, None).train(5, seed=1, epoch=0))


@pytest.mark.parametrize("way", ["stock", "hand", "O0"])
def test_every_run_has_the_loss_of_its_own_model(file, way):
    extra = """
    def penalised(seed):
        model, optimizer, loss, *rest = make(seed)
        size = lambda: sum(p.square().sum() for p in model.parameters())
        return (model, optimizer, lambda o, t: 0 * loss(o, t) + size(), *rest)
    """
    file.write_text(file.read_text() + textwrap.dedent(extra))
    job = job_from(f"{file}:penalised")
    data = job.load(None, None)
    loops = [build_loop(Recipe.parse(way), job, data, seed=seed, steps=4) for seed in (0, 1)]
    others = [factory_of(job, data)(seed) for seed in (0, 1)]
    inputs, targets = next(iter(data.train(5, seed=0, epoch=0)))
    for model, loss in [(one.model, one.step) for one in loops] + [(one.model, one.loss) for one in others]:
        size = sum(p.square().sum() for p in model.parameters())
        torch.testing.assert_close(loss(inputs, targets), size)


ENDLESS = """
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


@pytest.mark.parametrize(
    ("name", "bound", "value"),
    [
        ("loader", "SECONDS_OF_AN_EPOCH", 0.1),
        ("generator", "SECONDS_OF_AN_EPOCH", 0.1),
        ("generator", "MOST_KEPT", 10),
    ],
)
def test_batches_that_do_not_end_are_named(file, monkeypatch, name, bound, value):
    file.write_text(file.read_text() + textwrap.dedent(ENDLESS))
    monkeypatch.setattr(factory, bound, value)
    with pytest.raises(
        FactoryError, match=r"batches did not end \([0-9,]+ were read in [0-9]+ s\); give those of one epoch"
    ):
        job_from(f"{file}:{name}")


def test_batches_with_a_length_may_take_any_time(file, monkeypatch):
    file.write_text(file.read_text() + textwrap.dedent(ENDLESS))
    monkeypatch.setattr(factory, "SECONDS_OF_AN_EPOCH", -1.0)
    assert job_from(f"{file}:sized").load(None, None).steps(5) == 4


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(GOOD) + "\n\ndef other(seed):\n    return (make(seed)[0], *make(seed)[1:])\n")
    with pytest.raises(FactoryError, match="optimizer has no parameter of its model"):
        job_from(f"{file}:other")


def test_the_source_of_a_factory_tells_versions_of_its_file_apart(file):
    before = job_from(f"{file}:make").source
    assert before
    assert job_from(f"{file}:make").source == before
    file.write_text(file.read_text() + "\n# changed\n")
    assert job_from(f"{file}:make").source not in ("", before)
    assert source_of(print) == ""


def test_the_source_of_a_factory_tells_functions_and_their_arguments_apart(file):
    extra = """
    import functools

    def sized(seed, *, width=2, inner=None):
        return make(seed)

    @functools.wraps(sized)
    def decorated(seed):
        return sized(seed)

    narrow, wide = functools.partial(sized, width=2), functools.partial(sized, width=20)
    nested = functools.partial(sized, inner=make)
    again = functools.partial(sized, inner=make)
    """
    file.write_text(file.read_text() + textwrap.dedent(extra))
    names = ("make", "without", "sized", "narrow", "wide", "nested")
    found = {name: source_of(function_at(f"{file}:{name}")) for name in (*names, "again", "decorated")}
    assert "" not in found.values()
    assert len({found[name] for name in names}) == len(names)
    assert found["nested"] == found["again"] == source_of(function_at(f"{file}:again"))
    assert found["decorated"] == found["sized"]
