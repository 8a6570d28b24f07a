"""A report for people: on the terminal, as Markdown, or as one HTML page.

The data is :class:`~torchboost.measure.evidence.BenchReport`; the sentences come from ``verdict``, the drawing from
``figures``.
"""

from __future__ import annotations

from pathlib import Path

from torchboost.bench.report.html import write_whole_page
from torchboost.bench.report.page import html_page
from torchboost.bench.report.table import markdown, plain, print_report, result_table
from torchboost.measure.evidence import BenchReport

__all__ = ["html_page", "markdown", "plain", "print_report", "result_table", "write_html"]


def write_html(report: BenchReport, path: str | Path) -> Path:
    """Write the page of a report, completely or not at all, and return its path.

    Args:
        report: The report to show.
        path: The file to write. Missing folders are created.
    """
    return write_whole_page(html_page(report), path)
