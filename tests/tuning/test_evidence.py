from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.tuning.test_page import tuned
from torchboost.tuning.evidence import Run, TuneReport


def report_with(losses: list[list[float]], *, steps: int) -> TuneReport:
    times = {"setup_seconds": 0.1, "seconds": 1.0, "wall_seconds": 1.2}
    runs = [
        Run(name="stock", seed=seed, steps=steps, metric=0.5, losses=curve, **times)
        for seed, curve in enumerate(losses)
    ]
    other = Run(name="other", seed=0, steps=steps, metric=0.5, losses=[9.0] * (steps // 20), **times)
    return tuned().model_copy(update={"steps": steps, "runs": [*runs, other]})


def test_a_report_is_written_and_read(tmp_path: Path):
    report = tuned()
    path = report.save(tmp_path / "new" / "boost.report.json")
    assert TuneReport.load(path) == report
    assert [file.name for file in path.parent.iterdir()] == ["boost.report.json"]


def test_a_run_that_diverged_keeps_its_metric(tmp_path: Path):
    report = tuned()
    run = report.runs[0].model_copy(update={"metric": math.nan})
    path = report.model_copy(update={"runs": [run]}).save(tmp_path / "report.json")
    assert math.isnan(TuneReport.load(path).runs[0].metric)


def test_another_file_is_refused(tmp_path: Path):
    path = tmp_path / "other.json"
    path.write_text('{"format": 2}', encoding="utf-8")
    with pytest.raises(ValidationError):
        TuneReport.load(path)


def test_set_up_is_paid_once_and_the_rest_per_step():
    run = Run(name="a", seed=0, steps=11, metric=1.0, setup_seconds=5.0, seconds=10.0, wall_seconds=16.0)
    assert run.projected(11) == 15.0
    assert run.projected(101) == 105.0
    assert run.projected(101, share=0.5) == pytest.approx(5.0 + 49.5)
    assert run.projected(1) == 5.0


def test_the_losses_of_stock_are_the_mean_of_its_seeds_at_every_step():
    report = report_with([[1.0, 0.5], [2.0, 0.7]], steps=45)
    assert report.stock_losses() == [1.5] * 20 + [0.6] * 20


def test_runs_of_stock_that_diverged_are_left_out():
    assert report_with([[1.0, 0.5], [2.0]], steps=45).stock_losses() == [1.0] * 20 + [0.5] * 20


def test_a_report_of_runs_that_are_too_short_has_no_losses():
    with pytest.raises(ValueError, match="no losses of stock: found 1 complete runs of 12 steps"):
        report_with([[]], steps=12).stock_losses()
