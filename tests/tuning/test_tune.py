"""A whole tuning: what it writes, what it refuses, and how it continues."""

from __future__ import annotations

import gc
import json
import math
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from tests.tuning.test_training import Loader, make
from torchboost import boost, tune
from torchboost.errors import FactoryError, IncompatibleError
from torchboost.registry import LEVELS
from torchboost.tuning import tune as tuning
from torchboost.tuning import workers
from torchboost.tuning.report import STOCK, Candidate, Run, TuneReport, headline
from torchboost.tuning.results import RESULTS, result_rows, results_in
from torchboost.tuning.runs import Job, Watch
from torchboost.tuning.training import TriedLevers
from torchboost.tuning.tune import report_path
from torchboost.tuning.workers import Shares

CANDIDATES = {"memory": {"channels_last": True}, "norms": {"gradient_centralization": True}}


class Fake:
    """Trainings that take no time: the metric and the seconds are given. ``memory`` needs half of the steps."""

    stop: int | None = None
    trained: ClassVar[list[tuple[str, int]]] = []
    needed: ClassVar[dict[str, float]] = {"memory": 0.5}

    def __init__(self, **given: Any) -> None:
        self.steps = given["steps"]

    def __call__(self, candidate: Candidate, seed: int, watch: Watch) -> Run:
        if Fake.stop is not None and len(Fake.trained) == Fake.stop:
            raise KeyboardInterrupt
        Fake.trained.append((candidate.label, seed))
        needed = Fake.needed.get(candidate.name, 1.0)
        loss = {"norms": 0.2, "memory": -0.01}.get(candidate.name, 0.0)
        loss += max(0.0, needed - candidate.share) + 0.02 * abs(math.log2(candidate.rate))
        metric = 0.9 - loss + 0.001 * (seed % 3)
        times = {"setup_seconds": 0.0, "seconds": candidate.share, "wall_seconds": candidate.share}
        steps = max(2, round(candidate.share * self.steps))
        return Run(name=candidate.label, seed=seed, steps=steps, metric=metric, **times)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(tuning, "Training", Fake)
    monkeypatch.setattr(Fake, "stop", None)
    monkeypatch.setattr(Fake, "trained", [])
    return Fake


def tuned(out: Path | None = None, factory: Callable[[int], Any] = make, **more: Any) -> TuneReport:
    given = {"drop": 0.05, "budget": "10m", "epochs": 2, "candidates": CANDIDATES, "out": out, **more}
    return tune(factory, **given)


def changed(place: int, value: Callable[[], Any]) -> Callable[[int], Any]:
    """The factory with another part at a place; without evaluate if it has none."""

    def factory(seed: int) -> Any:
        parts = list(make(seed)[:5])
        parts[place] = value()
        return tuple(parts if parts[4] is not None else parts[:4])

    return factory


def test_levers_that_change_no_number_need_no_test(fake, monkeypatch, tmp_path):
    """Nothing saves time here, so nothing is confirmed. The exact ones are on all the same."""
    found = TriedLevers(["autocast", "fused_optimizer"], ["fused_optimizer"], {})
    monkeypatch.setattr(tuning, "try_levers", lambda *args, **kwargs: found)
    report = tuned(tmp_path / "boost.json", candidates=None)
    assert report.whole == [] or report.whole[-1].outcome != "kept"
    assert report.extra == {"fused_optimizer": True}
    assert headline(report).startswith("Turn on fused_optimizer: a step is faster and the same but for rounding.")
    (line,) = result_rows(results_in([tmp_path]))
    assert line[RESULTS.index("turned on")] == "fused_optimizer"
    model, optimizer = make(0)[:2]
    assert list(boost(model, optimizer, config=tmp_path / "boost.json").attached) == ["fused_optimizer"]


