from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.bench.workloads.test_contestants import halving_planner, tiny_job
from torchboost.algorithms.compile import Compile
from torchboost.bench.workloads import bench
from torchboost.bench.workloads.bench import run_bench
from torchboost.bench.workloads.contestants import plan_for
from torchboost.errors import FactoryError
from torchboost.measure.evidence import BenchReport, Contestant, Curve
from torchboost.measure.statistics import SequentialTest
from torchboost.measure.stopwatch import Clock, Warmup
from torchboost.plan import Plan

QUICK = Warmup(least=1, window=1, limit=2)


class Ticks:
    """Every reading of the clock is one second after the one before."""

    def __init__(self) -> None:
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return float(self.readings)


def tick() -> Clock:
    return Clock(read=Ticks())


def by_name(report: BenchReport) -> dict[str, Contestant]:
    return {contestant.name: contestant for contestant in report.contestants}


def test_a_benchmark_times_and_trains_every_contestant_on_equal_terms(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    report = run_bench(
        tiny_job(),
        contestants=("stock", "hand", "O1", "stock+halved"),
        pairs=4,
        seeds=2,
        out=out,
        warmup=QUICK,
        clock=tick(),
        planner=halving_planner,
    )
    found = by_name(report)
    assert [(c.name, c.kind) for c in report.contestants] == [
        ("stock", "stock"),
        ("hand", "hand"),
        ("O1", "level"),
        ("stock+halved", "algorithm"),
    ]
    for contestant in report.contestants:
        assert len(contestant.samples) == 4
        assert [curve.seed for curve in contestant.curves] == [0, 1]
        for curve in contestant.curves:
            assert curve.epochs == [1.0, 2.0]
            assert curve.seconds == [1.0, 2.0]
            assert curve.setup_seconds == 2.0
            assert all(0 <= value <= 1 for value in curve.metric)
    assert [r.baseline for r in found["O1"].ratios] == ["stock", "hand"]
    assert found["O1"].ratios[0].interval.mid == pytest.approx(1.0)
    assert found["O1"].dropped[0].reason == "not today"
    assert [q.baseline for q in found["O1"].quality] == ["stock"]
    assert found["stock"].quality == []
    assert found["O1"].curves[0].train_loss == found["stock+halved"].curves[0].train_loss
    assert report.epochs == 2
    assert report.train_samples == 32
    assert BenchReport.load(out) == report


def learned(contestant: Contestant) -> list[Curve]:
    """The curves without the memory, which varies with what the process did before."""
    return [curve.model_copy(update={"peak_bytes": None}) for curve in contestant.curves]


def test_o0_learns_bit_for_bit_what_stock_learns() -> None:
    report = run_bench(
        tiny_job(), contestants=("stock", "O0"), pairs=2, seeds=1, warmup=QUICK, clock=tick(), planner=plan_for
    )
    found = by_name(report)
    assert learned(found["stock"]) == learned(found["O0"])
    assert all(curve.peak_bytes is None or curve.peak_bytes > 0 for curve in found["stock"].curves)


def test_the_margin_is_wider_for_o2_and_turned_where_lower_is_better() -> None:
    job = replace(tiny_job(), margin=0.011, loose_margin=0.022)
    settings = {"pairs": 1, "seeds": 2, "epochs": 1, "warmup": QUICK, "clock": tick(), "planner": halving_planner}
    found = by_name(run_bench(job, contestants=("stock", "O1", "O2"), **settings))
    assert found["O1"].quality[0].margin == 0.011
    assert found["O2"].quality[0].margin == 0.022


@pytest.mark.parametrize(("metric", "sign"), [("accuracy", 1.0), ("bits per character", -1.0)])
def test_a_better_metric_is_a_positive_difference(metric: str, sign: float, monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(tiny_job(), metric=metric)
    values = iter([0.5, 0.7, 0.5, 0.7])
    monkeypatch.setattr(bench, "_evaluated", lambda loop, settings: next(values))
    report = run_bench(job, contestants=("stock", "O0"), pairs=1, seeds=2, epochs=1, warmup=QUICK, clock=tick())
    assert by_name(report)["O0"].quality[0].difference.mid == pytest.approx(sign * 0.2)


def test_a_metric_of_unknown_units_is_not_judged(tmp_path: Path) -> None:
    job, out = replace(tiny_job(), margin=None, loose_margin=None), tmp_path / "report.json"
    given: dict[str, Any] = {"pairs": 1, "epochs": 1, "warmup": QUICK, "clock": tick(), "planner": halving_planner}
    report = run_bench(job, contestants=("stock", "O1"), seeds=2, out=out, **given)
    assert by_name(report)["O1"].quality == []
    with pytest.raises(ValueError, match=r"--decide: the levels promise points of accuracy.*tune --drop"):
        run_bench(job, contestants=("stock", "O1"), decide=600.0, **given)
    renamed = replace(job, metric="metric")
    with pytest.raises(ValueError, match="measured with metric_name 'accuracy', but now it is 'metric'"):
        run_bench(renamed, contestants=("stock", "O1"), out=out, resume=True, **given)


def test_runs_whose_loss_is_no_number_pass_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(tiny_job(), loss=lambda outputs, targets: outputs.sum() * float("nan"))
    report = run_bench(job, contestants=("stock", "O0"), pairs=1, seeds=2, epochs=1, warmup=QUICK, clock=tick())
    (quality,) = by_name(report)["O0"].quality
    assert not quality.passed
    assert all(curve.metric[-1] >= 0 for curve in by_name(report)["O0"].curves)
    assert BenchReport.model_validate_json(report.model_dump_json()).contestants[1].quality[0].passed is False


def test_no_epochs_measure_step_times_only() -> None:
    report = run_bench(tiny_job(), contestants=("stock",), pairs=6, epochs=0, warmup=QUICK, clock=tick())
    assert report.contestants[0].curves == []
    assert len(report.contestants[0].samples) == 6
    assert report.notes == []


def test_too_few_rounds_for_an_interval_are_noted() -> None:
    report = run_bench(tiny_job(), contestants=("stock",), pairs=5, epochs=0, warmup=QUICK, clock=tick())
    assert ["fewer than six rounds" in note for note in report.notes] == [True]


def test_levels_that_turned_on_the_same_are_noted(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    given: dict[str, Any] = {"pairs": 6, "epochs": 0, "warmup": QUICK, "clock": tick(), "planner": halving_planner}
    report = run_bench(tiny_job(), contestants=("stock", "O1", "O2", "stock+halved"), out=out, **given)
    assert report.notes == [f"O1 and O2 {bench.SAME}"]
    report = run_bench(tiny_job(), contestants=("O0",), out=out, resume=True, **given)
    assert report.notes == [f"O1, O2 and O0 {bench.SAME}"]

    def planner(level: str, added: Any, model: Any, optimizer: Any, total_steps: int) -> Plan:
        return Plan(level=level, mode="auto", algorithms=(Compile(backend="eager"),) if level == "O2" else ())

    assert run_bench(tiny_job(), contestants=("O1", "O2"), **(given | {"planner": planner})).notes == []


def test_an_interrupted_run_continues_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(out: Path, *, resume: bool) -> BenchReport:
        return run_bench(
            tiny_job(),
            contestants=("stock", "O0"),
            pairs=2,
            seeds=2,
            out=out,
            resume=resume,
            warmup=QUICK,
            clock=tick(),
        )

    whole = run(tmp_path / "whole.json", resume=False)
    original, calls = bench._curve, 0

    def interrupted(*args: Any) -> Curve:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(bench, "_curve", interrupted)
    out = tmp_path / "report.json"
    with pytest.raises(KeyboardInterrupt):
        run(out, resume=True)
    assert [len(c.curves) for c in BenchReport.load(out).contestants] == [1, 1]
    continued = run(out, resume=True)
    assert calls == 3 + 2
    assert [learned(c) for c in continued.contestants] == [learned(c) for c in whole.contestants]
    assert [c.quality for c in continued.contestants] == [c.quality for c in whole.contestants]
    assert run(out, resume=True) == continued
    assert calls == 5


def test_a_new_contestant_joins_a_saved_report_and_all_are_timed_again(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    settings = {"pairs": 2, "seeds": 1, "epochs": 1, "out": out, "warmup": QUICK}
    first = run_bench(tiny_job(), contestants=("stock",), clock=tick(), **settings)
    both = run_bench(tiny_job(), contestants=("O0",), resume=True, clock=tick(), **settings)
    assert [c.name for c in both.contestants] == ["stock", "O0"]
    assert both.contestants[0].curves == first.contestants[0].curves
    assert both.contestants[1].ratios[0].baseline == "stock"


def test_a_report_of_something_else_is_not_continued(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    settings = {"contestants": ("stock",), "pairs": 1, "seeds": 1, "out": out, "warmup": QUICK}
    run_bench(tiny_job(), epochs=1, **settings)
    with pytest.raises(ValueError, match=r"measured with epochs 1, but now it is 2; .*another file"):
        run_bench(tiny_job(), epochs=2, resume=True, **settings)


def test_contestants_are_checked_before_anything_runs() -> None:
    def never(path: object, limit: object) -> object:
        raise AssertionError("data were loaded")

    job = replace(tiny_job(), load=never)
    with pytest.raises(ValueError, match="found 'O3'"):
        run_bench(job, contestants=("stock", "O3"))
    with pytest.raises(ValueError, match="each once"):
        run_bench(job, contestants=("stock", "stock"))
    with pytest.raises(ValueError, match="seeds=-1"):
        run_bench(job, seeds=-1)


def test_progress_covers_every_phase_and_reaches_each_total() -> None:
    last: dict[str, tuple[int, int]] = {}
    run_bench(
        tiny_job(),
        contestants=("stock", "O0"),
        pairs=2,
        seeds=2,
        epochs=1,
        warmup=QUICK,
        progress=lambda phase, done, total, note="": last.__setitem__(phase, (done, total)),
    )
    assert last == {"data": (1, 1), "warm-up": (2, 2), "timing": (2, 2), "training": (4, 4)}


def test_smoothed_loss_is_corrected_for_its_start() -> None:
    assert bench._smoothed([torch.tensor(3.0)] * 5) == pytest.approx(3.0)
    assert bench._smoothed([torch.tensor(0.0), torch.tensor(1.0)]) == pytest.approx(0.05 / (0.05 * 0.95 + 0.05))


def test_evaluation_gets_a_module_and_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, int]] = []

    def evaluate(self: object, predict: torch.nn.Module, data: Any) -> float:
        before = counters["stats"]["unique_graphs"]
        predict(next(data.test(8))[0])
        seen.append((predict.training, counters["stats"]["unique_graphs"] - before))
        return 0.5

    def planner(level: str, added: Any, model: Any, optimizer: Any, total_steps: int) -> Plan:
        return Plan(level=level, mode="auto", algorithms=(Compile(backend="eager"),))

    job = replace(tiny_job(), epochs=1)
    monkeypatch.setattr(type(job), "evaluate", evaluate)
    run_bench(job, contestants=["stock", "stock+compile"], pairs=1, seeds=1, warmup=QUICK, planner=planner)
    assert seen == [(False, 0)] * 2


def decided(monkeypatch: pytest.MonkeyPatch, metrics: dict[str, list[float]], **more: Any) -> BenchReport:
    """Benchmark with given final metrics per contestant and seed, until every promise is decided."""

    def curve(name: str, seed: int, settings: Any, shown: Any) -> Curve:
        values = metrics[name]
        return Curve(seed=seed, epochs=[1], seconds=[1], train_loss=[seed], metric=[values[seed % len(values)]])

    monkeypatch.setattr(bench, "_curve", curve)
    given = {"pairs": 1, "epochs": 1, "warmup": QUICK, "clock": tick(), "planner": halving_planner, "decide": 600.0}
    return run_bench(tiny_job(), contestants=tuple(metrics), **(given | more))


def seeds_of(report: BenchReport) -> dict[str, int]:
    return {contestant.name: len(contestant.curves) for contestant in report.contestants}


def test_seeds_are_added_until_every_promise_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = [0.980, 0.982, 0.979, 0.981]
    clear = {"stock": noisy, "hand": noisy, "O1": [value + 0.0005 for value in noisy], "O2": [0.6, 0.61, 0.6, 0.63]}
    report = decided(monkeypatch, clear)
    found = by_name(report)
    assert found["O1"].quality[0].passed
    assert not found["O2"].quality[0].passed
    assert found["O2"].quality[0].difference.high < -0.03
    counts = seeds_of(report)
    assert counts["hand"] == bench.FEW_SEEDS
    assert counts["stock"] >= counts["O1"] >= 3
    assert bench.SEQUENTIAL in report.notes


def test_what_cannot_be_decided_ends_after_the_last_seed_or_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    middle = {"stock": [0.98, 0.97], "O1": [0.97, 0.976, 0.977, 0.962]}  # near the margin of half a point
    report = decided(monkeypatch, middle)
    assert seeds_of(report)["O1"] <= bench.MOST_SEEDS
    assert not by_name(report)["O1"].quality[0].passed
    hurried = decided(monkeypatch, middle, decide=0.0)
    assert seeds_of(hurried) == {"stock": bench.FEW_SEEDS, "O1": bench.FEW_SEEDS}


def test_the_progress_of_a_decision_is_never_above_its_total() -> None:
    seen: list[tuple[int, int]] = []

    def note(phase: str, done: int, total: int, note: str = "") -> None:
        if phase == "training":
            seen.append((done, total))

    given: dict[str, Any] = {"pairs": 1, "epochs": 5, "warmup": QUICK, "clock": tick(), "planner": halving_planner}
    run_bench(tiny_job(), contestants=("stock", "O1"), decide=0.0, progress=note, **given)
    assert len(seen) == 2 * bench.FEW_SEEDS * 5
    assert all(done <= total for done, total in seen)


def test_a_decision_is_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    metrics = {"stock": [0.98, 0.981, 0.982], "O1": [0.9805, 0.9815, 0.982]}
    out = tmp_path / "report.json"
    decided(monkeypatch, metrics, decide=0.0, out=out)
    report = decided(monkeypatch, metrics, out=out, resume=True)
    assert by_name(report)["O1"].quality[0].passed
    assert [curve.seed for curve in by_name(report)["O1"].curves] == list(range(seeds_of(report)["O1"]))


def test_a_decision_stays_sequential_if_it_is_resumed_without_decide(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metrics, out = {"stock": [0.98, 0.981, 0.982], "O1": [0.9805, 0.9815, 0.982]}, tmp_path / "report.json"
    decided(monkeypatch, metrics, decide=0.0, out=out)
    report = decided(monkeypatch, metrics, decide=None, seeds=4, out=out, resume=True)
    assert bench.SEQUENTIAL in report.notes
    look = SequentialTest(margin=0.005, most=bench.MOST_SEEDS).look([0.0005, 0.0005, 0.0, 0.0005])
    assert by_name(report)["O1"].quality[0].difference.low == pytest.approx(look.difference.low)


def test_a_report_of_fixed_seeds_is_judged_sequentially_with_decide(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metrics, out = {"stock": [0.98, 0.981, 0.982], "O1": [0.9805, 0.9815, 0.982]}, tmp_path / "report.json"
    fixed = decided(monkeypatch, metrics, decide=None, seeds=4, out=out)
    report = decided(monkeypatch, metrics, decide=0.0, out=out, resume=True)
    assert seeds_of(report) == seeds_of(fixed)
    assert by_name(report)["O1"].quality[0].difference.low < by_name(fixed)["O1"].quality[0].difference.low


def equal_curve(name: str, seed: int, settings: Any, shown: Any) -> Curve:
    return Curve(seed=seed, epochs=[1], seconds=[1], train_loss=[0.5], metric=[0.9])


@pytest.mark.parametrize("more", [{"seeds": 3}, {"decide": 600.0}])
def test_a_workload_that_ignores_its_seed_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(bench, "_curve", equal_curve)
    out = tmp_path / "report.json"
    given = {"pairs": 1, "epochs": 1, "warmup": QUICK, "clock": tick(), "planner": halving_planner, "out": out}
    with pytest.raises(FactoryError, match="the same losses and metric for the seeds 0 and 1"):
        run_bench(tiny_job(), contestants=("stock", "O1"), **given, **more)
    assert by_name(BenchReport.load(out))["O1"].quality == []


@pytest.mark.parametrize("changed", ["source", "instructions"])
def test_a_report_of_another_version_is_not_continued(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: str
) -> None:
    job, out = replace(tiny_job(), source="before"), tmp_path / "report.json"
    given: dict[str, Any] = {"contestants": ("stock",), "pairs": 1, "epochs": 0, "warmup": QUICK, "clock": tick()}
    run_bench(job, out=out, **given)
    run_bench(job, out=out, resume=True, **given)
    if changed == "source":
        job = replace(job, source="after")
    else:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
    with pytest.raises(ValueError, match=r"another version of the file|instructions"):
        run_bench(job, out=out, resume=True, **given)
