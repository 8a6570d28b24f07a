from __future__ import annotations

import itertools
import math

import pytest

from tests.support.reports import winning_report
from torchboost.bench.report import report
from torchboost.measure.evidence import BenchReport


def report_with(values: tuple[float, ...]) -> BenchReport:
    """Return a report of a metric and losses that go through these values."""
    supply, made = itertools.cycle(values), winning_report()
    for contestant in made.contestants:
        for curve in contestant.curves:
            curve.metric[:] = curve.train_loss[:] = list(itertools.islice(supply, len(curve.metric)))
    return made.model_copy(update={"metric_name": "metric"})


def test_write_html_makes_folders_and_leaves_nothing_else(tmp_path):
    path = report.write_html(winning_report(), tmp_path / "a" / "b" / "report.html")
    assert path.read_text(encoding="utf-8") == report.html_page(winning_report())
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_the_whole_face_is_there():
    made = winning_report()
    assert report.markdown(made).startswith("## A small benchmark")
    assert report.plain(report.result_table(made)).startswith("contestant")


@pytest.mark.parametrize(
    "values", [(1e308, -1e308, 1.0), (1e308,), (-1e308, 1e-9), (1e308, 5e-324, 1e140), (5e-324,), (math.inf, 1e308)]
)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_values_of_any_size_make_a_report(values, capsys):
    made = report_with(values)
    assert "</html>" in report.html_page(made)
    report.print_report(made)
    assert capsys.readouterr().out
