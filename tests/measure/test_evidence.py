from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from torchboost.measure.evidence import BenchReport, Contestant, Curve, Interval, Quality, Ratio
from torchboost.measure.stopwatch import environment


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


def test_a_saved_report_loads_equal_and_leaves_no_partial_file(tmp_path: Path) -> None:
    written = report().save(tmp_path / "deep" / "report.json")
    assert BenchReport.load(written) == report().model_copy(
        update={"environment": BenchReport.load(written).environment}
    )
    assert [p.name for p in written.parent.iterdir()] == ["report.json"]


def test_a_file_without_the_newer_fields_still_loads() -> None:
    document = report().model_dump()
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
