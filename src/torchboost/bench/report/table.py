"""The result as a table, for the terminal, plain text and Markdown."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from torchboost.bench.report import wording
from torchboost.bench.verdict import Summary, headline, summarise, verdicts
from torchboost.measure.evidence import BenchReport, Interval, Ratio

__all__ = ["Table", "markdown", "plain", "print_report", "print_table", "result_table"]

NOTHING = "\N{EN DASH}"
FULL_WIDTH = 130
"""Columns of a terminal from which on a table has intervals."""

_MARKS = {"good": "+", "bad": "-", "open": "?"}


@dataclass(frozen=True, slots=True)
class Table:
    """Text cells under headings. The first column names the row, the others hold numbers.

    Args:
        headings: One per column.
        rows: Each as long as ``headings``.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _ratio(ratio: Ratio | None) -> str:
    return NOTHING if ratio is None else wording.ratio_interval(ratio.interval)


def _metric(final: Interval | None, share: bool) -> str:
    return NOTHING if final is None else wording.measure(final.mid, share=share)


def _difference(summary: Summary, share: bool) -> str:
    found = summary.difference
    if found is None:
        return NOTHING
    mean = wording.difference(found.mean, share=share)
    if math.isinf(found.worst):
        return mean
    return f"{mean} (at worst {wording.difference(found.worst, share=share).removesuffix(' points')})"


def _cells(summary: Summary, share: bool) -> tuple[str, ...]:
    to_target = summary.seconds_to_target
    return (
        summary.contestant.name,
        wording.seconds_interval(summary.contestant.step_seconds),
        _ratio(summary.stock),
        _ratio(summary.hand),
        _metric(summary.final, share),
        _difference(summary, share),
        NOTHING if to_target is None else wording.seconds(to_target),
        wording.seconds(summary.contestant.warmup_seconds) if summary.contestant.warmup_seconds else NOTHING,
        NOTHING if summary.peak_bytes is None else wording.size(summary.peak_bytes),
    )


def result_table(report: BenchReport) -> Table:
    """Return a row per contestant: step time, both ratios, metric, difference to stock, time to target, set-up, memory.

    Columns without entries, such as the metric if there was no training, are left out.
    """
    share = wording.is_share(report)
    headings = (
        "contestant",
        "time per step",
        "against stock",
        "against best hand",
        report.metric_name,
        "difference to stock",
        "time to target",
        "set-up",
        "memory",
    )
    rows = [_cells(summary, share) for summary in summarise(report)]
    kept = [k for k in range(len(headings)) if k < 2 or any(row[k] != NOTHING for row in rows)]
    return Table(
        headings=tuple(headings[k] for k in kept),
        rows=tuple(tuple(row[k] for k in kept) for row in rows),
    )


def plain(table: Table) -> str:
    """Format a table with spaces only."""
    lines = [table.headings, *table.rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(table.headings))]
    rendered = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rendered.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in rendered)


def _cell(text: str) -> str:
    flat = " ".join(text.split()).replace("\\", "\\\\")
    for character in "|<>`*_[]":
        flat = flat.replace(character, f"\\{character}")
    return flat


def markdown(report: BenchReport) -> str:
    """Return the result as Markdown: headline, table, verdicts and environment."""
    table = result_table(report)
    env = report.environment
    commit = f" ({_cell(env.commit)})" if env.commit else ""
    lines = [f"## {_cell(report.title)}", "", f"**{_cell(headline(report).text)}**", ""]
    lines.append("| " + " | ".join(_cell(h) for h in table.headings) + " |")
    lines.append("|" + "|".join([" --- ", *[" ---: "] * (len(table.headings) - 1)]) + "|")
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in table.rows]
    lines.append("")
    sentences = [sentence for group in verdicts(report).values() for sentence in group]
    lines += [f"- **{_MARKS[sentence.tone]}** {_cell(sentence.text)}" for sentence in sentences]
    lines += [f"- Note: {_cell(note)}" for note in report.notes]
    lines += [
        "",
        f"{_cell(report.model)} ({report.parameters:,} parameters) on {_cell(report.workload)}, batch {report.batch}; "
        f"{_cell(env.processor)}, {wording.count(env.threads, 'thread')}, {_cell(env.device)}; "
        f"torch {_cell(env.torch)}, torchboost {_cell(env.torchboost)}{commit}, {_cell(env.date)}.",
    ]
    return "\n".join(lines) + "\n"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO | None = None) -> None:
    """Print a table: drawn on a terminal if rich is installed, plain text otherwise.

    A narrow terminal gets no intervals, which stand in parentheses; the sentences below a table give them.

    Args:
        headings: One per column.
        rows: Each as long as ``headings``. Text of a report is never taken for markup.
        file: By default standard output.
    """
    output = sys.stdout if file is None else file
    if not output.isatty() or importlib.util.find_spec("rich") is None:
        print(plain(Table(tuple(headings), tuple(map(tuple, rows)))), file=output)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=output)
    wide = console.width >= FULL_WIDTH
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(Text(heading))
    for row in rows:
        halves = [cell.partition(" (") for cell in row]
        table.add_row(*(Text(f"{main}\n({rest}" if wide and rest else main) for main, _, rest in halves))
    console.print(table)


def print_report(report: BenchReport, file: TextIO | None = None) -> None:
    """Print the headline, the table and the verdicts.

    Args:
        report: The report to print.
        file: By default standard output.
    """
    table = result_table(report)
    print(f"{report.title}\n{headline(report).text}\n", file=file)
    print_table(table.headings, table.rows, file)
    sentences = [sentence for group in verdicts(report).values() for sentence in group]
    lines = [f"{_MARKS[sentence.tone]} {sentence.text}" for sentence in sentences]
    print("", *lines, *(f"! {note}" for note in report.notes), sep="\n", file=file)
