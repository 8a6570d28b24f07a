from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import run_ranks
from tests.tuning.test_training import make
from torchboost.errors import FactoryError, RankDisagreementError
from torchboost.front import boost
from torchboost.tuning import tune as tuning
from torchboost.tuning.report import STOCK, Candidate, Run, TuneReport
from torchboost.tuning.tune import report_path, tune

CANDIDATES = {"memory": {"channels_last": True}, "norms": {"gradient_centralization": True}}


class Fake:
    """Trainings that take no time: the metric and the seconds are given."""

    stop: int | None = None
    made: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, **given: Any) -> None:
        self.steps = given["steps"]

    def __call__(self, candidate: Candidate, seed: int, *_: float) -> Run:
        if Fake.stop is not None and len(Fake.made) == Fake.stop:
            raise KeyboardInterrupt
        Fake.made.append((candidate.name, seed))
        speed = {"memory": 0.7, "norms": 0.8}.get(candidate.name, 1.0) * candidate.share
        loss = {"norms": 0.2}.get(candidate.name, 0.0) + (1 - candidate.share)
        metric = 0.9 - loss + 0.001 * (seed % 3)
        times = {"setup_seconds": 0.0, "seconds": speed, "wall_seconds": speed}
        return Run(name=candidate.name, seed=seed, steps=self.steps, metric=metric, **times)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(tuning, "Training", Fake)
    monkeypatch.setattr(Fake, "stop", None)
    monkeypatch.setattr(Fake, "made", [])
    return Fake


def tuned(out: Path | None = None, **more: Any) -> TuneReport:
    given = {"drop": 0.05, "budget": "10m", "epochs": 2, "candidates": CANDIDATES, "out": out, **more}
    return tune(make, **given)


@pytest.mark.usefixtures("fake")
def test_a_factory_that_takes_most_of_the_budget_is_refused_before_any_run():
    def slow(seed: int) -> Any:
        time.sleep(0.05)
        return make(seed)

    with pytest.raises(FactoryError, match=r"the factory takes 0\.\d s, and a tuning calls it 12 times at least"):
        tune(slow, drop=0.05, budget=0.5, candidates=CANDIDATES)
    assert Fake.made == []


@pytest.mark.usefixtures("fake")
def test_the_configuration_turns_on_what_passed(tmp_path):
    out = tmp_path / "boost.json"
    report = tuned(out)
    assert report.state == "complete"
    assert report.extra == {"channels_last": True}
    assert {found.candidate.name: found.outcome for found in report.findings} == {"memory": "kept", "norms": "lost"}
    assert report.steps == 12
    assert TuneReport.load(report_path(out)) == report
    written = json.loads(out.read_text(encoding="utf-8"))["extra"]
    assert written["channels_last"] == {}
    assert written["gradient_centralization"] is False
    model, optimizer = make(0)[:2]
    boosted = boost(model, optimizer, config=out, total_steps=100)
    assert list(boosted.attached) == ["channels_last"]


def test_every_interruption_leaves_a_report_that_is_resumed_without_repetition(tmp_path, fake):
    whole = tuned(tmp_path / "whole.json")
    count = len(fake.made)
    for stop in range(count):
        out = tmp_path / f"{stop}.json"
        fake.made.clear()
        fake.stop = stop
        with pytest.raises(KeyboardInterrupt):
            tuned(out)
        partial = TuneReport.load(report_path(out))
        assert partial.state == "interrupted"
        assert len(partial.runs) == stop
        assert not out.exists()
        fake.stop = None
        report = tuned(out, resume=True)
        assert len(fake.made) == count
        timeless = {"spent_seconds": 0.0, "environment": whole.environment}
        found, wanted = (one.model_copy(update=timeless).model_dump() for one in (report, whole))
        assert {key: value for key, value in found.items() if value != wanted[key]} == {}


