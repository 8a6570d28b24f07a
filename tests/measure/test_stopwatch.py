"""The stopwatch is fair and bounded, and says on which machine it ran; what it measured survives a file."""

from __future__ import annotations

import gc
import math
import random
import signal
import subprocess
import sys
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from torchboost.measure import stopwatch
from torchboost.measure.evidence import BenchReport, Contestant, Curve, Interval, Quality, Ratio
from torchboost.measure.stopwatch import Clock, Warmup, compare, environment, interrupts_kept

QUIET = Warmup(least=0, limit=0)


class FakeTime:
    """A clock that moves only when a contestant says so, with drift, jitter and bursts."""

    def __init__(self, seed: int = 0, *, drift: float = 0.0, jitter: float = 0.0, bursts: float = 0.0) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        self._random = random.Random(seed)
        self._drift, self._jitter, self._bursts = drift, jitter, bursts

    @property
    def clock(self) -> Clock:
        return Clock(read=lambda: self.now)

    def step(self, name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.calls.append(name)
            weather = (1 + self._drift) ** len(self.calls) * self._random.lognormvariate(0, self._jitter)
            self.now += seconds * weather * (5 if self._random.random() < self._bursts else 1)

        return call


def test_ratio_samples_and_warm_up_of_an_exact_clock() -> None:
    fake = FakeTime()
    result = compare({"a": fake.step("a", 2.0), "b": fake.step("b", 1.0)}, baselines=["a"], pairs=6, clock=fake.clock)
    assert result.samples == {"a": [pytest.approx(2.0)] * 6, "b": [pytest.approx(1.0)] * 6}
    assert result.ratio("b", "a").interval.mid == pytest.approx(2.0)
    assert result.ratio("b", "a").pairs == 6
    assert [r.baseline for r in result.ratios("b")] == ["a"]
    assert result.ratios("a") == []
    assert result.warmup_seconds == {"a": pytest.approx(12.0), "b": pytest.approx(6.0)}
    assert result.unsettled == ()


def test_a_against_a_contains_one_about_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)  # nearly all of the time of these hundred comparisons
    hits = 0
    for trial in range(60):
        fake = FakeTime(trial, drift=1e-3, jitter=0.05, bursts=0.1)
        pair = {"a": fake.step("a", 1.0), "b": fake.step("b", 1.0)}
        result = compare(pair, baselines=["a"], pairs=20, warmup=QUIET, clock=fake.clock)
        interval = result.ratio("b", "a").interval
        hits += interval.low <= 1.0 <= interval.high
    assert hits >= 52
    fake = FakeTime(1, drift=1e-3, jitter=0.02)
    pair = {"a": fake.step("a", 1.0), "b": fake.step("b", 0.8)}
    ratio = compare(pair, baselines=["a"], pairs=20, clock=fake.clock).ratio("b", "a")
    assert ratio.detectable is not None
    assert ratio.detectable < 0.1
    assert 1.2 < ratio.interval.low < ratio.interval.high < 1.3  # a real gain above the detectable one is seen


def test_rounds_come_as_an_order_and_its_reverse_and_are_drawn_alike_every_time() -> None:
    def orders() -> list[list[str]]:
        fake = FakeTime()
        names = {name: fake.step(name, 1.0) for name in "abcd"}
        compare(names, baselines=[], pairs=6, warmup=QUIET, clock=fake.clock)
        return [fake.calls[i : i + 4] for i in range(0, 24, 4)]

    first = orders()
    assert all(sorted(order) == list("abcd") for order in first)
    assert all(first[i] == first[i + 1][::-1] for i in (0, 2, 4))
    assert len({tuple(order) for order in first}) > 2
    assert first == orders()


