"""The output of commands: JSON or a table on standard output, one line on standard error if there is an error."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any, NoReturn

import typer
from pydantic import ValidationError

from torchboost.bench.report.table import Table, plain
from torchboost.bench.report.verdict import headline, verdicts
from torchboost.cli.environment import EXTRAS
from torchboost.errors import ConfigError, IncompatibleError, RankDisagreementError
from torchboost.measure.evidence import BenchReport
from torchboost.tuning.evidence import TuneReport
from torchboost.tuning.sentences import HEADINGS, cost, horizon, notes, rows
from torchboost.tuning.sentences import headline as answer

__all__ = ["fail", "json_only", "print_json", "print_table", "print_tuning", "settings_of", "summary_of", "user_errors"]


def fail(message: str) -> NoReturn:
    """Print an error on standard error and exit with code 1."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(1)


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn user errors into one message and exit code 1. Bugs of torchboost keep their traceback."""
    try:
        yield
    except (ConfigError, IncompatibleError, RankDisagreementError) as error:
        fail(str(error))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        fail(f"this is not a report of torchboost: {where}: {first['msg']}.")
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "torchboost":
            raise
        pointer = " `torchboost doctor` shows which extras are complete." if _in_an_extra(error.name) else ""
        fail(f"{error}.{pointer}")
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        fail(f"{what}{error.strerror or error}")


@contextmanager
def json_only(json: bool) -> Iterator[None]:
    """Send what the user's code prints to standard error if standard output is for JSON."""
    with redirect_stdout(sys.stderr) if json else nullcontext():
        yield


def _in_an_extra(package: str | None) -> bool:
    return any((package or "").partition(".")[0] in modules for modules in EXTRAS.values())


def print_json(data: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print data as indented JSON. Other types are printed as text, and characters that cannot be shown are escaped."""
    text = json.dumps(data, indent=2, default=str, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(data, indent=2, default=str)
    typer.echo(text)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn on a terminal, plain text otherwise."""
    if not sys.stdout.isatty():
        typer.echo(plain(Table(tuple(headings), tuple(tuple(row) for row in rows))))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(Text(heading))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def print_tuning(report: TuneReport) -> None:
    """Print a tuning: the answer, what became of each candidate, and for which runs it holds."""
    for line in (answer(report), cost(report)):
        if line:
            typer.echo(line)
    print_table(list(HEADINGS), rows(report))
    for line in (horizon(report), *(f"Note: {note}" for note in notes(report))):
        typer.echo(line)


def summary_of(report: BenchReport | TuneReport) -> dict[str, Any]:
    """Return the headline of a report, and the sentences about every contestant or the data of a tuning."""
    if isinstance(report, TuneReport):
        return {"headline": answer(report), **report.model_dump(mode="json")}
    said = {name: [verdict._asdict() for verdict in group] for name, group in verdicts(report).items()}
    return {"title": report.title, "headline": headline(report).text, "verdicts": said}


def settings_of(algorithm: Any) -> dict[str, Any]:
    """Return the settings of an algorithm by name."""
    return {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm) if field.init}
