"""The output of commands: JSON or a table on standard output, progress and one line of an error on standard error."""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO

import typer
from pydantic import ValidationError

import torchboost
from torchboost.bench.report.table import print_table
from torchboost.bench.verdict import headline, verdicts
from torchboost.errors import ConfigError, FactoryError, IncompatibleError, RankDisagreementError
from torchboost.measure.evidence import BenchReport
from torchboost.tuning.report import HEADINGS, TuneReport, cost, horizon, notes, rows
from torchboost.tuning.report import headline as answer

__all__ = [
    "EXTRAS",
    "Display",
    "display",
    "fail",
    "input_errors",
    "json_only",
    "print_json",
    "print_table",
    "print_tuning",
    "settings_of",
    "summary_of",
    "user_errors",
]

EXTRAS = {
    "cli": ("typer", "rich", "jinja2"),
    "workloads": ("sklearn", "pyarrow", "PIL"),
    "transformers": ("transformers", "accelerate"),
}
"""Extra -> the modules that it installs."""


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
        package = (error.name or "").partition(".")[0]
        optional = any(package in modules for modules in EXTRAS.values())
        fail(f"{error}.{' `torchboost doctor` shows which extras are complete.' if optional else ''}")
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        fail(f"{what}{error.strerror or error}")


EARLY = ("", "data")
"""Phases in which a ``ValueError`` of the package comes from the arguments, and not from the training."""


@contextmanager
def input_errors(progress: Display) -> Iterator[None]:
    """Turn an error in the arguments or the factory into one message and exit code 1.

    What the user's training raises keeps its traceback, which its author needs.
    """
    try:
        yield
    except ValidationError:
        raise
    except ValueError as error:
        origin = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        ours = origin.is_relative_to(Path(torchboost.__file__).resolve().parent)
        if not isinstance(error, FactoryError) and not (ours and progress.phase in EARLY):
            raise
        fail(str(error))


@contextmanager
def json_only(json: bool) -> Iterator[None]:
    """Send what the user's code prints to standard error if standard output is for JSON."""
    with redirect_stdout(sys.stderr) if json else nullcontext():
        yield


def print_json(data: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print data as indented JSON. Other types are printed as text, and characters that cannot be shown are escaped."""
    text = json.dumps(data, indent=2, default=str, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(data, indent=2, default=str)
    typer.echo(text)


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


class Display(Protocol):
    """A :class:`~torchboost.measure.stopwatch.Progress` that remembers the last phase."""

    phase: str

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` parts of ``phase`` are done."""
        ...


@contextmanager
def display(stream: TextIO | None = None) -> Iterator[Display]:
    """Yield a display on ``stream``, by default standard error: bars on a terminal, a few plain lines otherwise.

    Bars are removed at the end.
    """
    output = sys.stderr if stream is None else stream
    if not output.isatty():
        yield _Lines(output)
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description:<10}"),
        rich.BarColumn(bar_width=30),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[note]}", markup=False),
    )
    with rich.Progress(*columns, console=Console(file=output), transient=True) as bars:
        yield _Bars(bars)


class _Lines:
    """Prints one line at the start and the end of a phase, and at most ten lines in between."""

    def __init__(self, stream: TextIO) -> None:
        self.phase = ""
        self._stream = stream
        self._tenth = -1

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        tenth = 10 * done // max(total, 1)
        if phase == self.phase and tenth == self._tenth:
            return
        self.phase, self._tenth = phase, tenth
        print(f"{phase}: {done} of {total}{f' ({note})' if note else ''}", file=self._stream, flush=True)


class _Bars:
    """Draws one bar per phase."""

    def __init__(self, bars: Any) -> None:
        self.phase = ""
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        self.phase = phase
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total, note=note)
        self._bars.update(self._tasks[phase], completed=done, total=total, note=note)
