from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bench.report.test_page import looked_at
from tests.tuning.test_race import Planted
from torchboost.measure.stopwatch import environment
from torchboost.tuning.evidence import Candidate, TuneReport
from torchboost.tuning.page import tune_page, write_page
from torchboost.tuning.race import Race

PLANTED = {
    "levers: channels_last, autocast": (0.0, 0.55, False),
    "less_bn as in O2": (-2.0, 0.7, True),
    "grad_freeze as in O1": (-0.1, 0.8, True),
}


def tuned(title: str = "train.py:make", *, budget: float = 3000.0) -> TuneReport:
    train = Planted({k: v[0] for k, v in PLANTED.items()}, {k: v[1] for k, v in PLANTED.items()})
    candidates = [Candidate(name=k, extra={k.split()[0]: True}, skips_work=v[2]) for k, v in PLANTED.items()]
    race = Race(train=train, candidates=candidates, drop=0.01, budget=budget, total_steps=101)
    extra = race.decide()
    return TuneReport(
        title=title,
        model="ResNet",
        parameters=701466,
        drop=0.01,
        budget_seconds=budget,
        spent_seconds=race.spent,
        steps=101,
        total_steps=101,
        most_seeds=12,
        error=0.05,
        state="complete",
        findings=list(race.findings.values()),
        whole=race.whole,
        extra=extra,
        runs=list(race.runs.values()),
        environment=environment(),
    )


def test_the_answer_comes_first_and_every_candidate_and_run_is_there(tmp_path: Path):
    report = tuned()
    text = write_page(report, tmp_path / "new" / "tune.html").read_text(encoding="utf-8")
    assert text == tune_page(report)
    assert text.index("Turn on levers") < text.index("What was tried") < text.index("Raw numbers")
    for name in PLANTED:
        assert f'<th scope="row">{name}</th>' in text
    assert f"All {len(report.runs)} runs" in text
    assert text.count("<svg") == text.count('role="img"') == text.count('aria-label="Difference') == 2


def test_text_of_the_user_is_escaped():
    text = tune_page(tuned("<script>alert(1)</script>&.py:make"))
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;.py:make" in text


def test_a_tuning_without_a_comparison_has_no_figure():
    report = tuned(budget=30.0)
    text = tune_page(report)
    assert "<svg" not in text
    assert re.search("Nothing is turned on", text)


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_no_sideways_scroll_and_no_console_errors(tmp_path: Path, width: int):
    wanted, room, figures = looked_at(tmp_path, tune_page(tuned("a-long-name-" * 12 + ".py:make")), width)
    assert wanted <= room
    assert figures == 1
