"""The plan for a GPU: its calls, what it keeps if it is cut off, and all of it, tiny, on the pretend device."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from zipfile import ZipFile

import pytest
import torch

from tests.support.pretend_device.build import compiler
from torchboost.measure.stopwatch import Clock

gpu = importlib.import_module("gpu")
gpu_checks = importlib.import_module("gpu_checks")
gpu_loops = importlib.import_module("gpu_loops")
gpu_networks = importlib.import_module("gpu_networks")
gpu_part = importlib.import_module("gpu_part")
gpu_record = importlib.import_module("gpu_record")
gpu_tables = importlib.import_module("gpu_tables")

ENVIRONMENT = {"torch": "2", "torchboost": "0", "device": "a GPU", "commit": "abc", "date": "today"}


def results(folder: Path) -> Any:
    return gpu_record.Results.at(folder / "rows.json", {"kind": "levels", "environment": ENVIRONMENT})


def task(kind: str, subject: str = "", **settings: Any) -> Any:
    given = {"only": (), "cold": False, "seconds": 60.0, "out": "", "pairs": 2, "tiny": True, "compiled": True}
    return gpu_record.Task(kind=kind, subject=subject, **{**given, "again": False, "ended": "", **settings})


def test_the_plan_fits_into_its_half_hours():
    assert all(call.seconds < 600 for call in gpu.PLAN.values())
    assert sum(gpu.PLAN[name].seconds for name in "1234") < 1750
    assert all(sum(part.seconds for part in call.parts) <= call.seconds for call in gpu.PLAN.values())


def test_of_the_wheels_only_missing_packages_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, module in (("numpy", "numpy"), ("not_installed", "not_installed")):
        with ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{module}/__init__.py", "")
    found = gpu.unpacked(tmp_path, tmp_path / "packages")
    assert [path.name for path in found.iterdir()] == ["not_installed"]
    assert capsys.readouterr().out == "not_installed-1.0-py3-none-any.whl is used\n"
    assert str(found) in gpu.environment({}, found)["PYTHONPATH"].split(os.pathsep)
    assert gpu.unpacked(tmp_path / "absent", tmp_path / "none") == tmp_path / "none"


def test_a_missing_package_is_said_before_anything_runs(tmp_path: Path, capsys: Any, monkeypatch: Any):
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "absent"))
    assert gpu.main(["--call", "4", "--out", str(tmp_path)]) == gpu.REFUSED
    assert capsys.readouterr().err == "gpu: absent is missing; install it, or see `make bench-gpu-files`.\n"
    (tmp_path / "absent").mkdir()
    assert not gpu.missing(tmp_path)


def test_every_part_can_be_measured(tmp_path: Path):
    parts = [part for call in gpu.PLAN.values() for part in call.parts]
    assert {part.kind for part in parts} == set(gpu_part.KINDS) == set(gpu_tables.MAKERS)
    names = {"resnet50", "gpt2", "bert", "vit", "llama", "convnext", "mobilenet"}
    assert {part.subject for part in parts if part.kind == "levels"} == names
    for part in parts:
        turns = gpu_part.KINDS[part.kind](task(part.kind, part.subject, only=part.only), results(tmp_path))
        assert set(part.only) <= set(turns) or part.subject == "mobilenet"
        assert turns


def test_the_networks_have_the_sizes_that_they_are_known_by():
    counts = {}
    for name, network in gpu_networks.NETWORKS.items():
        with torch.device("meta"):
            counts[name] = sum(p.numel() for p in network.build().parameters()) / 1e6
    assert 25 < counts["resnet50"] < 26
    assert 124 < counts["gpt2"] < 125
    assert 1300 < counts["gpt-1b"] < 1330
    assert set(gpu_networks.TINY) == set(gpu_networks.NETWORKS)


def test_the_most_worth_comes_first_and_max_autotune_last(tmp_path: Path):
    names = list(gpu_loops.levels(task("levels", "resnet50"), results(tmp_path)))
    usual = "channels_last+autocast+fused_optimizer+tf32"
    assert names[:5] == [usual, f"{usual}+compile", f"{usual}+compile reduce-overhead", "O1", "O2"]
    assert names[-1] == f"{usual}+compile max-autotune"
    assert {"tf32", "channels_last", "autocast", "fused_optimizer", "stock again"} < set(names)
    without = gpu_loops.levels(task("levels", "gpt2", compiled=False), results(tmp_path))
    assert not [name for name in without if "compile" in name or "channels_last" in name]


def test_a_stock_loop_that_fails_is_built_again(tmp_path: Path):
    built: list[int] = []

    def build() -> Any:
        built.append(1)
        if len(built) == 1:
            raise RuntimeError("out of memory")
        return gpu_loops.Loop(step=lambda: torch.ones(()))

    loops = gpu_loops.Loops(task("levels"), results(tmp_path), build, clock=Clock())
    with pytest.raises(RuntimeError, match="memory"):
        loops.prepare()
    assert loops.prepare() is loops.prepare()
    assert len(built) == 2
    assert loops.stock_losses == [1.0] * gpu_loops.COMPARED_LOSSES


def test_each_loop_has_its_own_precision_of_products():
    seen: list[str] = []

    def step() -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("medium")  # as a lever does
        return torch.zeros(())

    plain, lower = (gpu_loops.Precision(wanted).around(step) for wanted in ("highest", "high"))
    for call in (plain, lower, plain, lower):
        call()
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cuda.matmul.fp32_precision == "none"
    assert seen == ["highest", "high", "medium", "medium"]


def test_what_is_measured_is_not_measured_again(tmp_path: Path):
    done: list[str] = []

    def turn(name: str) -> Any:
        def measure() -> dict[str, Any]:
            running = json.loads((tmp_path / "rows.json").read_text())["rows"][name]
            assert running == {"error": gpu_record.INTERRUPTED}
            done.append(name)
            if name == "bad":
                raise RuntimeError("planted")
            return {"value": name}

        return gpu_record.Turn(measure)

    turns = {name: turn(name) for name in ("a", "bad", "c")}
    ends = time.monotonic() + 60
    assert gpu_record.take_turns({"a": turns["a"], "bad": turns["bad"]}, results(tmp_path), ends=ends) == []
    assert gpu_record.take_turns(turns, results(tmp_path), ends=ends) == []
    assert done == ["a", "bad", "c"]
    rows = results(tmp_path).rows
    assert rows["a"]["value"] == "a"
    assert rows["bad"]["error"] == "RuntimeError: planted"
    gpu_record.take_turns(turns, results(tmp_path), ends=ends, again=True)
    assert done == ["a", "bad", "c", "bad"]


def test_a_turn_that_needs_more_time_than_is_left_does_not_begin(tmp_path: Path):
    turns = {"long": gpu_record.Turn(lambda: {}, 100.0), "short": gpu_record.Turn(lambda: {}, 1.0)}
    assert gpu_record.take_turns(turns, results(tmp_path), ends=time.monotonic() + 50) == ["long"]
    assert set(results(tmp_path).rows) == {"short"}


def test_what_is_left_is_said_with_the_time_it_needs_which_is_short_at_tiny_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_part, "device_fault", lambda device: None)
    monkeypatch.setattr(gpu_part, "DEVICE", torch.device("cpu"))
    monkeypatch.setitem(gpu_part.KINDS, "levels", lambda *_: {"O1": gpu_record.Turn(lambda: {}, 75.0)})
    for tiny in (False, True):
        given = dataclasses.asdict(task("levels", "gpt2", out=str(tmp_path), tiny=tiny))
        assert gpu_part.main(json.dumps(given)) == 0
    assert json.loads((tmp_path / "gpu-levels-gpt2-tiny.json").read_text())["rows"].keys() == {"O1"}
    assert not (tmp_path / "gpu-levels-gpt2.json").exists()
    assert "since less time was left than each needs: O1 (75 s)" in capsys.readouterr().out


def test_a_contestant_that_ended_its_process_is_named_and_not_run_again(tmp_path: Path):
    results(tmp_path).put("crashing", {"error": gpu_record.INTERRUPTED})
    found = results(tmp_path)
    found.close_interrupted("crashed with SIGSEGV")
    assert results(tmp_path).rows["crashing"]["error"] == "crashed with SIGSEGV"
    assert not found.wanted("crashing", again=False)
    assert found.wanted("crashing", again=True)


@pytest.mark.parametrize("key", gpu_record.SAME)
def test_results_of_another_machine_are_refused_and_stay(tmp_path: Path, key: str):
    results(tmp_path).put("a", {"value": 1})
    before = (tmp_path / "rows.json").read_bytes()
    with pytest.raises(gpu_record.OtherResultsError, match=f"{key} .*, here 'another'.*--out"):
        gpu_record.Results.at(tmp_path / "rows.json", {"environment": {**ENVIRONMENT, key: "another"}})
    assert (tmp_path / "rows.json").read_bytes() == before


def asked(folder: Path, *words: str) -> argparse.Namespace:
    return gpu.arguments(["--out", str(folder), *words])


def test_after_a_crash_the_part_runs_again_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tasks, statuses = [], iter([-6, 0])

    def run(seconds: float, command: list[str], variables: Any) -> int:
        tasks.append(gpu_record.Task(**json.loads(command[-1])))
        assert tasks[-1].seconds == seconds
        return next(statuses)

    monkeypatch.setattr(gpu, "run_within", run)
    assert gpu.run_part(gpu.Part("levels", 60, "gpt2"), 60.0, asked(tmp_path), {}) == 0
    assert [one.ended for one in tasks] == ["", "crashed with SIGABRT"]
    assert tasks[0].file == tmp_path / "gpu-levels-gpt2.json"


def test_a_cold_part_has_an_empty_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []

    def run(seconds: float, command: list[str], variables: Any) -> int:
        folder = Path(variables["TORCHINDUCTOR_CACHE_DIR"])
        assert list(folder.iterdir()) == []
        seen.append(str(folder))
        return 0

    monkeypatch.setattr(gpu, "run_within", run)
    assert not gpu.run_call("5", asked(tmp_path), {"TORCHINDUCTOR_CACHE_DIR": "warm"})
    assert len(set(seen)) == len(seen) == 4


def test_the_parts_of_a_call_share_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seconds: list[float] = []
    monkeypatch.setattr(gpu, "run_part", lambda part, left, *_: seconds.append(left) or 0)
    assert not gpu.run_call("2", asked(tmp_path, "--deadline", "100"), {})
    assert seconds == [pytest.approx(50, abs=1), pytest.approx(100, abs=1)]  # the first one ended at once
    monkeypatch.setattr(gpu, "run_part", lambda *_: gpu.REFUSED)
    assert gpu.run_call("2", asked(tmp_path), {}) == gpu.REFUSED


def test_without_a_device_nothing_is_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert gpu.main(["--call", "4", "5", "--tiny", "--out", str(tmp_path)]) == gpu.REFUSED
    told = capfd.readouterr()
    assert "found no CUDA device" in told.err
    assert "call 5" not in told.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--pairs", "0"], ["--pretend"], ["--call", "99"]])
def test_what_cannot_be_asked_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        gpu.arguments(words)
    assert "--" in capsys.readouterr().err


def test_failed_tests_are_counted_by_kind():
    report = ElementTree.fromstring(
        "<s><testcase classname='a' name='1'/><testcase classname='a' name='2'><skipped/></testcase>"
        "<testcase classname='a' name='3'><failure message='AssertionError: 1 != 2'/></testcase>"
        "<testcase classname='a' name='4'><error message='Expected all tensors to be on the same device'/>"
        "</testcase></s>"
    )
    found = gpu_checks.counted(report)
    assert (found["passed"], found["skipped"]) == (1, 1)
    assert list(found["failed"]) == ["a::3"]
    assert list(found["two_devices"]) == ["a::4"]


NOT_ON_THE_PRETEND_DEVICE = {"LazyAdam, sparse rows"}
"""The pretend device has no sparse tensors."""


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_the_whole_plan_at_tiny_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    words = ["--tiny", "--no-compile", "--pretend", "--pairs", "1", "--deadline", "900", "--out", str(tmp_path)]
    assert gpu.main(words) == 0
    files = {path.stem.removesuffix("-tiny"): path for path in tmp_path.glob("*.json")}
    parts = [part for call in gpu.PLAN.values() for part in call.parts]
    assert set(files) == {"-".join(filter(None, ("gpu", part.kind, part.subject))) for part in parts}
    for path in files.values():
        rows = json.loads(path.read_text())["rows"]
        assert {name for name, row in rows.items() if "error" in row} <= NOT_ON_THE_PRETEND_DEVICE, path
        table, said = gpu_tables.table(path)
        assert table.rows
        assert "pretend device" in said
    for name in ("resnet50", "gpt2"):
        rows = json.loads(files[f"gpu-levels-{name}"].read_text())["rows"]
        assert rows["O1"]["choice"]["source"] == "trial"
        assert {"O1, 10,000 steps", "O1, 450,000 steps", "stock again"} < set(rows)
        assert rows["stock again"]["losses_apart"] == 0
        assert all(row["losses_apart"] < 0.05 for cell, row in rows.items() if not cell.startswith("O"))
        (run,) = json.loads(files[f"gpu-freezing-{name}"].read_text())["rows"].values()
        assert "grad_freeze" in run["explain"].partition("left out")[0]
    path = files["gpu-levels-mobilenet"]
    before = path.stat().st_mtime_ns
    assert gpu.main([*words, "--call", "4"]) == 0
    assert path.stat().st_mtime_ns == before