def test_warm_up_waits_until_times_settle_and_several_calls_are_averaged() -> None:
    fake = FakeTime()

    def taking(times: list[float]) -> Callable[[], None]:
        seconds = iter(times)

        def step() -> None:
            fake.now += next(seconds)

        return step

    result = compare({"a": taking([1.0, 3.0] * 9)}, baselines=[], pairs=3, calls=2, warmup=QUIET, clock=fake.clock)
    assert result.samples["a"] == [2.0] * 3
    result = compare({"a": taking([50.0, 20.0, 5.0] + [1.0] * 99)}, baselines=[], pairs=4, clock=fake.clock)
    assert result.samples["a"] == [1.0] * 4
    assert result.warmup_seconds["a"] >= 50 + 20 + 5 + 3
    assert result.unsettled == ()


def test_warm_up_waits_for_the_last_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {"stats": {"unique_graphs": 0}}
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", types.SimpleNamespace(counters=counters))
    fake, graphs = FakeTime(), 0

    def step() -> None:
        nonlocal graphs
        graphs += 1
        fake.now += 1.0
        counters["stats"]["unique_graphs"] = min(graphs, 9)

    result = compare({"a": step}, baselines=[], pairs=1, clock=fake.clock)
    assert result.warmup_seconds["a"] == 9 + Warmup().window


def test_warm_up_is_bounded_and_says_so() -> None:
    fake = FakeTime()

    def slower_and_slower() -> None:
        fake.now = 2 * fake.now + 1

    by_calls = compare({"a": slower_and_slower}, baselines=[], pairs=1, warmup=Warmup(limit=10), clock=fake.clock)
    assert by_calls.unsettled == ("a",)
    calls = 0

    def slow() -> None:
        nonlocal calls
        calls += 1
        fake.now += 100.0

    by_seconds = compare({"a": slow}, baselines=[], pairs=1, warmup=Warmup(seconds=150.0), clock=fake.clock)
    assert by_seconds.unsettled == ("a",)
    assert calls == 3 + 1


def test_the_garbage_collector_is_off_while_timing_and_back_after() -> None:
    seen: list[bool] = []
    assert gc.isenabled()
    compare({"a": lambda: seen.append(gc.isenabled())}, baselines=[], pairs=3, warmup=QUIET)
    assert seen == [False, False, False]
    assert gc.isenabled()

    def broken() -> None:
        raise RuntimeError("broken step")

    with pytest.raises(RuntimeError, match="broken step"):
        compare({"a": broken}, baselines=[], pairs=1, warmup=QUIET)
    assert gc.isenabled()


def test_the_clock_waits_for_the_device_before_each_reading_and_progress_reaches_its_total() -> None:
    events: list[str] = []
    phases: list[tuple[str, int, int, str]] = []
    clock = Clock(read=lambda: events.append("read") or float(len(events)), synchronize=lambda: events.append("wait"))

    def tell(phase: str, done: int, total: int, note: str = "") -> None:
        phases.append((phase, done, total, note))

    compare({"a": lambda: events.append("call")}, baselines=[], pairs=1, warmup=QUIET, clock=clock, progress=tell)
    assert events == ["wait", "read", "call", "wait", "read"]
    assert phases == [("warm-up", 0, 1, "a"), ("warm-up", 1, 1, ""), ("timing", 0, 1, ""), ("timing", 1, 1, "")]


def test_nonsense_is_refused_before_anything_is_called() -> None:
    called: list[int] = []
    with pytest.raises(ValueError, match="no contestants"):
        compare({}, baselines=[])
    with pytest.raises(ValueError, match=r"found \['b'\].*\['a'\]"):
        compare({"a": lambda: called.append(1)}, baselines=["b"])
    with pytest.raises(ValueError, match="pairs=0"):
        compare({"a": lambda: called.append(1)}, baselines=[], pairs=0)
    assert not called


def test_a_clock_waits_for_any_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    for name in ("cuda", "mps", "xpu:1"):
        clock = Clock.of(name)
        assert clock() <= clock()
        assert waited[-2:] == [torch.device(name)] * 2
    assert Clock.of("cpu")() <= Clock.of("cpu")()
    assert len(waited) == 6


