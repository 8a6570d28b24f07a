"""The report of a tuning: its data, its sentences and its page."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.support.pages import HOSTILE, Page, looked_at
from tests.tuning.test_race import Planted
from torchboost.measure.evidence import Interval
from torchboost.measure.stopwatch import environment
from torchboost.tuning.race import Race
from torchboost.tuning.report import (
    Candidate,
    Finding,
    Run,
    TuneReport,
    cost,
    headline,
    horizon,
    rows,
    tune_page,
)

PLANTED = {
    "levers: channels_last, autocast": (0.0, 0.55, False),
    "less_bn as in O2": (-2.0, 0.7, True),
    "grad_freeze as in O1": (-0.1, 0.8, True),
}


def report(**changes: object) -> TuneReport:
    about = {"title": "a model", "model": "Net", "parameters": 10, "drop": 0.005, "budget_seconds": 60.0}
    about |= {"steps": 100, "total_steps": 1000, "most_seeds": 12, "error": 0.05, "environment": environment()}
    return TuneReport(**(about | {"state": "complete"} | changes))  # pyright: ignore[reportArgumentType]


def finding(outcome: str | None, reason: str = "") -> Finding:
    return Finding(
        candidate=Candidate(name="fast", extra={"channels_last": True}),
        outcome=outcome,  # pyright: ignore[reportArgumentType]
        reason=reason,
        seeds=5,
        speed=Interval(low=1.4, mid=1.5, high=1.6),
        memory=0.8,
        difference=Interval(low=-0.004, mid=0.001, high=0.006),
        detectable=0.002,
    )


def tuned(title: str = "train.py:make", *, budget: float = 3000.0) -> TuneReport:
    train = Planted({k: v[0] for k, v in PLANTED.items()}, {k: v[1] for k, v in PLANTED.items()})
    candidates = [Candidate(name=k, extra={k.split()[0]: True}, skips_work=v[2]) for k, v in PLANTED.items()]
    race = Race(train=train, candidates=candidates, drop=0.01, budget=budget, total_steps=101)
    extra = race.decide()
    steps = {"steps": 101, "total_steps": 101, "drop": 0.01, "budget_seconds": budget, "spent_seconds": race.spent}
    known = {"findings": list(race.findings.values()), "whole": race.whole, "runs": list(race.runs.values())}
    return report(title=title, extra=extra, **steps, **known)


def test_the_headline_is_the_answer() -> None:
    kept = report(findings=[finding("kept")], whole=[finding("kept")])
    assert headline(kept) == "Turn on fast. A training then takes 67% of the time."
    assert cost(kept) == (
        "The metric changes by +0.001, at worst -0.004 at 95.0% confidence, over 5 seeds; 0.005 was accepted."
    )
    lost = report(findings=[finding("lost", "it costs")])
    assert cost(lost) == ""
    assert headline(lost).startswith("Nothing is turned on: no candidate was shown to save time and keep the metric")
    unsure = report(findings=[finding("kept")], whole=[finding("not shown", "the budget was spent")])
    assert "(the budget was spent)" in headline(unsure)
    assert headline(report(state="interrupted")).startswith("Not finished: 0 runs")
    old = {"name": "half", "recipe": True, "share": 0.5, "fingerprint": ""}  # of a report of an earlier version
    assert Candidate.model_validate(old).share == 0.5


def test_the_horizon_says_what_could_not_be_seen() -> None:
    said = horizon(report(findings=[finding("kept")]))
    for words in ("Runs of 100 steps", "the answer is for 1,000 steps", "0.002 beyond the accepted one"):
        assert words in said


def test_rows_name_the_final_test() -> None:
    found = rows(report(findings=[finding("kept", "because")], whole=[finding(None)]))
    assert found[0] == ["fast", "kept", "1.50x", "0.80x", "+0.0010 (-0.0040 to +0.0060)", "5", "because"]
    assert found[1][:2] == ["together", "open"]
    assert found[1][-1].startswith("fast: ")


def test_the_answer_comes_first_and_every_candidate_and_run_is_on_the_page() -> None:
    made = tuned()
    text = tune_page(made)
    page = Page(text)
    assert page.is_safe()
    assert text.index("Turn on levers") < text.index("What was tried") < text.index("Raw numbers")
    for name in PLANTED:
        assert f'<th scope="row">{name}</th>' in text
    assert f"All {len(made.runs)} runs" in text
    assert len(page.of_class("mark")) == len(PLANTED) + 1  # each alone, and what is left together
    places = [attrs["style"] for attrs in page.of_class("whisker")]
    assert all(style is not None and "nan" not in style for style in places)


def test_text_of_the_user_is_escaped() -> None:
    page = Page(tune_page(report(title=HOSTILE, notes=[HOSTILE], findings=[finding("kept", HOSTILE)])))
    assert page.is_safe()
    assert HOSTILE in page.words


def test_a_tuning_without_a_comparison_has_no_figure() -> None:
    text = tune_page(tuned(budget=30.0))
    assert "<figure" not in text
    assert "Nothing is turned on" in text


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_no_sideways_scroll_and_no_console_errors(tmp_path: Path, width: int) -> None:
    wanted, room, figures = looked_at(tmp_path, tune_page(tuned("a-long-name-" * 12 + ".py:make")), width)
    assert wanted <= room
    assert figures == 1


def test_a_report_is_written_and_read(tmp_path: Path) -> None:
    made = tuned()
    path = made.save(tmp_path / "new" / "boost.report.json")
    assert TuneReport.load(path) == made
    assert [file.name for file in path.parent.iterdir()] == ["boost.report.json"]
    diverged = made.model_copy(update={"runs": [made.runs[0].model_copy(update={"metric": math.nan})]})
    assert math.isnan(TuneReport.load(diverged.save(path)).runs[0].metric)
    path.write_text('{"format": 2}', encoding="utf-8")
    with pytest.raises(ValidationError):
        TuneReport.load(path)


def test_set_up_is_paid_once_and_the_rest_per_step() -> None:
    run = Run(name="a", seed=0, steps=11, metric=1.0, setup_seconds=5.0, seconds=10.0, wall_seconds=16.0)
    assert (run.projected(11), run.projected(101), run.projected(1)) == (15.0, 105.0, 5.0)


def test_the_losses_of_stock_are_the_mean_of_its_complete_runs_at_every_step() -> None:
    def losses(curves: list[list[float]], steps: int) -> list[float]:
        times = {"setup_seconds": 0.1, "seconds": 1.0, "wall_seconds": 1.2, "steps": steps, "metric": 0.5}
        runs = [Run(name="stock", seed=seed, losses=curve, **times) for seed, curve in enumerate(curves)]
        other = Run(name="other", seed=0, losses=[9.0] * (steps // 20), **times)
        return report(steps=steps, total_steps=steps, runs=[*runs, other]).stock_losses()

    assert losses([[1.0, 0.5], [2.0, 0.7]], 45) == [1.5] * 20 + [0.6] * 20
    assert losses([[1.0, 0.5], [2.0]], 45) == [1.0] * 20 + [0.5] * 20  # one diverged
    with pytest.raises(ValueError, match="no losses of stock: found 1 complete runs of 12 steps"):
        losses([[]], 12)
