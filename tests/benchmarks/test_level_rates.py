"""Levels at their best learning rates: which runs are made, and what the table says of them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchboost.bench.factory import Factory
from torchboost.workloads.named import find_workload

cases = importlib.import_module("cases")
level_rates = importlib.import_module("level_rates")
options = importlib.import_module("options")

BEST = {"stock": 0.25, "O1": 0.25, "O2": 2.0}
SECONDS = {"stock": 10.0, "O1": 8.0, "O2": 4.0}


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Stand in for the trainings: each way has its best rate and its time, and O2 loses as much as it is told."""
    made: list[dict[str, Any]] = []

    def trained(bench: Any, way: str, seed: int, rate: float, share: float = 1.0) -> dict[str, Any]:
        made.append({"way": way, "seed": seed, "rate": rate, "share": share})
        lost = 0.04 + 0.001 * (seed % 2) if way == "O2" else 0.1 * (1 - share)
        score = float("nan") if rate == 0.0625 else -abs(rate - BEST[way])
        on = {} if way == "stock" else {"on": ["compile", *(["less_bn"] if way == "O2" and seed % 2 else [])]}
        return {"steps": 100, **on, "seconds": SECONDS[way] * share, "metric": 0.8 - lost, "score": score}

    monkeypatch.setattr(level_rates.Bench, "trained", trained)
    job = find_workload("digits-resnet")
    case = cases.Case("a network", job, job.load(None, None))
    monkeypatch.setattr(level_rates, "WORKLOADS", {"digits": lambda given: replace(case)})
    return lambda: made


def test_each_way_has_its_own_best_rate_and_o2_a_rival_in_as_much_time(rates: Any, tmp_path: Path) -> None:
    smoke = options.Options(out=tmp_path, smoke=True)
    path = level_rates.measure("digits", smoke)
    result = json.loads(path.read_text())
    assert result["rates"] == {"stock": 0.25, "O2": 2.0}
    searched = {way: {run["rate"] for run in rates() if (run["way"], run["seed"]) == (way, 0)} for way in BEST}
    grid = set(level_rates.RATES)
    assert searched == {"stock": grid, "O1": set(), "O2": grid | {2.0, 4.0, 8.0}}
    fresh = [(run["way"], run["rate"], run["share"]) for run in rates() if run["seed"] == 2001]
    assert sorted(fresh) == [("O1", 0.25, 0.5), ("O1", 0.25, 1.0), ("O2", 2.0, 1.0), ("stock", 0.25, 1.0)]
    count = len(rates())
    level_rates.measure("digits", replace(smoke, resume=True))
    assert len(rates()) == count  # nothing is made twice
    path.rename(tmp_path / "level_rates-digits.json")
    found, said = level_rates.table(tmp_path)
    stock, o1, o2, rival = found.rows
    assert {len(line) for line in found.rows} == {len(found.headings)}
    assert stock[2:5] == ("0.025", "80.0 %", "10.0 s")
    assert o1[1:3] == ("O1: compile", "0.025")
    assert o1[5] == "0.5 points: kept"
    assert o2[1:3] == ("O2: compile, less_bn (1 of 2)", "0.2")
    assert o2[5] == "3 points: broken"
    assert o2[4].startswith("0.40")
    assert rival[1] == "O1, 50% of the steps: as much time as O2"
    assert rival[3].startswith("\N{MINUS SIGN}5.00 points")
    assert said.startswith("2 seeds")


def test_a_workload_whose_runs_are_not_complete_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "level_rates-vgg.json").write_text(json.dumps({"title": "a network", "runs": []}))
    assert level_rates.table(tmp_path)[0].rows == ()


def test_the_longer_run_has_the_steps_that_o2_needs() -> None:
    case = level_rates.case_of("digits", options.Options())
    assert isinstance(case.job.factory(case.data), Factory)
    assert case.job.epochs * case.data.steps(case.job.batch) >= 1_000
