"""``torchboost bench``: measure levels against the stock and the hand-tuned loop, and write a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from torchboost.bench.bench import CONTESTANTS, run_bench
from torchboost.bench.contestants import Recipe
from torchboost.bench.report.table import print_report
from torchboost.bench.report.template import bench_page, write_page
from torchboost.cli import shared
from torchboost.core.arguments import seconds_of
from torchboost.measure.evidence import BenchReport
from torchboost.workloads.named import WORKLOADS

__all__ = ["bench"]

NAMES = ", ".join(dict.fromkeys(workload.name.partition("-")[0] for workload in WORKLOADS))


def bench(
    workload: Annotated[str, typer.Argument(help=f"{NAMES}, or path/to/train.py:make.")] = "digits",
    data: shared.Data = None,
    model: shared.Model = None,
    contestants: Annotated[
        str, typer.Option(help="Names, comma-separated: stock, hand, O0, O1, O2, or with additions: hand+compile.")
    ] = ",".join(CONTESTANTS),
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved rounds of step timing.")] = 20,
    seeds: Annotated[int, typer.Option(min=0, help="Training runs per contestant; 0: step times only.")] = 3,
    epochs: Annotated[int | None, typer.Option(min=0, help="Epochs per run. Default: the workload's.")] = None,
    train_limit: shared.TrainLimit = None,
    device: shared.Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for report.json and report.html.")] = Path("out/bench"),
    decide: Annotated[
        str | None,
        typer.Option(help="Add seeds until the accuracy of every level is decided, or this time is over: 240s, 10m."),
    ] = None,
    accuracy: Annotated[
        bool, typer.Option("--accuracy", help="A factory's evaluate returns an accuracy, a share between 0 and 1.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the report in --out.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the report of another workload in --out.")] = False,
    html: shared.Html = True,
    json: shared.Json = False,
) -> None:
    """Measure how fast and how well the levels train a workload, against the stock and the hand-tuned loop."""
    out = out.absolute()  # a factory's file may change the working directory
    path = out / "report.json"
    before = None if resume else _written(path)
    names = [name.strip() for name in contestants.split(",") if name.strip()]
    with shared.user_errors(), shared.json_only(json), shared.display() as progress:
        try:
            with shared.input_errors(progress):
                for name in names:
                    Recipe.parse(name)
                place = shared.usable_device(device)
                choice = shared.chosen(workload, model=model, data=data, accuracy=accuracy)
                if not (resume or force):
                    _check_place(path, choice.name)
                report = run_bench(
                    shared.loaded(choice, data, train_limit, place),
                    contestants=names,
                    pairs=pairs,
                    seeds=seeds,
                    epochs=epochs,
                    device=place,
                    out=path,
                    resume=resume,
                    decide=None if decide is None else seconds_of(decide, "--decide"),
                    progress=progress,
                )
        except KeyboardInterrupt:
            _interrupted(path, before)
        report.save(path)
        page = write_page(bench_page(report), out / "report.html") if html else None
    if json:
        shared.print_json({**shared.summary_of(report), "report": str(path), "html": str(page) if page else None})
        return
    print_report(report)
    typer.echo("\n".join(f"wrote {file}" for file in (path, page) if file is not None))


def _check_place(path: Path, name: str) -> None:
    """Exit unless the file was written by this workload, to avoid overwriting another report."""
    if not path.exists():
        return
    try:
        content = f"a report of {BenchReport.load(path).workload}"
    except (ValueError, OSError):
        content = "a file that is not a report of torchboost"
    if content != f"a report of {name}":
        raise ValueError(
            f"--out: {path} holds {content}, but this is {name}; choose another folder with --out, "
            "or overwrite it with --force."
        )


def _written(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _interrupted(path: Path, before: int | None) -> NoReturn:
    """Say what can be resumed. ``before`` is the time of an earlier report, or None if this run resumed it."""
    message = "Stopped before anything was measured. Nothing was saved."
    if path.exists() and _written(path) == before:
        message = f"Stopped before anything was saved. {path} is from an earlier run."
    elif path.exists():
        runs = sum(len(contestant.curves) for contestant in BenchReport.load(path).contestants)
        message = f"Stopped. {path} holds the step times and {runs} finished training runs; "
        message += "repeat the command with --resume to continue."
    typer.echo(f"\n{message}", err=True)
    raise typer.Exit(130)
