"""The trainings of the benchmark take turns, each in its own thread."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from torchboost.measure.evidence import BenchReport

trainers = importlib.import_module("trainers")
options = importlib.import_module("options")


def test_one_step_at_a_time():
    done: list[str] = []

    def train(name: str) -> Callable[[Callable[[], bool]], None]:
        def run(pause: Callable[[], bool]) -> None:
            for step in range(10):
                done.append(f"{name}{step}")
                if not pause():
                    break
            done.append(f"{name} ended")

        return run

    first, second = trainers.Turns(train("a")), trainers.Turns(train("b"))
    assert done == []
    for turn in (first, second, second, first):
        turn()
    assert done == ["a0", "b0", "b1", "a1"]
    first.close()
    second.close()
    assert done[4:] == ["a ended", "b ended"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_smoke_run(tmp_path: Path):
    (path,) = trainers.measure(options.Options(out=tmp_path, smoke=True))
    report = BenchReport.load(path)
    hosts = ("loop", "transformers", "lightning", "accelerate")
    assert {c.name for c in report.contestants} == {name for host in hosts for name in (host, f"{host}+O1")}
    assert sum("of the loop's gain" in note for note in report.notes) == 3
