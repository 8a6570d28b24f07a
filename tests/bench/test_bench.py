"""``run_bench``: equal terms, resuming, deciding, and what it says of configurations."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.optim import Optimizer

from torchboost.algorithms.compile import Compile
from torchboost.bench import bench
from torchboost.bench.bench import run_bench
from torchboost.bench.contestants import Recipe, plan_for
from torchboost.bench.factory import Factory, Parts
from torchboost.core.algorithm import Algorithm, Attachment, Target
from torchboost.errors import FactoryError, IncompatibleError
from torchboost.measure.evidence import BenchReport, Contestant, Curve
from torchboost.measure.statistics import SequentialTest
from torchboost.measure.stopwatch import Clock
from torchboost.plan import Dropped, Plan

DRAW = torch.Generator().manual_seed(0)
IMAGES, LABELS = torch.randn(32, 3, 8, 8, generator=DRAW), torch.randint(4, (32,), generator=DRAW)
BATCHES = list(zip(IMAGES.split(8), LABELS.split(8), strict=True))


def accuracy(model: Callable[..., Any]) -> float:
    return float((model(IMAGES).argmax(1) == LABELS).float().mean())


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
    )


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)


def tiny(*, loss: Any = F.cross_entropy, evaluate: Any = accuracy, train: bool = True, **facts: Any) -> Factory:
    def make(seed: int) -> Parts:
        model = network().train(train)
        return Parts(model, sgd(model), loss, BATCHES, evaluate, lambda o, n: torch.optim.lr_scheduler.LinearLR(o))

    known = {"name": "tiny", "title": "tiny", "epochs": 2, "metric": "accuracy", "drops": (0.005, 0.03)}
    return Factory(make=make, **(known | facts))


@dataclass(frozen=True, kw_only=True)
class Halved(Algorithm):
    """Halves every gradient, which the weights show and nothing else."""

    name: ClassVar[str] = "halved"

    def attach(self, target: Target) -> Attachment:
        def halve(optimizer: Optimizer, args: object, kwargs: object) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5)

        return Attachment(target.optimizer.register_step_pre_hook(halve))


def planner_of(*algorithms: Algorithm) -> Any:
    dropped = (Dropped("less_bn", "not today"),)
    return lambda level, added, model, optimizer, total: Plan(
        level=level, mode="manual", algorithms=algorithms, dropped=dropped
    )


HALVING = planner_of(Halved())


def benched(factory: Factory | None = None, *contestants: str, **settings: Any) -> BenchReport:
    known = {"pairs": 1, "epochs": 1, "planner": HALVING}
    return run_bench(factory or tiny(), contestants=contestants, **(known | settings))


def by_name(report: BenchReport) -> dict[str, Contestant]:
    return {contestant.name: contestant for contestant in report.contestants}


def learned(contestant: Contestant) -> list[Curve]:
    """The curves without the memory, which varies with what the process did before."""
    return [curve.model_copy(update={"peak_bytes": None}) for curve in contestant.curves]


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A clock of which every reading is one second after the one before. Memory, which takes long, in one test only."""

    class Ticks:
        @staticmethod
        def of(device: torch.device) -> Clock:
            return Clock(read=map(float, itertools.count(1)).__next__)

    monkeypatch.setattr(bench, "Clock", Ticks)
    if "equal_terms" not in request.node.name:
        monkeypatch.setattr(bench, "PeakMemory", lambda device: nullcontext(SimpleNamespace(bytes=None)))


def test_a_benchmark_times_and_trains_every_contestant_on_equal_terms(tmp_path: Path) -> None:
    kinds = {"stock": "stock", "hand": "hand", "O1": "level", "stock+halved": "algorithm"}
    phases: dict[str, tuple[int, int]] = {}

    def note(phase: str, done: int, total: int, note: str = "") -> None:
        phases[phase] = (done, total)

    out = tmp_path / "report.json"
    report = benched(None, *kinds, pairs=4, seeds=2, epochs=None, out=out, progress=note)
    assert phases == {"data": (1, 1), "warm-up": (4, 4), "timing": (4, 4), "training": (16, 16)}
    assert {c.name: c.kind for c in report.contestants} == kinds
    for contestant in report.contestants:
        assert len(contestant.samples) == 4
        assert [curve.seed for curve in contestant.curves] == [0, 1]
        for curve in contestant.curves:
            assert (curve.epochs, curve.seconds, curve.setup_seconds) == ([1.0, 2.0], [1.0, 2.0], 2.0)
            assert all(0 <= value <= 1 for value in curve.metric)
            assert curve.peak_bytes is None or curve.peak_bytes > 0
    found = by_name(report)
    assert [r.baseline for r in found["O1"].ratios] == ["stock", "hand"]
    assert found["O1"].ratios[0].interval.mid == pytest.approx(1.0)
    assert found["O1"].dropped[0].reason == "not today"
    assert [q.baseline for q in found["O1"].quality] == ["stock"]
    assert found["stock"].quality == []
    assert found["O1"].curves[0].train_loss == found["stock+halved"].curves[0].train_loss
    assert (report.epochs, report.train_samples, report.batch, report.model) == (2, 32, 8, "Sequential")
    assert ["fewer than six rounds" in said for said in report.notes] == [True]
    assert BenchReport.load(out) == report


