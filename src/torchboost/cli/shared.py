"""What the commands share: options, the choice of training and device, errors, JSON, tables and progress.

Standard output has the answer, JSON or a table. Standard error has the progress and one line of an error.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import torch
import typer
from pydantic import ValidationError

import torchboost
from torchboost.bench.factory import Factory
from torchboost.bench.report.table import print_table
from torchboost.bench.verdict import headline, verdicts
from torchboost.core.hardware import device_fault
from torchboost.errors import ConfigError, FactoryError, IncompatibleError, RankDisagreementError
from torchboost.measure.evidence import BenchReport
from torchboost.tuning.report import HEADINGS, TuneReport, cost, horizon, notes, rows
from torchboost.tuning.report import headline as answer
from torchboost.workloads.named import Workload, find_workload

__all__ = [
    "EXTRAS",
    "Data",
    "Device",
    "Display",
    "Html",
    "Json",
    "TrainLimit",
    "chosen",
    "fail",
    "json_only",
    "loaded",
    "print_json",
    "print_table",
    "print_tuning",
    "summary_of",
    "usable_device",
    "user_errors",
]

Json = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]
Html = Annotated[bool, typer.Option("--html/--no-html", help="Write a page next to the report.")]
Data = Annotated[Path | None, typer.Option(help="Path of the data, for workloads that need it.")]
TrainLimit = Annotated[int | None, typer.Option(min=1, help="Use only so many training samples.")]
Device = Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1, ...")]

EXTRAS = {
    "cli": ("typer", "jinja2"),
    "workloads": ("sklearn", "pyarrow", "PIL"),
    "transformers": ("transformers", "accelerate"),
}
"""Extra -> the modules that it installs."""

EARLY = ("", "data")
"""Phases in which a ``ValueError`` of the package comes from the arguments, and not from the training."""


def usable_device(device: str) -> torch.device:
    """Return the device that the user named, or raise ``ValueError`` unless it can hold a tensor here."""
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"--device: {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    fault = device_fault(place)
    if fault is not None:
        raise ValueError(f"--device: {device!r} cannot be used here: {fault}")
    return place


def chosen(workload: str, *, accuracy: bool = False, **options: object) -> Workload | Factory:
    """Return the workload with a name, or the factory that ``path/to/train.py:make`` names. No data is loaded.

    Args:
        workload: As given on the command line.
        accuracy: Whether a factory's metric is an accuracy.
        options: What a factory makes itself, by the name of the option; None without a value.

    Raises:
        ValueError: The workload or function does not exist, or an option does not apply to it.
    """
    if workload.endswith(".py"):
        raise ValueError(f"found {workload!r} without a function; needed: {workload}:make.")
    if not workload.rpartition(":")[0].endswith(".py"):
        if accuracy:
            raise ValueError("--accuracy: leave it out; the metric of a named workload is known.")
        return find_workload(workload)
    for name, value in options.items():
        if value is not None:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: found {str(value)!r}; leave it out, since a factory builds model and data.")
    return Factory.at(workload, accuracy=accuracy)


def loaded(choice: Workload | Factory, data: Path | None, limit: int | None, device: torch.device) -> Factory:
    """Return what was chosen as a factory of at most so many training samples, with its data on a device."""
    if isinstance(choice, Workload):
        return choice.factory(choice.load(data, limit).to(device), device)
    return replace(choice, train_limit=limit)


def fail(message: str) -> NoReturn:
    """Print an error on standard error and exit with code 1."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(1)


@contextmanager
def user_errors(progress: Display | None = None) -> Iterator[None]:
    """Turn user errors into one message and exit code 1. Bugs of torchboost keep their traceback.

    With ``progress``, an error in the arguments or the factory is one, too. What the user's training raises keeps its
    traceback, which its author needs.
    """
    try:
        yield
    except (ConfigError, IncompatibleError, RankDisagreementError) as error:
        fail(str(error))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        fail(f"this is not a report of torchboost: {where}: {first['msg']}.")
    except ValueError as error:
        origin = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        ours = origin.is_relative_to(Path(torchboost.__file__).resolve().parent)
        early = progress is not None and progress.phase in EARLY
        if not isinstance(error, FactoryError) and not (ours and early):
            raise
        fail(str(error))
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package == "torchboost":
            raise
        optional = any(package in modules for modules in EXTRAS.values())
        fail(f"{error}.{' `torchboost doctor` shows which extras are complete.' if optional else ''}")
    except OSError as error:
        fail(f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}")


@contextmanager
def json_only(json: bool) -> Iterator[None]:
    """Send what the user's code prints to standard error if standard output is for JSON."""
    with redirect_stdout(sys.stderr) if json else nullcontext():
        yield


def print_json(data: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print data as indented JSON in ASCII, which every output can show. Other types are printed as text."""
    typer.echo(json.dumps(data, indent=2, default=str))


def print_tuning(report: TuneReport) -> None:
    """Print a tuning: the answer, what became of each candidate, and for which runs it holds."""
    typer.echo("\n".join(filter(None, (answer(report), cost(report)))))
    print_table(list(HEADINGS), rows(report))
    typer.echo("\n".join([horizon(report), *(f"Note: {note}" for note in notes(report))]))


def summary_of(report: BenchReport | TuneReport) -> dict[str, Any]:
    """Return the headline of a report, and the sentences about every contestant or the data of a tuning."""
    if isinstance(report, TuneReport):
        return {"headline": answer(report), **report.model_dump(mode="json")}
    sentences = {name: [sentence._asdict() for sentence in group] for name, group in verdicts(report).items()}
    return {"title": report.title, "headline": headline(report).text, "verdicts": sentences}


class Display:
    """A :class:`~torchboost.measure.stopwatch.Progress` that remembers the last phase.

    It prints one line at the start and the end of a phase, and at most ten lines in between.

    Args:
        stream: Where the lines go.
    """

    def __init__(self, stream: TextIO) -> None:
        self.phase = ""
        self._stream, self._tenth = stream, -1

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` parts of ``phase`` are done."""
        last, self.phase = (self.phase, self._tenth), phase
        self._tenth = 10 * done // max(total, 1)
        if last != (phase, self._tenth):
            print(f"{phase}: {done} of {total}{f' ({note})' if note else ''}", file=self._stream, flush=True)