@pytest.mark.usefixtures("fake")
def test_a_report_of_another_tuning_is_not_continued(tmp_path, monkeypatch):
    def other(seed: int) -> Any:
        parts = make(seed)
        parts[1].param_groups[0]["lr"] = 0.5
        return parts

    out = tmp_path / "boost.json"
    saved = tuned(out)
    for changes, said in (
        ({"drop": 0.02}, r"was made with drop 0\.05, but now it is 0\.02"),
        ({"epochs": 3}, "was made with steps 12, but now it is 18"),
        ({"candidates": {**CANDIDATES, "memory": {"autocast": True}}}, "other candidates or settings of them"),
    ):
        with pytest.raises(ValueError, match=said):
            tuned(out, resume=True, **changes)
    with pytest.raises(ValueError, match="fingerprint"):
        tune(other, drop=0.05, budget="10m", epochs=2, candidates=CANDIDATES, out=out, resume=True)
    assert saved.source
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "source_of", lambda make: "another")
        with pytest.raises(ValueError, match="another factory, another version of its file"):
            tuned(out, resume=True)
    assert tuned(out, resume=True).extra == {"channels_last": True}
    unknown = saved.environment.model_copy(update={"instructions": ""})  # an old report does not tell them
    saved.model_copy(update={"environment": unknown}).save(report_path(out))
    assert tuned(out, resume=True).state == "complete"
    saved.save(report_path(out))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
    with pytest.raises(ValueError, match=r"was made with instructions .*, but now it is 'OTHER'"):
        tuned(out, resume=True)