@pytest.mark.gpu
def test_cuda_clock_counts_the_device() -> None:
    clock, matrix = Clock.of("cuda"), torch.ones(4096, 4096, device="cuda")
    start = clock()
    for _ in range(10):
        matrix = matrix @ matrix.T / 4096
    assert clock() > start


def test_environment_names_machine_versions_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment()
    assert (found.torch, found.device, found.threads) == (torch.__version__, "cpu", torch.get_num_threads())
    assert found.cores >= 1
    assert found.processor
    assert found.instructions.startswith(torch.backends.cpu.get_cpu_capability())
    assert found.date.endswith("+00:00")

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    assert stopwatch._commit(tmp_path) == ""
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("-c", "user.name=n", "-c", "user.email=e@example.org", "commit", "-qm", "first")
    clean = stopwatch._commit(tmp_path)
    assert len(clean) == 40
    (tmp_path / "file").write_text("two")
    assert stopwatch._commit(tmp_path) == f"{clean}+changes"
    (tmp_path / "COMMIT").write_text("0123+changes\n")
    monkeypatch.setenv("PATH", "")  # a checkout on a machine without git, or a copy of one
    assert stopwatch._commit(tmp_path) == "0123+changes"


def report() -> BenchReport:
    interval = Interval(low=0.9, mid=1.0, high=1.1)
    curve = Curve(seed=0, epochs=[1.0, 2.0], seconds=[3.0, 6.0], train_loss=[1.0, 0.5], metric=[0.5, 0.75])
    quality = Quality(baseline="stock", difference=interval, margin=0.01, seeds=3, passed=False, detectable=0.02)
    contestant = Contestant(
        name="O1",
        kind="level",
        step_seconds=interval,
        samples=[1.0, 1.0],
        ratios=[Ratio(baseline="stock", interval=interval, pairs=2)],
        curves=[curve],
        quality=[quality],
    )
    return BenchReport(
        title="t",
        workload="w",
        model="m",
        parameters=1,
        batch=2,
        metric_name="accuracy",
        environment=environment(),
        contestants=[contestant],
    )


def test_a_saved_report_loads_equal_also_without_the_newer_fields(tmp_path: Path) -> None:
    saved = report()
    written = saved.save(tmp_path / "deep" / "report.json")
    assert BenchReport.load(written) == saved
    assert [p.name for p in written.parent.iterdir()] == ["report.json"]  # no partial file
    document = saved.model_dump()
    del document["epochs"], document["train_samples"]
    del document["contestants"][0]["quality"], document["contestants"][0]["ratios"][0]["detectable"]
    loaded = BenchReport.model_validate(document)
    assert loaded.epochs == 0
    assert loaded.contestants[0].quality == []
    assert loaded.contestants[0].ratios[0].detectable is None


def test_a_diverged_run_survives_json_and_unknown_fields_formats_and_changes_are_refused() -> None:
    curve = Curve(seed=0, epochs=[1.0], seconds=[1.0], train_loss=[math.nan], metric=[0.1])
    assert math.isnan(Curve.model_validate_json(curve.model_dump_json()).train_loss[0])
    with pytest.raises(ValidationError):
        report().title = "other"
    with pytest.raises(ValidationError):
        BenchReport.model_validate(report().model_dump() | {"surprise": 1})
    with pytest.raises(ValidationError):
        BenchReport.model_validate(report().model_dump() | {"format": 2})


def test_ctrl_c_inside_the_garbage_collector_is_not_lost():
    class Part:
        """Has a cycle, so that the collector frees it."""

    @interrupts_kept()
    def train() -> None:
        gc.collect()
        for _ in range(1000):
            time.sleep(0.01)

    part = Part()
    part.itself = part  # pyright: ignore[reportAttributeAccessIssue]
    watched = weakref.ref(part, lambda _: signal.raise_signal(signal.SIGINT))
    del part
    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        train()
    assert watched() is None
    assert sys.unraisablehook is before