def test_the_configuration_turns_on_what_passed(tmp_path, fake):
    out, seen = tmp_path / "boost.json", []
    candidates = {**CANDIDATES, "wrong": {"adasum": True}, "again": {"channels_last": True}}
    for resume in (False, True):
        report = tuned(out, candidates=candidates, resume=resume, progress=lambda *told: seen.append(told[:3]))
        assert (report.state, report.steps, report.extra) == ("complete", 12, {"channels_last": True})
        assert report.recipe == {"length": 0.5}
        outcomes = {finding.candidate.name: finding.outcome for finding in report.findings}
        assert outcomes == {
            STOCK: "not chosen",
            "memory": "kept",
            "norms": "no gain",
            "wrong": "not usable",
            "again": "duplicate",
        }
        reasons = {finding.candidate.name: finding.reason for finding in report.findings}
        assert "adasum" in reasons["wrong"]
        assert reasons["again"] == "on this model it is the same as 'memory'"
    assert not [label for label, _ in fake.trained if label.startswith(("wrong", "again"))]
    assert TuneReport.load(report_path(out)) == report
    spent = [done for phase, done, total in seen if (phase, total) == ("tuning", 600)]
    assert [told for told in seen if told[0] == "plan"] == [("plan", 0, 1)] * 2
    assert len(spent) == len(seen) - 2
    assert spent == sorted(spent)
    written = json.loads(out.read_text(encoding="utf-8"))
    assert (written["extra"]["channels_last"], written["extra"]["gradient_centralization"]) == ({}, False)
    boosted = boost(*make(0)[:2], config=out, total_steps=100)
    assert (list(boosted.attached), boosted.steps) == (["channels_last"], 50)


def test_notes_say_how_the_search_was_made(tmp_path, fake):
    plain, fixed = tuned(), tuned(rate="fixed")
    assert plain.rate is not None
    assert fixed.rate is None
    assert any("has no validate" in note for note in plain.notes)
    large = [note for report in (plain, tuned(drop=0.5)) for note in report.notes if "the accepted drop" in note]
    assert len(large) == 1
    assert "0.5, is more than a quarter of stock's metric, 0.9" in large[0]
    assert any("kept as it is, as asked" in note for note in fixed.notes)
    validated = tuned(factory=lambda seed: (*make(seed), lambda model: 0.5))
    assert not any("validate" in note for note in validated.notes)

    def cycled(seed: int) -> Any:
        cycle = lambda o, n: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=n)  # noqa: E731
        return (*make(seed)[:5], cycle)

    fake.trained.clear()
    report = tuned(factory=cycled, candidates=None, budget="20m")
    assert report.rate is None
    assert any("the schedule writes rates of its own" in note for note in report.notes)
    muon = next(finding for finding in report.findings if finding.candidate.name == "Muon")
    assert muon.outcome == "not usable"
    assert "max_lr=[group['lr']" in muon.reason
    assert not [label for label, _ in fake.trained if "times the rate" in label and "schedule-free" not in label]


def test_a_factory_that_gives_something_else_for_the_same_seed_is_noted(tmp_path, fake):
    """Here each call makes the data of the one before smaller, as an in-place division of cached data does."""
    cached = Loader()

    def shrinking(seed: int) -> Any:
        cached.inputs.mul_(0.5)
        return (*make(seed)[:3], cached, *make(seed)[4:])

    def partly(seed: int) -> Any:
        parts = make(seed)
        next(parts[0].children()).eval()
        return parts

    assert any("with layers in evaluation mode" in note for note in tuned(factory=partly).notes)
    said = [note for note in tuned(factory=shrinking).notes if "for the same seed" in note]
    assert len(said) == 1
    assert said[0].startswith("make returned other data when it was called again for the same seed")
    assert not any("for the same seed" in note for note in tuned().notes)


def test_every_interruption_leaves_a_report_that_is_resumed_without_repetition(tmp_path, fake):
    whole = tuned(tmp_path / "whole.json")
    count = len(fake.trained)
    for stop in range(0, count, 2):
        out = tmp_path / f"{stop}.json"
        fake.trained.clear()
        fake.stop = stop
        with pytest.raises(KeyboardInterrupt):
            tuned(out)
        partial = TuneReport.load(report_path(out))
        assert (partial.state, len(partial.runs), out.exists()) == ("interrupted", stop, False)
        fake.stop = None
        report = tuned(out, resume=True)
        assert len(fake.trained) == count
        timeless = {"spent_seconds": 0.0, "planned": None, "environment": whole.environment}
        found, wanted = (one.model_copy(update=timeless).model_dump() for one in (report, whole))
        assert {key: value for key, value in found.items() if value != wanted[key]} == {}


