"""The plan for a GPU: its calls, what it keeps if it is cut off, and all of it, tiny, on the pretend device."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pretend_device.build import compiler

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


def test_every_part_can_be_measured(tmp_path: Path):
    parts = [part for call in gpu.PLAN.values() for part in call.parts]
    assert {part.kind for part in parts} == set(gpu_part.KINDS) == set(gpu_tables.MAKERS)
    names = {"resnet50", "gpt2", "bert", "vit", "llama", "convnext", "mobilenet"}
    assert {part.subject for part in parts if part.kind == "levels"} == names
    for part in parts:
        turns = gpu_part.KINDS[part.kind](task(part.kind, part.subject, only=part.only), results(tmp_path))
        assert set(part.only) <= set(turns) or part.subject == "mobilenet"
        assert turns


def test_a_table_breaks_the_names_of_loops_and_says_what_the_trial_chose():
    table, said = gpu_tables.table(gpu.ROOT / "benchmarks" / "results" / "gpu-levels-resnet50.json")
    assert table.rows[0][0].startswith("channels_last+<wbr>autocast+<wbr>")
    first, *_, origin = said.splitlines()
    assert first.startswith(
        "- O1: on after 80.9 s of measuring: `channels_last` 1.31\N{MULTIPLICATION SIGN}, `autocast`"
    )
    assert "matmul_precision" not in first
    assert origin.startswith("NVIDIA H100")


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


def test_without_a_device_nothing_is_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert gpu.main(["--call", "4", "5", "--tiny", "--out", str(tmp_path)]) == gpu.REFUSED
    told = capfd.readouterr()
    assert "found no CUDA device" in told.err
    assert "call 5" not in told.out
    assert list(tmp_path.iterdir()) == []


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