def test_the_metric_is_judged_by_the_drop_of_the_level_if_its_units_are_known(tmp_path: Path) -> None:
    levels = by_name(benched(tiny(drops=(0.011, 0.022)), "stock", "O1", "O2", seeds=2))
    assert (levels["O1"].quality[0].margin, levels["O2"].quality[0].margin) == (0.011, 0.022)
    for higher in (True, False):  # what evaluate returns is better if higher, whatever sign a report gives it
        values = iter([0.5, 0.7, 0.5, 0.7])
        factory = tiny(higher_is_better=higher, metric="metric", evaluate=lambda model, values=values: next(values))
        assert by_name(benched(factory, "stock", "O0", seeds=2))["O0"].quality[0].difference.mid == pytest.approx(0.2)
    broken = benched(tiny(loss=lambda outputs, targets: outputs.sum() * float("nan")), "stock", "O0", seeds=2)
    for report in (broken, BenchReport.model_validate_json(broken.model_dump_json())):
        assert not by_name(report)["O0"].quality[0].passed
    unknown, out = tiny(drops=None), tmp_path / "report.json"
    assert by_name(benched(unknown, "stock", "O1", seeds=2, out=out))["O1"].quality == []
    with pytest.raises(ValueError, match=r"--decide: the levels promise points of accuracy.*tune --drop"):
        benched(unknown, "stock", "O1", decide=600.0)
    with pytest.raises(ValueError, match="measured with metric_name 'accuracy', but now it is 'metric'"):
        benched(replace(unknown, metric="metric"), "stock", "O1", out=out, resume=True)


def test_step_times_alone() -> None:
    for report in (
        benched(tiny(evaluate=None), "stock", pairs=6, epochs=None),
        benched(None, "stock", pairs=6, epochs=0),
    ):
        assert report.contestants[0].curves == []
        assert len(report.contestants[0].samples) == 6
        assert (report.epochs, report.notes) == (0, [])
    with pytest.raises(ValueError, match="has no evaluate"):
        benched(tiny(evaluate=None), "stock", epochs=2)