def test_what_the_search_adds_to_an_optimizer_is_written_and_found_again(tmp_path, fake, monkeypatch):
    """The planted optimizer needs 0.6 of the steps, and 0.3 with centralised gradients."""
    centralized = {"gradient_centralization": LEVELS["O2"]["gradient_centralization"]}
    recipes = [
        Candidate(name=STOCK),
        Candidate(name="Muon", recipe={"optimizer": "muon", "lr": 0.02}),
        Candidate(name="centralized", extra=centralized),
    ]
    monkeypatch.setattr(tuning, "standard_recipes", lambda levers, optimizer: recipes)
    monkeypatch.setattr(tuning, "try_levers", lambda *args, **kwargs: TriedLevers([], [], {}))
    monkeypatch.setattr(Fake, "needed", {"Muon": 0.6, "Muon with centralized": 0.3})
    whole = tuned(tmp_path / "whole.json", candidates=None, budget="20m")
    assert whole.recipe == {"optimizer": "muon", "lr": 0.02, "length": 0.3}
    assert whole.extra == centralized
    assert [finding.candidate.name for finding in whole.findings] == [one.name for one in recipes] + [
        "Muon with centralized"
    ]
    model, optimizer = make(0)[:2]
    boosted = boost(model, optimizer, config=tmp_path / "whole.json", total_steps=100)
    assert (list(boosted.attached), boosted.steps) == (["gradient_centralization"], 30)
    count = len(fake.trained)
    for stop in range(0, count, 5):
        fake.trained.clear()
        fake.stop = stop
        with pytest.raises(KeyboardInterrupt):
            tuned(tmp_path / f"{stop}.json", candidates=None, budget="20m")
        fake.stop = None
        report = tuned(tmp_path / f"{stop}.json", candidates=None, budget="20m", resume=True)
        assert len(fake.trained) == count
        assert (report.recipe, report.extra, report.findings) == (whole.recipe, whole.extra, whole.findings)


def test_a_tuning_begins_where_an_earlier_one_ended(tmp_path, fake):
    first, out = tuned(tmp_path / "first.json"), tmp_path / "second.json"
    usual = list(fake.trained)
    fake.trained.clear()
    second = tuned(out, prior=[tmp_path / "first.report.json"], title="other")
    assert (second.extra, second.recipe) == (first.extra, first.recipe)
    assert len(fake.trained) < len(usual)
    assert second.starts["memory"].model_dump() == {"rate": 1.0, "share": 0.5}
    fresh = [{seed for _, seed in runs if seed >= 1000} for runs in (usual, fake.trained)]
    assert fresh[0] & fresh[1] == set()
    assert "the search began from 'a model'; the seeds of the confirmation are others" in second.notes
    # It is continued without its prior and with it, not with another.
    fake.trained.clear()
    fake.stop, cut = 5, tmp_path / "cut.json"
    with pytest.raises(KeyboardInterrupt):
        tuned(cut, prior=first, title="other")
    fake.stop = None
    again = tuned(cut, title="other", resume=True)
    assert (again.runs, again.findings, again.whole) == (second.runs, second.findings, second.whole)
    fake.trained.clear()
    for prior in ((), first):
        assert tuned(out, prior=prior, title="other", resume=True).recipe == second.recipe
    less = first.model_copy(update={"findings": first.findings[:1]})
    with pytest.raises(ValueError, match="prior: found other reports"):
        tuned(out, prior=less, title="other", resume=True)
    with pytest.raises(ValueError, match=r"made with prior \['a model'\], but now it is \['other'\]"):
        tuned(out, prior=second, title="other", resume=True)
    assert fake.trained == []
    none = tuned(prior=first.model_copy(update={"findings": []}))
    assert "nothing was taken from 'a model', in which no recipe was searched" in none.notes


class FakeWorkers:
    """Two processes of which each takes 0.1 s longer than the last."""

    def __init__(self, training: Fake, processes: int, share: Shares) -> None:
        self.training = training
        assert (processes, share, torch.get_num_threads()) == (2, Shares(1, ()), 1)

    def __enter__(self) -> FakeWorkers:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Run]:
        for job in jobs:
            yield self.training(*job).model_copy(update={"charged_seconds": 0.1})


