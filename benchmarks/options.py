"""The options of every benchmark script, and its report."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from torchboost.bench.report.table import plain, result_table
from torchboost.measure.evidence import AlgorithmRow, BenchReport, Contestant, Environment
from torchboost.measure.statistics import bootstrap_median
from torchboost.measure.stopwatch import Comparison, environment

SYSTEM = ("channels_last", "autocast", "fused_optimizer", "compile")
"""Algorithms that the hand-tuned loop already contains."""


@dataclass(frozen=True, kw_only=True)
class Options:
    out: Path = Path(__file__).parent / "results"
    data: Path | None = None
    text: Path | None = None
    smoke: bool = False
    resume: bool = False
    compiled: bool = True
    shown: dict[str, float] = field(default_factory=dict)

    def file(self, claim: str, part: str = "") -> Path:
        return self.out / ("-".join(filter(None, (claim, part, "smoke" if self.smoke else ""))) + ".json")

    def path_for(self, job_name: str) -> Path | None:
        if job_name.startswith(("text", "pieces")):
            return self.text
        return self.data if job_name.startswith("cifar10") else None

    def progress(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Write a line when a phase begins or ends, and at most every ten seconds in between."""
        now = time.monotonic()
        if 0 < done < total and now - self.shown.get(phase, 0.0) < 10:
            return
        self.shown[phase] = now
        print(f"  {phase} {done}/{total} {note}".rstrip(), file=sys.stderr, flush=True)


Measure = Callable[[Options], list[Path]]


def run_each(doc: str | None, noun: str, names: Iterable[str], measure: Callable[[str, Options], Path]) -> None:
    """Measure what the command line names, or all of it, and tell which files were written."""
    known = tuple(names)
    made = parser(doc)
    made.add_argument(noun, nargs="*", default=[], help=f"any of {', '.join(known)}; all without one")
    arguments = made.parse_args()
    for name in getattr(arguments, noun) or known:
        print(f"wrote {measure(name, options_of(arguments))}")


def parameters_of(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def as_contestant(found: Comparison, way: str, kind: str = "algorithm", *, case: str = "", **more: Any) -> Contestant:
    """Report the step times of a way. If the report has several cases, the name of one begins the names of its ways."""
    begin = f"{case}: " if case else ""
    return Contestant(
        name=begin + way,
        kind=kind,  # pyright: ignore[reportArgumentType]
        step_seconds=found.step_seconds(way),
        samples=found.samples[way],
        ratios=[ratio.model_copy(update={"baseline": begin + ratio.baseline}) for ratio in found.ratios(way)],
        warmup_seconds=found.warmup_seconds[way],
        **more,
    )


def added_cost(found: Comparison, way: str, baseline: str, algorithm: AlgorithmRow) -> Contestant:
    """Report a step and its extra time over the step without the algorithm, in microseconds."""
    if way == baseline:
        return as_contestant(found, way, "stock")
    differences = zip(found.samples[way], found.samples[baseline], strict=True)
    extra = bootstrap_median([1e6 * (own - base) for own, base in differences])
    note = f"{extra.mid:.1f} microseconds per step more than {baseline} (95 %: {extra.low:.1f} to {extra.high:.1f})"
    return as_contestant(found, way, "level", algorithms=[algorithm], notes=[note])


def timed_contestants(found: Comparison, ways: Iterable[str], baseline: str, *notes: str) -> list[Contestant]:
    """Report the step times of several ways, of which one is the baseline."""
    return [as_contestant(found, way, "stock" if way == baseline else "algorithm", notes=list(notes)) for way in ways]


def save_steps(
    file: Path,
    contestants: list[Contestant],
    *,
    title: str,
    model: str,
    parameters: int,
    batch: int = 1,
    notes: Iterable[str] = (),
    machine: Environment | None = None,
) -> Path:
    """Save a report of step times, by default of this machine, and return the file."""
    report = BenchReport(
        title=title,
        workload=file.stem.removesuffix("-smoke"),
        model=model,
        parameters=parameters,
        batch=batch,
        metric_name="none",
        environment=environment() if machine is None else machine,
        contestants=contestants,
        notes=list(notes),
    )
    return report.save(file)


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--out", type=Path, default=Options().out, help="folder for the results (default: %(default)s)")
    made.add_argument("--data", type=Path, help="folder with CIFAR-10 as train.parquet, test.parquet; default: the Hub")
    made.add_argument("--text", type=Path, help="a UTF-8 text file; default: a text that ships with Python")
    made.add_argument(
        "--smoke", action="store_true", help="a few steps of everything: checks the script, proves nothing"
    )
    made.add_argument("--resume", action="store_true", help="keep what earlier runs left in the results folder")
    made.add_argument("--no-compile", dest="compiled", action="store_false", help="leave out torch.compile")
    made.add_argument("--json", action="store_true", help="print the reports as one JSON object instead of tables")
    return made


def options_of(arguments: argparse.Namespace) -> Options:
    names = ("out", "data", "text", "smoke", "resume", "compiled")
    return Options(**{name: getattr(arguments, name) for name in names})


def run(measures: Sequence[Measure], arguments: argparse.Namespace) -> None:
    options = options_of(arguments)
    paths = [path for measure in measures for path in measure(options)]
    reports = {path.name: BenchReport.load(path) for path in paths}
    if arguments.json:
        print(json.dumps({name: report.model_dump(mode="json") for name, report in reports.items()}))
        return
    for path, report in zip(paths, reports.values(), strict=True):
        print(f"\n{report.title} ({path})\n\n{plain(result_table(report))}")
        for note in report.notes:
            print(f"note: {note}")


def run_own(measure: Callable[[Options], Path], arguments: argparse.Namespace) -> None:
    """Run a benchmark whose result has a form of its own."""
    print(f"wrote {measure(options_of(arguments))}")


def save_result(file: Path, **content: Any) -> Path:
    """Save a result that has a form of its own, with the environment."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"environment": environment().model_dump(), **content}, indent=1)
    file.write_text(text + "\n", encoding="utf-8")
    return file
