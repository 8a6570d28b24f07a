"""The options of every benchmark script, and its report."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchboost.bench.report.table import plain, result_table
from torchboost.measure.evidence import AlgorithmRow, BenchReport, Contestant
from torchboost.measure.statistics import bootstrap_median
from torchboost.measure.stopwatch import Comparison
from torchboost.registry import REGISTRY

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

    def file(self, claim: str, part: str) -> Path:
        return self.out / f"{claim}-{part}{'-smoke' if self.smoke else ''}.json"

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


def added_cost(found: Comparison, way: str, baseline: str, algorithm: AlgorithmRow) -> Contestant:
    """Report a step and its extra time over the step without the algorithm, in microseconds."""
    bare = way == baseline
    differences = zip(found.samples[way], found.samples[baseline], strict=True)
    extra = bootstrap_median([1e6 * (own - base) for own, base in differences])
    note = f"{extra.mid:.1f} microseconds per step more than {baseline} (95 %: {extra.low:.1f} to {extra.high:.1f})"
    return Contestant(
        name=way,
        kind="stock" if bare else "level",
        algorithms=[] if bare else [algorithm],
        step_seconds=found.step_seconds(way),
        samples=found.samples[way],
        ratios=found.ratios(way),
        warmup_seconds=found.warmup_seconds[way],
        notes=[] if bare else [note],
    )


def timed_contestants(found: Comparison, ways: Iterable[str], baseline: str, *notes: str) -> list[Contestant]:
    """Report the step times of several ways, of which one is the baseline."""
    return [
        Contestant(
            name=way,
            kind="stock" if way == baseline else "algorithm",
            step_seconds=found.step_seconds(way),
            samples=found.samples[way],
            ratios=found.ratios(way),
            warmup_seconds=found.warmup_seconds[way],
            notes=list(notes),
        )
        for way in ways
    ]


def single_algorithms() -> list[str]:
    """Name contestants with one algorithm alone: system levers on the stock loop, all others on the hand-tuned one.

    Accumulation takes another loop (``accumulation.py``), as do scaling (``loss_scale.py``), sums over nodes
    (``adasum_time.py``) and steps in a subspace (``dim_reduce.py``). TF32 is a precision of GPUs.
    """
    system = [f"stock+{name}" for name in REGISTRY if name in SYSTEM and name != "compile"]
    apart = {"grad_accumulation", "loss_scale_group", "adasum", "dim_reduce", "matmul_precision"}
    others = [name for name in REGISTRY if name not in apart]
    return system + [f"hand+{name}" for name in others if name not in SYSTEM]


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
    given = {"data": arguments.data, "text": arguments.text, "smoke": arguments.smoke}
    print(f"wrote {measure(Options(out=arguments.out, **given))}")