def test_a_tuning_of_several_processes_is_the_same_and_is_continued_by_one(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(workers, "usable_cores", lambda: 2)
    monkeypatch.setattr(tuning, "Workers", None)
    alone = tuned()
    monkeypatch.setattr(tuning, "Workers", FakeWorkers)
    began = time.perf_counter()
    out, note = tmp_path / "boost.json", "several runs were made at the same time (threads of each: 1)"
    for processes in (2, 1, 2):
        fake.trained.clear()
        fake.stop = 4
        with pytest.raises(KeyboardInterrupt):
            tuned(out, processes=processes, resume=True)
        saved = TuneReport.load(report_path(out))
        before = saved.spent_seconds - sum(0.1 if run.charged_seconds else run.wall_seconds for run in saved.runs)
        assert 0 <= before <= time.perf_counter() - began  # the rest is that of the trial, which is counted once
    assert len(saved.runs) == 12
    fake.stop = None
    report = tuned(out, processes=2, resume=True)
    assert (report.extra, report.recipe, report.rate) == (alone.extra, alone.recipe, alone.rate)
    assert (report.findings, report.whole) == (alone.findings, alone.whole)
    assert {run.charged_seconds for run in report.runs} == {None, 0.1}
    assert {(run.name, run.seed) for run in report.runs} >= {(run.name, run.seed) for run in alone.runs}
    for one, told in ((alone, False), (report, True), (tuned(out, resume=True), True)):
        assert any(said.startswith(note) for said in one.notes) is told


def test_ctrl_c_inside_the_garbage_collector_ends_a_tuning(tmp_path, fake, monkeypatch):
    def collected(self: Fake, *_: Any) -> None:
        part = Fake(steps=0)  # with a cycle
        part.itself = part  # pyright: ignore[reportAttributeAccessIssue]
        weakref.finalize(part, signal.raise_signal, signal.SIGINT)
        del part
        gc.collect()
        for _ in range(1000):
            time.sleep(0.01)

    monkeypatch.setattr(fake, "__call__", collected)
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path / "boost.json")
    assert TuneReport.load(report_path(tmp_path / "boost.json")).state == "interrupted"


