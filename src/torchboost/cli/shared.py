"""Shared by the commands: the choice of training and device, errors, JSON, CSV, tables and progress.

Standard output has the answer, JSON or a table. Standard error has the progress and one line of an error.
"""

from __future__ import annotations

import json
import math
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from csv import DictWriter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
import typer
from pydantic import BaseModel, ValidationError

import torchboost
from torchboost.bench.factory import Factory
from torchboost.bench.report.table import print_report
from torchboost.bench.verdict import headline, summarise, verdicts
from torchboost.core.hardware import device_fault
from torchboost.errors import ConfigError, FactoryError, IncompatibleError, RankDisagreementError
from torchboost.measure.evidence import BenchReport
from torchboost.tuning.report import TuneReport, cost
from torchboost.tuning.report import headline as answer
from torchboost.workloads.named import Workload, find_workload

EXTRAS = {
    "cli": ("typer", "jinja2"),
    "workloads": ("sklearn", "pyarrow", "PIL"),
    "transformers": ("transformers", "accelerate"),
}
"""Extra -> the modules that it installs."""

EARLY = ("", "data")
"""Phases in which a ``ValueError`` of the package comes from the arguments, and not from the training."""


def usable_device(device: str) -> torch.device:
    """Return the device that the user named, or raise ``ValueError`` unless it can hold a tensor here.

    ``auto`` is the accelerator that torch finds, if it holds numbers in float64, which parts of torchboost need, and
    otherwise the CPU.
    """
    if device == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return found if found is not None and device_fault(found, torch.float64) is None else torch.device("cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"--device: {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    fault = device_fault(place)
    if fault is not None:
        raise ValueError(f"--device: {device!r} cannot be used here: {fault}")
    return place


def usable_folder(folder: Path) -> None:
    """Create a folder for reports, or raise ``ValueError`` unless files can be written there."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out: found {folder}, a file; give a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--out: {folder} cannot be written to; choose another folder.")


def names_file(source: str) -> bool:
    """Return whether an argument names a Python file, with a function as it should, or without."""
    return source.endswith(".py") or source.rpartition(":")[0].endswith(".py")


def chosen(workload: str, *, accuracy: bool = False, **options: object) -> Workload | Factory:
    """Return the workload with a name, or the factory that ``path/to/train.py:make`` names. No data is loaded.

    ``options`` do not apply to a factory. They are None without a value.

    Raises:
        ValueError: The workload or function does not exist, or an option does not apply to it.
    """
    if not names_file(workload):
        if accuracy:
            raise ValueError("--accuracy: leave it out; the metric of a named workload is known.")
        return find_workload(workload)
    for name, value in options.items():
        if value is not None:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: found {str(value)!r}; leave it out, since a factory builds model and data.")
    return Factory.at(workload, accuracy=accuracy)


def loaded(choice: Workload | Factory, data: Path | None, limit: int | None, device: torch.device) -> Factory:
    """Return the chosen training as a factory of at most so many training samples, with its data on a device."""
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

    With ``progress``, the code of the user runs. An error in it is shown with the frames of this code and of its calls,
    without the frames around it. An error in the arguments or in what the factory returns is one line, and so is a call
    of ``sys.exit``, whose status would tell programs that there is an answer.
    """
    try:
        yield
    except typer.Exit:
        raise
    except SystemExit as error:
        if progress is None:
            raise
        stack = [f for f in traceback.extract_tb(error.__traceback__) if not _is_ours(Path(f.filename))]
        where = next((f"{f.filename}, line {f.lineno}: " for f in stack if _is_users(Path(f.filename))), "")
        fail(f"{where}the program was ended with status {error.code!r}; a factory must return.")
    except Exception as error:
        seen = error.__cause__ if isinstance(error, ValueError) and error.__cause__ is not None else error
        frames = "" if progress is None or isinstance(seen, FactoryError) else users_traceback(seen)
        said = _message(error, progress)
        if frames:
            typer.echo(frames, err=True, nl=False)
            if error is seen:
                raise typer.Exit(1) from None
        if said is None:
            raise
        fail(said)


def _message(error: Exception, progress: Display | None) -> str | None:
    """Return the message of a user's error in one line, or None if it may be a bug."""
    if isinstance(error, (ConfigError, IncompatibleError, RankDisagreementError, FactoryError)):
        return str(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        return f"this is not a report of torchboost: {where}: {first['msg']}."
    if isinstance(error, ValueError):
        origin = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        early = progress is not None and progress.phase in EARLY
        return str(error) if early and _is_ours(origin) else None
    if isinstance(error, ImportError):
        package = (error.name or "").partition(".")[0]
        if package == "torchboost":
            return None
        optional = any(package in modules for modules in EXTRAS.values())
        return f"{error}.{' `torchboost doctor` shows which extras are complete.' if optional else ''}"
    if isinstance(error, OSError):
        return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}"
    return None


def users_traceback(error: BaseException) -> str:
    """Return an error as Python prints it, from the first frame of the user on and without the frames of this package.

    A file is the user's if it belongs neither to Python nor to an installed package. Without a frame of such a file the
    text is empty, except for a file that is not Python.
    """
    shown = traceback.TracebackException.from_exception(error)
    one, users = shown, isinstance(error, SyntaxError)
    while one is not None:
        frames = [frame for frame in one.stack if not _is_ours(Path(frame.filename))]
        first = next((number for number, frame in enumerate(frames) if _is_users(Path(frame.filename))), len(frames))
        users = users or first < len(frames)
        one.stack = traceback.StackSummary.from_list(frames[first:])
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return "".join(shown.format()) if users else ""


def _is_ours(file: Path) -> bool:
    return file.resolve().is_relative_to(Path(torchboost.__file__).resolve().parent)


def _is_users(file: Path) -> bool:
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    python = file.resolve().is_relative_to(Path(sysconfig.get_paths()["stdlib"]).resolve())
    return file.is_file() and not installed and not python


@contextmanager
def answer_only(only: bool) -> Iterator[None]:
    """Send what the user's code prints to standard error if standard output is for an answer to programs."""
    with redirect_stdout(sys.stderr) if only else nullcontext():
        yield


def saved_report(path: Path) -> BenchReport | TuneReport:
    """Return the report that ``bench`` or ``tune`` saved."""
    try:
        is_tuning = "findings" in json.loads(path.read_bytes())
    except (ValueError, TypeError):
        is_tuning = False  # any other file is checked as a report of ``bench``
    return (TuneReport if is_tuning else BenchReport).load(path)


def show(report: BenchReport | TuneReport, /, *, json: bool, csv: bool, **files: Path | None) -> None:
    """Print a report, with ``json`` also the paths of the files that it went to."""
    if json:
        print_json(
            {**summary_of(report), **{name: None if path is None else str(path) for name, path in files.items()}}
        )
    elif csv:
        print_csv(_of_tuning(report) if isinstance(report, TuneReport) else _figures(report))
    elif isinstance(report, TuneReport):
        typer.echo(str(replace(report.sheet, before=tuple(filter(None, (answer(report), cost(report)))))))
    else:
        print_report(report)


def _of_tuning(report: TuneReport) -> list[dict[str, Any]]:
    """Return the recipes of the search, then the plans of the confirmation."""
    parts = {"search": report.findings, "confirmation": report.whole}
    return [{"part": part, **finding.model_dump()} for part, found in parts.items() for finding in found]


def _figures(report: BenchReport) -> list[dict[str, Any]]:
    """Return the figures of each contestant."""
    kept = {"name", "kind", "step_seconds", "warmup_seconds"}
    return [
        {**one.contestant.model_dump(include=kept), **{f.name: getattr(one, f.name) for f in fields(one)[1:]}}
        for one in summarise(report)
    ]


def print_json(data: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print data as indented JSON in ASCII, which every output can show. Other types are printed as text.

    JSON has no infinity and no NaN. They are strings, as in the files of reports.
    """
    typer.echo(json.dumps(_finite(data), indent=2, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def print_csv(rows: Sequence[Mapping[str, Any] | BaseModel]) -> None:
    """Print records as CSV, a nested value in a column of its own: ``step_seconds.low``. Unknown values are empty.

    A spreadsheet runs a text that begins as a formula does. Such a text gets an apostrophe in front.
    """
    flat = [{name: _no_formula(cell) for name, cell in _columns("", row).items()} for row in rows]
    writer = DictWriter(sys.stdout, list(dict.fromkeys(name for row in flat for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)


def _no_formula(cell: Any) -> Any:
    if not isinstance(cell, str) or len(cell) < 2 or cell[0] not in "=+-@":
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def _columns(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, BaseModel):
        value = value.model_dump()
    elif (fields_of := getattr(value, "_asdict", None)) is not None:  # a named tuple
        value = fields_of()
    if not isinstance(value, Mapping):
        return {} if value is None else {name: value}
    parts = [_columns(f"{name}.{key}" if name else str(key), each) for key, each in value.items()]
    return {key: each for part in parts for key, each in part.items()}


def summary_of(report: BenchReport | TuneReport) -> dict[str, Any]:
    """Return the headline of a report, and the sentences about every contestant or the data of a tuning."""
    if isinstance(report, TuneReport):
        return {"headline": answer(report), **report.model_dump(mode="json")}
    sentences = {name: [sentence._asdict() for sentence in group] for name, group in verdicts(report).items()}
    return {"title": report.title, "headline": headline(report).text, "verdicts": sentences, "notes": report.notes}


class Display:
    """A :class:`~torchboost.measure.stopwatch.Progress` that remembers the last phase.

    It prints one line at the start and the end of a phase, and at most ten lines in between.
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
