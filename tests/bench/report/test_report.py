from __future__ import annotations

from tests.support.reports import winning_report
from torchboost.bench.report import report


def test_write_html_makes_folders_and_leaves_nothing_else(tmp_path):
    path = report.write_html(winning_report(), tmp_path / "a" / "b" / "report.html")
    assert path.read_text(encoding="utf-8") == report.html_page(winning_report())
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_the_whole_face_is_there():
    made = winning_report()
    assert report.markdown(made).startswith("## A small benchmark")
    assert report.plain(report.result_table(made)).startswith("contestant")