class Doubled(Loader):
    """The same model on other data."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = 2 * self.inputs


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
        ({"rate": "fixed"}, "was made with rate_search True, but now it is False"),
        ({"candidates": {**CANDIDATES, "memory": {"autocast": True}}}, "other candidates, or settings of them"),
        ({"factory": other}, "fingerprint"),
    ):
        with pytest.raises(ValueError, match=said):
            tuned(out, resume=True, **changes)
    with monkeypatch.context() as patch:  # the factory reads another file
        patch.setattr("tests.tuning.test_training.Loader", Doubled)
        with pytest.raises(ValueError, match="was made with other data"):
            tuned(out, resume=True)
    assert saved.source
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "source_of", lambda make: "another")
        with pytest.raises(ValueError, match="another version of the factory's file"):
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
    parts = make(0)
    for changes, said in (
        ({"error": "small"}, "error: found 'small'"),
        ({"error": 0.6}, r"error: found 0.6; give a number from 0.012 to below 0.5"),
        ({"error": 0.01}, r"error: found 0.01;"),
        ({"drop": 0.0}, "drop: found 0.0"),
        ({"drop": "0.5"}, "drop: found '0.5'"),
        ({"budget": "soon"}, "budget: found 'soon'"),
        ({"budget": 0}, "budget: found 0"),
        ({"epochs": 0}, "epochs: found 0"),
        ({"rate": "slow"}, "rate: found 'slow'; give 'search' or 'fixed'"),
        ({"seeds": 2}, "seeds: found 2; give a number from 3 to 100"),
        ({"total_steps": 3}, "total_steps: found 3; the runs that are made have 12 steps"),
        ({"processes": 0}, "processes: found 0"),
        ({"processes": 10_000}, r"processes: found 10000; give at most \d+, one for each core"),
        ({"total_steps": "x"}, "total_steps: found 'x'"),
        ({"candidates": {"x": {}}}, "candidates: found 'x'"),
        ({"title": 5}, "title\n"),
        ({"out": ""}, "a folder; give a file"),
        ({"factory": changed(4, lambda: None)}, "the factory has no evaluate"),
        ({"factory": changed(3, list)}, "batches are empty"),
        ({"factory": lambda seed: parts}, "the same parameter twice"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            tuned(**({"out": tmp_path / "boost.json"} | changes))
    with pytest.raises(ValueError, match="a folder; give a file"):
        report_path(".")
    for name, report in {"boost.v1": "boost.v1", "boost.v2.json": "boost.v2", "boost.json": "boost"}.items():
        assert report_path(name).name == f"{report}.report.json"
    assert Fake.trained == []
    assert not list(tmp_path.iterdir())


def test_a_real_tuning_keeps_its_budget(tmp_path):
    torch.manual_seed(0)
    report = tune(make, drop=0.2, budget=8, out=tmp_path / "boost.json", epochs=4, seeds=3)
    assert report.state == "complete"
    assert report.spent_seconds - report.runs[-1].wall_seconds <= 8  # a busy machine may stretch the last run
    assert (tmp_path / "boost.json").is_file()
    names = [(run.name, run.seed) for run in report.runs]
    assert len(names) == len(set(names))
    assert all(finding.outcome for finding in report.findings)
    assert any(run.name.startswith(STOCK) for run in report.runs)


def test_several_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(tuning.Topology, "current", lambda: SimpleNamespace(world_size=2))
    with pytest.raises(IncompatibleError, match="tune runs in one process"):
        tuned()


@pytest.mark.usefixtures("fake")
def test_nothing_is_overwritten(tmp_path):
    own = tmp_path / "own.json"
    own.write_text('{"mine": 1}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"own\.report\.json is missing"):
        tuned(own)
    out = tmp_path / "boost.json"
    tuned(out)
    with pytest.raises(ValueError, match=r"boost\.report\.json exists; continue it with resume=True \(--resume\)"):
        tuned(out)
    with pytest.raises(ValueError, match="a folder; give a file"):
        tuned(tmp_path)
    with pytest.raises(FileExistsError):
        tuned(own / "boost.json")
    assert own.read_text(encoding="utf-8") == '{"mine": 1}'


def test_two_tunings_at_the_same_time_do_not_write_to_one_file(tmp_path, fake, monkeypatch):
    """The other one begins before the first run of this one is in its report, so both found no file."""
    out, call, other = tmp_path / "boost.json", Fake.__call__, list[TuneReport]()

    def slow(self: Fake, *given: Any) -> Run:
        if not other:
            other.append(TuneReport(**{**base.model_dump(), "title": "the other one"}))
            other[0].save(report_path(out))
        return call(self, *given)

    base = tuned()
    monkeypatch.setattr(Fake, "__call__", slow)
    with pytest.raises(IncompatibleError, match=r"boost\.report\.json was written by another tuning"):
        tuned(out)
    assert TuneReport.load(report_path(out)) == other[0]
    assert not out.exists()


@pytest.mark.usefixtures("fake")
def test_ctrl_c_while_the_report_is_written_is_no_other_tuning(tmp_path, monkeypatch):
    out, save = tmp_path / "boost.json", TuneReport.save

    def stopped(self: TuneReport, path: Path) -> Path:
        written = save(self, path)
        if len(self.runs) == 3 and self.state == "running":
            signal.raise_signal(signal.SIGINT)
        return written

    monkeypatch.setattr(TuneReport, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        tuned(out)
    partial = TuneReport.load(report_path(out))
    assert (partial.state, len(partial.runs)) == ("interrupted", 3)


def test_a_better_rate_is_written_also_if_no_plan_is_confirmed(tmp_path, fake, monkeypatch):
    """Stock is better at a quarter of its rate, which nothing beats."""

    def metric(candidate: Candidate) -> float:
        return 0.9 - 0.1 * abs(math.log2(candidate.rate / 0.25)) - max(0.0, 1.0 - candidate.share)

    call = Fake.__call__
    changed = lambda self, c, s, w: call(self, c, s, w).model_copy(update={"metric": metric(c) + 0.001 * (s % 3)})  # noqa: E731
    monkeypatch.setattr(Fake, "__call__", changed)
    found = tuned(tmp_path / "boost.json", candidates={"norms": {"gradient_centralization": True}})
    assert found.rate is not None
    assert (found.rate.best, found.rate.kept) == (0.25, True)
    assert json.loads((tmp_path / "boost.json").read_text())["recipe"]["rate"] == 0.25
    assert headline(found).startswith("Train at 0.25 times your learning rate, as the configuration does. Nothing else")


@pytest.mark.usefixtures("fake")
def test_a_short_run_has_no_share_that_would_be_trained_with_more_steps_than_it_says(monkeypatch):
    monkeypatch.setattr(Fake, "needed", {"memory": 0.1})
    found = tuned(epochs=None, steps=8)
    assert min(one.candidate.share for one in found.findings) == 0.25
    with pytest.raises(FactoryError, match="found runs of 3 steps, and half of a run must have at least 2"):
        tuned(epochs=None, steps=3)


@pytest.mark.usefixtures("fake")
def test_a_loader_that_does_not_know_its_length_is_counted():
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(list(make(0)[3]))

    streamed = changed(3, lambda: torch.utils.data.DataLoader(Stream(), batch_size=None))
    assert tuned(factory=streamed, epochs=1).steps == 6


def test_a_run_may_have_a_number_of_steps_of_endless_batches(tmp_path):
    def endless() -> Any:
        while True:
            yield from make(0)[3]

    for epochs in (2, 1):
        with pytest.raises(ValueError, match=f"found epochs={epochs} and steps=4; give one of them"):
            tuned(epochs=epochs, steps=4)
    found = tuned(factory=changed(3, endless), epochs=None, steps=4, budget="1s")
    assert found.steps == 4
    assert {run.steps for run in found.runs if run.name == STOCK} <= {4}
