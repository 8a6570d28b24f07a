"""Earlier tunings: their reports side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from torchboost.bench.report import wording
from torchboost.errors import ConfigError
from torchboost.sheet import percent
from torchboost.tuning.report import Finding, TuneReport, headline, proven_whole, turned_on

RESULTS = ("", "report", "training", "date", "drop", "turned on", "time", "metric against stock", "your rate", "tuning")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The report in a file, or why it cannot be used. Reports of earlier versions are not sealed."""

    path: Path
    report: TuneReport | None = None
    sealed: bool = False
    fault: str = ""


def results_in(paths: Sequence[Path]) -> list[Result]:
    """Return the reports in files, and in folders with all that is below them, those of one training together.

    Raises:
        OSError: A file or folder is not there, or cannot be read.
    """
    inside = {path: sorted(filter(Path.is_file, path.rglob("*.report.json"))) for path in paths if path.is_dir()}
    files = dict.fromkeys(file for path in paths for file in inside.get(path, [path]))
    return sorted(map(_read, files), key=lambda one: _order(one.report))


def _order(report: TuneReport | None) -> tuple[str, ...]:
    return ("~",) if report is None else (report.title, _training(report), report.environment.date)


def _read(path: Path) -> Result:
    try:
        return Result(path=path, report=TuneReport.load(path), sealed="seal" in json.loads(path.read_bytes()))
    except ConfigError:
        return Result(path=path, fault="changed after it was written: its seal does not fit", sealed=True)
    except ValidationError:
        return Result(path=path, fault="not a report of torchboost tune")


def _training(report: TuneReport) -> str:
    """Return a name that two reports share if model, optimizer, first batch and length are the same."""
    return f"{report.fingerprint[:4] or '?'}-{report.data[:4] or '?'}-{report.steps}"


def figures_of_results(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return :func:`result_rows` as plain numbers: the time as a share of stock's, the tuning in seconds."""
    return [{"number": number, **_figures(one)} for number, one in enumerate(results, start=1)]


def _figures(one: Result) -> dict[str, Any]:
    found, report = {"report": str(one.path), "sealed": one.sealed}, one.report
    if report is None:
        return {**found, "turned on": one.fault}
    complete = report.state == "complete"
    proven = proven_whole(report) if complete else None
    speed = proven.speed if proven is not None else None
    return {
        **found,
        "training": _training(report),
        "date": report.environment.date[:16],
        "drop": report.drop,
        "turned on": (_in_the_file(report) or "nothing") if complete else "not finished",
        "time": None if speed is None else 1 / speed.mid,
        "metric against stock": None if proven is None else proven.difference,
        "your rate": None if report.rate is None else report.rate.best,
        "tuning": report.spent_seconds,
    }


def _in_the_file(report: TuneReport) -> str:
    """Return what the configuration turns on, and the rate if no plan was confirmed and stock's best one is in it."""
    rate = f"{report.rate.best:g} times your rate" if report.rate is not None and report.rate.kept else ""
    return ", ".join(filter(None, (turned_on(report), rate)))


def result_rows(results: Sequence[Result]) -> list[list[str]]:
    """Return a line of text per report. See :data:`RESULTS`."""

    def best(rate: float) -> str:
        return "at its best" if rate == 1 else f"best at {wording.multiple(rate)}"

    words: dict[str, Callable[[Any], str]] = {
        "drop": "{:g}".format,
        "time": percent,
        "metric against stock": wording.difference_interval,
        "your rate": best,
        "tuning": wording.seconds,
    }

    def row(found: dict[str, Any]) -> list[str]:
        seal = "" if found["sealed"] or "training" not in found else " (no seal)"
        cells = {name: words.get(name, str)(value) for name, value in found.items() if value is not None}
        cells["report"] += seal
        return [cells.get(name or "number", "") for name in RESULTS]

    return [row(found) for found in figures_of_results(results)]


def recipe_rows(results: Sequence[Result]) -> list[list[str]]:
    """Return a line per recipe with what became of it in each report, after a line of headings.

    The switches, which differ between machines, have one line, whatever a version called them.
    """
    columns = [
        {_recipe(finding.candidate.name): _became(finding) for finding in one.report.findings}
        for one in results
        if one.report is not None
    ]
    numbers = [str(number) for number, one in enumerate(results, start=1) if one.report is not None]
    names = dict.fromkeys(name for column in columns for name in column)
    return [["recipe", *numbers], *([name, *(column.get(name, "") for column in columns)] for name in names)]


def _recipe(name: str) -> str:
    """Return the name of a recipe without its parts. Earlier versions called the switches levers."""
    kind = name.partition(": ")[0]
    return "switches" if kind == "levers" else kind


def _became(finding: Finding) -> str:
    if finding.speed is None:
        return finding.outcome or "open"
    share = "" if finding.candidate.share == 1 else f" in {percent(finding.candidate.share)} of the steps"
    return f"{finding.outcome or 'open'}, {wording.ratio(finding.speed.mid)}{share}"


def machines(results: Sequence[Result]) -> list[str]:
    """Return on which machines, and with which versions, the reports were made."""
    known: dict[str, list[str]] = {}
    for number, one in enumerate(results, start=1):
        if one.report is not None:
            env = one.report.environment
            words = f"torchboost {env.torchboost}, torch {env.torch}, {env.device}, {env.processor}"
            known.setdefault(f"{words}, {env.threads} threads", []).append(str(number))
    return [f"{', '.join(numbers)}: {words}." for words, numbers in known.items()]


def data_of_results(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the reports as data, without their runs."""
    return [
        {
            "path": str(one.path),
            "sealed": one.sealed,
            "fault": one.fault,
            **({} if one.report is None else {"training": _training(one.report), "headline": headline(one.report)}),
            **({} if one.report is None else one.report.model_dump(mode="json", exclude={"runs"})),
        }
        for one in results
    ]