def test_levels_that_turned_on_the_same_are_noted(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    settings: dict[str, Any] = {"pairs": 6, "epochs": 0, "out": out}
    report = benched(None, "stock", "O1", "O2", "stock+halved", **settings)
    assert report.notes == [f"O1 and O2 {bench.SAME}"]
    report = benched(None, "O0", resume=True, **settings)
    assert report.notes == [f"O1, O2 and O0 {bench.SAME}"]

    def planner(level: str, added: Any, model: Any, optimizer: Any, total_steps: int) -> Plan:
        return Plan(level=level, mode="auto", algorithms=(Compile(backend="eager"),) if level == "O2" else ())

    assert benched(None, "O1", "O2", planner=planner, pairs=6, epochs=0).notes == []


def test_an_interrupted_run_continues_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(out: Path, *contestants: str) -> BenchReport:
        return benched(None, *contestants, seeds=2, out=out, resume=True, planner=plan_for)

    whole = run(tmp_path / "whole.json", "stock", "O0")
    original, calls = bench._Session.curve, 0

    def interrupted(*args: Any) -> Curve:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(bench._Session, "curve", interrupted)
    out = tmp_path / "report.json"
    with pytest.raises(KeyboardInterrupt):
        run(out, "stock", "O0")
    assert [len(c.curves) for c in BenchReport.load(out).contestants] == [1, 1]
    continued = run(out, "stock", "O0")
    assert calls == 3 + 2
    assert [learned(c) for c in continued.contestants] == [learned(c) for c in whole.contestants]
    assert [c.quality for c in continued.contestants] == [c.quality for c in whole.contestants]
    assert run(out, "stock", "O0") == continued
    assert calls == 5
    joined = run(out, "hand")  # a new contestant: all are timed again
    assert [c.name for c in joined.contestants] == ["stock", "O0", "hand"]
    assert joined.contestants[0].curves == continued.contestants[0].curves
    assert joined.contestants[2].ratios[0].baseline == "stock"


def test_more_rounds_are_timed_if_a_resumed_report_has_fewer(tmp_path: Path) -> None:
    out, kept = tmp_path / "report.json", []
    for pairs, rounds, few in ((2, 2, True), (6, 6, False), (3, 6, False)):
        report = benched(None, "stock", "O1", pairs=pairs, seeds=1, out=out, resume=True)
        assert [len(c.samples) for c in report.contestants] == [rounds] * 2
        assert [r.pairs for r in by_name(report)["O1"].ratios] == [rounds]
        assert (bench.FEW_ROUNDS in report.notes) is few
        kept.append([c.curves for c in report.contestants])
    assert kept[0] == kept[1] == kept[2]


def test_new_times_of_other_switches_than_the_curves_have_are_noted(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    benched(None, "stock", "O1", seeds=1, out=out)
    report = benched(None, "stock", "O1", "O0", seeds=1, out=out, resume=True, planner=planner_of())
    assert f"O1, earlier seeds: {bench.CHANGED.format('halved', 'nothing')}" in report.notes
    assert not any(note.startswith("stock") for note in report.notes)


def test_a_report_of_something_else_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factory, out = tiny(source="before"), tmp_path / "report.json"
    settings: dict[str, Any] = {"out": out, "epochs": 0}
    benched(factory, "stock", **settings)
    benched(factory, "stock", resume=True, **settings)
    with pytest.raises(ValueError, match=r"measured with epochs 0, but now it is 2; .*another file"):
        benched(factory, "stock", out=out, epochs=2, resume=True)
    with pytest.raises(ValueError, match="another version of the factory's file"):
        benched(replace(factory, source="after"), "stock", resume=True, **settings)

    def remade(change: Callable[[Any], Parts]) -> Factory:
        return replace(factory, make=lambda seed: change(factory.make(seed)))

    slower = remade(lambda parts: parts._replace(optimizer=torch.optim.SGD(parts.model.parameters(), lr=0.2)))
    doubled = remade(lambda parts: parts._replace(batches=[(2 * inputs, labels) for inputs, labels in BATCHES]))
    varying = remade(lambda parts: parts._replace(batches=[(x * time.perf_counter(), y) for x, y in BATCHES]))
    for other, said in ((slower, "other model or optimizer"), (doubled, r"other data \(data .*Restore what")):
        with pytest.raises(ValueError, match=said):
            benched(other, "stock", resume=True, **settings)
    benched(varying, "stock", resume=True, **settings)  # no call of it has the data of another
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
    with pytest.raises(ValueError, match="instructions"):
        benched(factory, "stock", resume=True, **settings)


def test_contestants_are_checked_before_anything_is_built() -> None:
    def never(seed: int) -> object:
        raise AssertionError("the factory was called")

    factory = replace(tiny(), make=never)
    for names, settings, message in (
        (("stock", "O3"), {}, "found 'O3'"),
        (("stock", "stock"), {}, "each once"),
        ((), {}, "at least one"),
        (("stock",), {"seeds": -1}, "seeds=-1"),
        (("hand", "O1"), {"decide": 60.0}, "--decide: found .* without stock"),
    ):
        with pytest.raises(ValueError, match=message):
            benched(factory, *names, **settings)


def test_the_loss_of_a_curve_is_smoothed_and_corrected_for_its_start() -> None:
    assert bench._smoothed([3.0] * 5) == pytest.approx(3.0)
    assert bench._smoothed([0.0, 1.0]) == pytest.approx(0.05 / (0.05 * 0.95 + 0.05))


def test_a_loss_that_is_not_finite_is_no_divergence_if_the_weights_are() -> None:
    unlabelled = [(IMAGES[:8], torch.full((8,), -100)), *BATCHES]  # the mean of no loss is NaN, its gradient 0

    def make(seed: int) -> Parts:
        model = network()
        model.register_buffer("mask", torch.full((2, 2), -torch.inf))
        return Parts(model, sgd(model), F.cross_entropy, unlabelled, accuracy)

    (curve,) = benched(replace(tiny(), make=make), "stock", seeds=1, epochs=2).contestants[0].curves
    assert curve.final == curve.metric[-1]
    assert min(curve.train_loss) > 0
    sound = [torch.ones(1)] * 2  # a loss may have one axis
    lost = torch.full((1,), torch.nan)
    assert bench._train_loss([*sound, lost], 1, nn.Linear(1, 1)) == pytest.approx(1.0)
    assert math.isnan(bench._train_loss([*sound, lost], 2, nn.Linear(1, 1)))


def test_evaluation_gets_a_module_and_compiles_nothing() -> None:
    seen: list[tuple[bool, int]] = []

    def evaluate(model: nn.Module) -> float:
        before = counters["stats"]["unique_graphs"]
        model(IMAGES)
        seen.append((model.training, counters["stats"]["unique_graphs"] - before))
        return 0.5

    planner = planner_of(Compile(backend="eager"))
    benched(tiny(evaluate=evaluate), "stock", "stock+compile", seeds=1, planner=planner)
    assert seen == [(False, 0)] * 2


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> Callable[..., BenchReport]:
    """Benchmark with given final metrics per contestant and seed, until every promise is decided."""

    def run(metrics: dict[str, list[float]], losses: Sequence[float] = range(99), **more: Any) -> BenchReport:
        def curve(session: Any, name: str, seed: int, share: Any) -> Curve:
            metric, loss = metrics[name][seed % len(metrics[name])], losses[seed % len(losses)]
            return Curve(seed=seed, epochs=[1], seconds=[1], train_loss=[loss], metric=[metric])

        monkeypatch.setattr(bench._Session, "curve", curve)
        return benched(None, *metrics, **({"decide": 600.0} | more))

    return run


def seeds_of(report: BenchReport) -> dict[str, int]:
    return {contestant.name: len(contestant.curves) for contestant in report.contestants}


CLOSE = {"stock": [0.98, 0.981, 0.982], "O1": [0.9805, 0.9815, 0.982]}


def test_seeds_are_added_until_every_promise_is_decided(decided: Callable[..., BenchReport]) -> None:
    noisy = [0.980, 0.982, 0.979, 0.981]
    clear = {"stock": noisy, "hand": noisy, "O1": [value + 0.0005 for value in noisy], "O2": [0.6, 0.61, 0.6, 0.63]}
    report = decided(clear)
    found, counts = by_name(report), seeds_of(report)
    assert found["O1"].quality[0].passed
    assert not found["O2"].quality[0].passed
    assert found["O2"].quality[0].difference.high < -0.03
    assert counts["hand"] == bench.FEW_SEEDS
    assert counts["stock"] >= counts["O1"] >= 3
    assert bench.SEQUENTIAL in report.notes


def test_what_cannot_be_decided_ends_after_the_last_seed_or_in_time(decided: Callable[..., BenchReport]) -> None:
    middle = {"stock": [0.98, 0.97], "O1": [0.97, 0.976, 0.977, 0.962]}  # near the drop of half a point
    report = decided(middle)
    assert seeds_of(report)["O1"] <= bench.MOST_SEEDS
    assert not by_name(report)["O1"].quality[0].passed
    assert seeds_of(decided(middle, decide=0.0)) == {"stock": bench.FEW_SEEDS, "O1": bench.FEW_SEEDS}


def test_a_training_with_other_levers_than_the_step_times_is_noted() -> None:
    plans = itertools.chain([HALVING], itertools.repeat(planner_of()))

    def planner(*args: Any) -> Plan:
        return next(plans)(*args)

    notes = benched(None, "O1", planner=planner, pairs=6, seeds=1).notes
    assert notes == [f"O1, seed 0: {bench.CHANGED.format('nothing', 'halved')}"]
    assert benched(None, "O1", pairs=6, seeds=1).notes == []


def test_a_decision_about_some_contestants_waits_for_no_other(
    decided: Callable[..., BenchReport], tmp_path: Path
) -> None:
    out = tmp_path / "report.json"
    undecided = {"O2": [0.95, 0.96]}
    decided(CLOSE | undecided, decide=0.0, out=out)
    counts = seeds_of(decided(CLOSE, out=out, resume=True))
    assert counts == {"stock": counts["O1"], "O1": counts["O1"], "O2": bench.FEW_SEEDS}


def test_the_progress_of_a_decision_is_never_above_its_total() -> None:
    seen: list[tuple[int, int]] = []

    def note(phase: str, done: int, total: int, note: str = "") -> None:
        if phase == "training":
            seen.append((done, total))

    benched(None, "stock", "O1", epochs=3, decide=0.0, progress=note)
    assert len(seen) == 2 * bench.FEW_SEEDS * 3
    assert all(done <= total for done, total in seen)


def test_a_decision_is_resumed_and_stays_sequential(decided: Callable[..., BenchReport], tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{name}.json" for name in ("first", "second", "third"))
    for out in (first, second):
        decided(CLOSE, decide=0.0, out=out)
    report = decided(CLOSE, out=first, resume=True)
    assert by_name(report)["O1"].quality[0].passed
    assert [curve.seed for curve in by_name(report)["O1"].curves] == list(range(seeds_of(report)["O1"]))
    report = decided(CLOSE, decide=None, seeds=4, out=second, resume=True)  # without decide
    assert bench.SEQUENTIAL in report.notes
    look = SequentialTest(margin=0.005, most=bench.MOST_SEEDS).look([0.0005, 0.0005, 0.0, 0.0005])
    assert by_name(report)["O1"].quality[0].difference.low == pytest.approx(look.difference.low)
    fixed = decided(CLOSE, decide=None, seeds=4, out=third)  # and fixed seeds are judged sequentially with it
    report = decided(CLOSE, decide=0.0, out=third, resume=True)
    assert seeds_of(report) == seeds_of(fixed)
    assert by_name(report)["O1"].quality[0].difference.low < by_name(fixed)["O1"].quality[0].difference.low


def test_a_factory_that_ignores_its_seed_is_refused(decided: Callable[..., BenchReport], tmp_path: Path) -> None:
    """The stand-ins for its trainings have the same losses and metric."""
    for more in ({"seeds": 3, "decide": None}, {"decide": 600.0}):
        out = tmp_path / f"{len(more)}.json"
        with pytest.raises(FactoryError, match="the same losses and metric for the seeds 0 and 1"):
            decided({"stock": [0.9], "O1": [0.9]}, out=out, losses=[0.5], **more)
        assert by_name(BenchReport.load(out))["O1"].quality == []


def test_a_configuration_trains_for_its_length_and_is_not_mixed_with_another(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    name, recipe = "O2+boost.json", '{"recipe": {"rate": 0.5, "length": 0.75}'
    Path(name).write_text(recipe + "}", encoding="utf-8")
    settings: dict[str, Any] = {"epochs": 2, "planner": None, "out": "report.json"}
    short = by_name(benched(tiny(), "stock", name, seeds=2, **settings))[name]
    assert (short.kind, short.algorithms[-1].name, short.quality[0].margin) == ("config", "recipe", 0.005)
    assert short.curves[0].epochs == [1.0, 1.5]  # 6 of 8 steps
    assert any("0.75 of the steps" in note for note in short.notes)
    for other in '{"recipe": {"length": 0.5}}', recipe + ', "extra": {"gradient_centralization": true}}':
        Path(name).write_text(other, encoding="utf-8")
        for names in ("stock", name), ("stock", "O0", name):  # the latter times all steps again
            with pytest.raises(ValueError, match="has changed since its steps were timed"):
                benched(tiny(), *names, seeds=3, resume=True, **settings)
    for absent in "absent.json", "absent.json+compile":
        with pytest.raises(ValueError, match=f"contestant '{re.escape(absent)}': found no such file"):
            Recipe.parse(absent)


def test_what_a_schedule_leaves_of_a_recipe_is_said_before_anything_is_timed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    cycle = torch.optim.lr_scheduler.OneCycleLR

    def scheduled(schedule: Any) -> Factory:
        def make(seed: int) -> Parts:
            model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 8), nn.Linear(8, 4))
            return Parts(model, sgd(model), F.cross_entropy, BATCHES, None, schedule)

        return replace(tiny(), make=make)

    absolute = scheduled(lambda o, n: cycle(o, 0.1, n))
    momentum = scheduled(lambda o, n: cycle(o, [group["lr"] for group in o.param_groups], n))
    Path("rate.json").write_text('{"recipe": {"rate": 0.5}}', encoding="utf-8")
    Path("muon.json").write_text('{"recipe": {"optimizer": "muon"}}', encoding="utf-8")
    said = "rate.json: recipe.rate=0.5 has no effect: the schedule writes rates of its own"
    notes = benched(absolute, "stock", "rate.json", seeds=0, epochs=0).notes
    assert sum(note.startswith(said) for note in notes) == 1, notes
    assert not any("has no effect" in note for note in benched(momentum, "stock", "rate.json", seeds=0, epochs=0).notes)
    for one, message in (
        (absolute, "contestant 'muon.json': recipe.optimizer='muon': the schedule writes rates of its own.*max_lr="),
        (momentum, "contestant 'muon.json': the schedule raises .*let the schedule pass cycle_momentum=False"),
    ):
        with pytest.raises(IncompatibleError, match=message):
            benched(one, "stock", "muon.json", seeds=0, epochs=0)