@pytest.mark.usefixtures("fake")
def test_arguments_are_checked_before_any_run(tmp_path):
    for changes, said in (
        ({"error": "small"}, "error: found 'small'"),
        ({"error": 0.6}, r"error: found 0.6; give a number from 0.01 to below 0.5"),
        ({"error": 0.008}, r"error: found 0.008"),
        ({"drop": 0.0}, "drop: found 0.0"),
        ({"drop": "0.5"}, "drop: found '0.5'"),
        ({"budget": "soon"}, "budget: found 'soon'"),
        ({"budget": 0}, "budget: found 0"),
        ({"epochs": 0}, "epochs: found 0"),
        ({"seeds": 2}, "seeds: found 2; give a number from 3 to 100"),
        ({"total_steps": 3}, "total_steps: found 3; the runs that are made have 12 steps"),
        ({"total_steps": "x"}, "total_steps: found 'x'"),
        ({"candidates": {"x": {}}}, "candidates: found 'x'"),
        ({"candidates": ["autocast"]}, "candidates: found a list"),
        ({"recipes": {"norms": (make, 0.5)}}, "'norms' among the candidates and the recipes"),
        ({"title": 5}, "title: found 5; give a text"),
        ({"progress": 5}, "progress: found 5; give a function of"),
        ({"out": ""}, "a folder; give a file"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            tuned(**({"out": tmp_path / "boost.json"} | changes))
    with pytest.raises(ValueError, match="a folder; give a file"):
        report_path(".")
    for name, report in {"boost.v1": "boost.v1", "boost.v2.json": "boost.v2", "boost.json": "boost"}.items():
        assert report_path(name).name == f"{report}.report.json"
    assert Fake.made == []
    assert not list(tmp_path.iterdir())


def test_a_factory_must_be_able_to_evaluate():
    with pytest.raises(ValueError, match="the factory has no evaluate"):
        tune(lambda seed: make(seed)[:4], drop=0.1, budget=10)
    with pytest.raises(ValueError, match="batches are empty"):
        tune(lambda seed: (*make(seed)[:3], [], lambda model: 0.0), drop=0.1, budget=10)


@pytest.mark.usefixtures("fake")
def test_an_unusable_candidate_is_reported_and_not_trained():
    report = tuned(candidates={**CANDIDATES, "wrong": {"adasum": True}})
    found = {one.candidate.name: one for one in report.findings}["wrong"]
    assert found.outcome == "not usable"
    assert "adasum" in found.reason
    assert "wrong" not in {name for name, _ in Fake.made}


@pytest.mark.usefixtures("fake")
def test_a_duplicate_is_reported_and_not_trained(tmp_path):
    given = {**CANDIDATES, "again": {"channels_last": True}}
    for resume in (False, True):
        report = tuned(tmp_path / "boost.json", candidates=given, resume=resume)
        found = {one.candidate.name: one for one in report.findings}["again"]
        assert (found.outcome, found.reason) == ("duplicate", "on this model it is the same as 'memory'")
        assert "again" not in {name for name, _ in Fake.made}
        assert report.extra == {"channels_last": True}


def test_progress_counts_the_budget(fake):
    seen: list[tuple[str, int, int]] = []
    tuned(progress=lambda phase, done, total, note="": seen.append((phase, done, total)))
    spent = [done for phase, done, _ in seen if phase == "tuning"]
    assert spent == sorted(spent)
    assert {total for phase, _, total in seen if phase == "tuning"} == {600}


def test_a_real_tuning_keeps_its_budget(tmp_path):
    torch.manual_seed(0)
    report = tune(make, drop=0.2, budget=8, out=tmp_path / "boost.json", epochs=4, seeds=3)
    assert report.state == "complete"
    assert report.spent_seconds - report.runs[-1].wall_seconds <= 8  # a busy machine may stretch the last run
    assert (tmp_path / "boost.json").is_file()
    names = [(run.name, run.seed) for run in report.runs]
    assert len(names) == len(set(names))
    assert all(found.outcome for found in report.findings)
    assert {run.seed for run in report.runs if run.name == STOCK} >= {0, 1}


def _tuned_on_ranks(folder: str, interrupted_at: int | None) -> tuple[dict[str, Any], list[tuple[str, int]], str]:
    """Tune a network that DDP averages; rank 1 is slower and has another share of the data."""
    rank = dist.get_rank()
    built: list[int] = []

    def wrapped(seed: int) -> Any:
        built.append(seed)
        if interrupted_at is not None and len(built) > interrupted_at:
            raise KeyboardInterrupt
        torch.manual_seed(seed)
        model, _, loss, loader, _ = make(seed)[:5]
        loader.inputs = loader.inputs[12 * rank :][:12]
        loader.targets = loader.targets[12 * rank :][:12]
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        batches = [(loader.inputs[at : at + 4], loader.targets[at : at + 4]) for at in (0, 4, 8)]

        def evaluate(model: Any) -> float:
            time.sleep(0.02 * rank)
            return float((model.module(loader.inputs).argmax(1) == loader.targets).float().mean())

        return model, optimizer, loss, batches, evaluate

    out = Path(folder) / "boost.json"
    given = {"norms": {"gradient_centralization": True}, "bits": {"autocast": True}}
    state = "complete"
    try:
        report = tune(wrapped, drop=0.5, budget=20, candidates=given, epochs=8, seeds=3, out=out, resume=True)
    except KeyboardInterrupt:
        state = "interrupted"
        dist.barrier()  # the first rank has written the report
        report = TuneReport.load(report_path(out))
    outcomes = {found.candidate.name: found.outcome for found in report.findings}
    return outcomes, [(run.name, run.seed) for run in report.runs], state


def _uneven() -> str:
    def wrapped(seed: int) -> Any:
        model, _, loss, loader, evaluate = make(seed)[:5]
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return model, optimizer, loss, list(loader)[: 3 + dist.get_rank()], evaluate

    try:
        tune(wrapped, drop=0.5, budget=20)
    except RankDisagreementError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_ranks_with_different_numbers_of_batches_are_told_so():
    first, second = run_ranks(_uneven, 2)
    assert first == second
    assert "the number of steps of a run is 3 on rank 0 and 4 on rank 1" in first
    assert first.endswith("Give all ranks equally many batches.")


@pytest.mark.dist
def test_two_ranks_tune_together_and_resume(tmp_path):
    first, second = run_ranks(_tuned_on_ranks, 2, str(tmp_path), 6)
    assert first == second
    assert first[2] == "interrupted"
    assert TuneReport.load(tmp_path / "boost.report.json").state == "interrupted"
    first, second = run_ranks(_tuned_on_ranks, 2, str(tmp_path), None)
    assert first == second
    assert first[2] == "complete"
    assert len(first[1]) == len(set(first[1]))
    assert {("stock", 1), ("norms", 1), ("bits", 0)} <= set(first[1])
    assert all(first[0].values())
    assert len(TuneReport.load(tmp_path / "boost.report.json").stock_losses()) == 20


def test_a_recipe_is_trained_by_its_own_factory_for_its_share(tmp_path):
    built: list[str] = []

    def other(seed: int) -> Any:
        built.append("other")
        return make(seed)

    given = {"drop": 0.9, "budget": 12, "epochs": 4, "seeds": 3, "candidates": {}, "out": tmp_path / "a.json"}
    report = tune(make, recipes={"half": (other, 0.5)}, **given)
    (found,) = report.findings
    assert found.candidate.recipe
    assert found.outcome is not None
    assert {run.steps for run in report.runs if run.name == "half"} == {12}
    assert len(built) == 2 + sum(run.name == "half" for run in report.runs)
    assert report.extra == {}
    with pytest.raises(ValueError, match=r"recipes 'half' \(0.5\); give the same ones"):
        tune(make, resume=True, **given)

    def slower(seed: int) -> Any:
        model, optimizer, *rest = make(seed)
        optimizer.param_groups[0]["lr"] = 1e-4
        return model, optimizer, *rest

    with pytest.raises(ValueError, match="with the same optimizers and start weights"):
        tune(make, recipes={"half": (slower, 0.5)}, resume=True, **given)


def endless() -> Any:
    while True:
        yield torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)


class OneShot:
    def __init__(self) -> None:
        self.batches = (batch for batch in list(make(0)[3]))

    def __iter__(self) -> Any:
        return self.batches


def test_what_a_factory_returns_is_checked():
    def tuning_with(place: int, value: Any, **more: Any) -> None:
        def changed(seed: int) -> Any:
            parts = list(make(seed)[:5])
            parts[place] = value() if place == 3 else value
            return tuple(parts)

        tune(changed, **({"drop": 0.1, "budget": 5, "candidates": CANDIDATES} | more))

    for batches, said in (
        (endless, r"did not end \(.* longer than 1.5 s to read"),
        (OneShot, "gave nothing in pass 2"),
        (lambda: [1], "found int"),
    ):
        with pytest.raises(FactoryError, match=said):
            tuning_with(3, batches, budget=1.5, epochs=2)
    for place, value, said in (
        (4, lambda model: None, "evaluate returned a NoneType; needed: a number"),
        (4, lambda model: {"accuracy": 0.5}, "evaluate returned a dict"),
        (2, lambda outputs, targets: (outputs.sum(), 1), "loss returned a tuple; needed: a tensor"),
    ):
        with pytest.raises(FactoryError, match=said):
            tuning_with(place, value)
    parts = make(0)
    with pytest.raises(ValueError, match="the same parameter twice"):
        tune(lambda seed: parts, drop=0.1, budget=5)


@pytest.mark.usefixtures("fake")
def test_nothing_is_overwritten(tmp_path, fake):
    own = tmp_path / "own.json"
    own.write_text('{"mine": 1}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"own\.report\.json is missing"):
        tuned(own)
    out = tmp_path / "boost.json"
    tuned(out)
    with pytest.raises(ValueError, match=r"boost\.report\.json exists; continue it with resume=True"):
        tuned(out)
    with pytest.raises(ValueError, match="a folder; give a file"):
        tuned(tmp_path)
    with pytest.raises(ValueError, match="cannot be a folder"):
        tuned(own / "boost.json")
    assert own.read_text(encoding="utf-8") == '{"mine": 1}'


def test_a_loader_that_does_not_know_its_length_is_counted():
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(list(make(0)[3]))

    def streamed(seed: int) -> Any:
        parts = make(seed)
        return (*parts[:3], torch.utils.data.DataLoader(Stream(), batch_size=None), parts[4])

    report = tune(streamed, drop=0.5, budget=5, seeds=3, candidates={"bits": {"autocast": True}})
    assert report.steps == 6
