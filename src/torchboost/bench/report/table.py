"""The result as a table, for the terminal and as plain text."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from torchboost.bench.report import wording
from torchboost.bench.verdict import LEAST_PAIRS, Summary, headline, summarise, verdicts
from torchboost.measure.evidence import BenchReport, Ratio

NOTHING = "\N{EN DASH}"

_MARKS = {"good": "+", "bad": "-", "open": "?"}


@dataclass(frozen=True, slots=True)
class Table:
    """Text cells under headings. The first column names the row, the others hold numbers."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def result_table(report: BenchReport) -> Table:
    """Return a row per contestant: step time, ratios, metric, difference, whole run, time to target, set-up, memory.

    Columns without entries, such as the metric if there was no training, are omitted.
    """
    share = wording.is_share(report)

    def difference(summary: Summary) -> str:
        if summary.difference is None:
            return NOTHING
        mean, worst = (wording.difference(value, share=share) for value in summary.difference[:2])
        sure = math.isfinite(summary.difference.worst) and summary.difference.worst < summary.difference.best
        return f"{mean} (at worst {worst.removesuffix(' points')})" if sure else mean

    columns: dict[str, Callable[[Summary], str]] = {
        "contestant": lambda s: s.contestant.name,
        "time per step": lambda s: wording.seconds_interval(s.contestant.step_seconds),
        "against stock": lambda s: ratio_text(s.stock),
        "against best hand": lambda s: ratio_text(s.hand),
        report.metric_name: lambda s: NOTHING if s.final is None else wording.measure(s.final, share=share),
        "difference to stock" if report.metric_higher_is_better else "better than stock by": difference,
        "whole run": lambda s: NOTHING if s.run_seconds is None else wording.seconds(s.run_seconds),
        "time to target": lambda s: NOTHING if s.seconds_to_target is None else wording.seconds(s.seconds_to_target),
        "set-up": lambda s: wording.seconds(s.contestant.warmup_seconds) if s.contestant.warmup_seconds else NOTHING,
        "memory": lambda s: NOTHING if s.peak_bytes is None else wording.size(s.peak_bytes),
    }
    summaries = summarise(report)
    cells = {heading: [column(summary) for summary in summaries] for heading, column in columns.items()}
    kept = [name for k, name in enumerate(cells) if k < 2 or set(cells[name]) != {NOTHING}]
    return Table(headings=tuple(kept), rows=tuple(zip(*(cells[name] for name in kept), strict=True)))


def ratio_text(found: Ratio | None) -> str:
    """Return a ratio with its interval, which fewer than six rounds do not give."""
    if found is None:
        return NOTHING
    return wording.ratio_interval(found.interval) if found.pairs >= LEAST_PAIRS else wording.ratio(found.interval.mid)


def plain(table: Table) -> str:
    """Format a table with spaces only."""
    lines = [table.headings, *table.rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(table.headings))]
    rendered = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rendered.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in rendered)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO | None = None) -> None:
    """Print a table as plain text.

    A terminal that is too narrow gets no intervals, which stand in parentheses. The sentences below a table give them.
    """
    output = sys.stdout if file is None else file
    text = plain(Table(tuple(headings), tuple(map(tuple, rows))))
    if output.isatty() and max(map(len, text.splitlines())) > shutil.get_terminal_size().columns:
        text = plain(Table(tuple(headings), tuple(tuple(cell.partition(" (")[0] for cell in row) for row in rows)))
    print(text, file=output)


def print_report(report: BenchReport, file: TextIO | None = None) -> None:
    """Print the headline, the table and the verdicts to a file, by default standard output."""
    table = result_table(report)
    print(f"{report.title}\n{headline(report).text}\n", file=file)
    print_table(table.headings, table.rows, file)
    sentences = [sentence for group in verdicts(report).values() for sentence in group]
    lines = [f"{_MARKS[sentence.tone]} {sentence.text}" for sentence in sentences]
    print("", *lines, *(f"! {note}" for note in report.notes), sep="\n", file=file)
