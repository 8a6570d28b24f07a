"""The process around the networks: crashes cost one contestant, and the results are reused."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.reports import contestant, report
from torchboost.measure.stopwatch import environment

zoo = importlib.import_module("zoo")
options_module = importlib.import_module("options")


def options(folder: Path, **settings: Any) -> Any:
    return options_module.Options(out=folder, **settings)


class Ends:
    """Stands for the processes: each call ends as listed."""

    def __init__(self, *ends: tuple[str, str]) -> None:
        self.ends, self.left_out = list(ends), []

    def __call__(self, name: str, out: Path, options: Any, asked: Any, left_out: dict[str, str]) -> tuple[str, str]:
        self.left_out.append(dict(left_out))
        return self.ends.pop(0)


CRASH = "crashed with SIGSEGV"


def test_a_contestant_that_crashes_is_left_out_of_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ends = Ends(("autocast", CRASH), ("channels_last", CRASH), ("", ""))
    monkeypatch.setattr(zoo, "run_once", ends)
    assert zoo.measure_network("tiny", tmp_path / "out.json", options(tmp_path), zoo.Asked())
    assert ends.left_out == [{}, {"autocast": CRASH}, {"autocast": CRASH, "channels_last": CRASH}]


@pytest.mark.parametrize("at", ["stock", ""])
def test_a_network_whose_plain_loop_crashes_is_lost(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zoo, "run_once", Ends((at, CRASH)))
    paths, lost = zoo.measure_zoo(options(tmp_path, smoke=True), zoo.Asked())
    assert (paths, lost) == ([], ["tiny"])


def saved(path: Path, **changed: Any) -> Path:
    """Save a result of this machine, with 12 rounds."""
    stock = contestant("stock", "stock", 0.1).model_copy(update={"samples": 12 * [0.1]})
    here = environment().model_copy(update=changed)
    return report().model_copy(update={"contestants": [stock], "environment": here}).save(path)


@pytest.mark.parametrize(
    ("changed", "pairs", "current"),
    [({}, 12, True), ({"commit": "another"}, 12, True), ({}, 13, False), ({"torch": "2.0"}, 12, False)],
    ids=["same", "another commit", "more rounds", "another torch"],
)
def test_a_result_is_kept_if_it_could_be_repeated(changed: dict[str, str], pairs: int, current: bool, tmp_path: Path):
    assert zoo.is_current(saved(tmp_path / "zoo-mlp.json", **changed), pairs) == current


@pytest.mark.slow
def test_a_smoke_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    zoo.main(["--smoke", "--simulate", "avx2", "--json", "--out", str(tmp_path)])
    (report,) = json.loads(capsys.readouterr().out).values()
    assert (tmp_path / "zoo-avx2-tiny-smoke.json").is_file()
    assert "vector instructions: AVX2" in report["notes"]
    assert any(note.startswith("simulated: ONEDNN_MAX_CPU_ISA=AVX2") for note in report["notes"])
