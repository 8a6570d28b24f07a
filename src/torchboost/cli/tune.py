"""``torchboost tune``: find out what may be turned on for a model, and write the configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from torchboost.bench.factory import function_at
from torchboost.bench.report.template import write_page
from torchboost.cli.inputs import chosen, loaded, usable_device
from torchboost.cli.output import display, input_errors, json_only, print_json, print_tuning, summary_of, user_errors
from torchboost.core.arguments import seconds_of
from torchboost.distributed.agreement import is_first_rank
from torchboost.distributed.topology import shutdown
from torchboost.tuning.report import TuneReport, tune_page
from torchboost.tuning.tune import report_path
from torchboost.tuning.tune import tune as run_tune

__all__ = ["tune"]

POINT = 0.01


def tune(
    workload: Annotated[str, typer.Argument(help="path/to/train.py:make, or a workload of `torchboost bench`.")],
    drop: Annotated[
        float, typer.Option(help="Largest accepted drop, in points: hundredths of what evaluate returns.")
    ] = 0.5,
    budget: Annotated[str, typer.Option(help="Time for everything: 90s, 30m, 2h.")] = "30m",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the batches per run. Default: 1, or the workload's.")
    ] = None,
    total_steps: Annotated[
        int | None, typer.Option(min=1, help="Updates of the training that the answer is for. Default: those of a run.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Which model of the workload, such as resnet-basic.")] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE:MAKE@SHARE",
            help="Another factory, trained for a share of the steps. Repeatable.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=3, max=100, help="Most seeds per comparison.")] = 12,
    data: Annotated[Path | None, typer.Option(help="Path of the data, for workloads that need it.")] = None,
    train_limit: Annotated[int | None, typer.Option(min=1, help="Use only so many training samples.")] = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1, ...")] = "cpu",
    out: Annotated[Path, typer.Option(help="The configuration; the report is saved next to it.")] = Path("boost.json"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the report next to --out.")] = False,
    html: Annotated[bool, typer.Option("--html/--no-html", help="Write a page next to the report.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Find out what may be turned on for your model without losing accuracy, and write it as a configuration."""
    with user_errors(), json_only(json), display() as progress:
        try:
            with input_errors(progress):
                seconds_of(budget)
                out = out.absolute()  # a factory may change the folder
                _check_free(out, html=html, resume=resume)
                place = usable_device(device)
                choice = chosen(workload, model=model, data=data, train_limit=train_limit)
                factory = loaded(choice, data, train_limit, place, progress)
                report = run_tune(
                    factory.make,
                    drop=POINT * drop,
                    budget=budget,
                    epochs=epochs or factory.epochs,
                    total_steps=total_steps,
                    recipes=_recipes(recipe or []),
                    seeds=seeds,
                    device=place,
                    title=workload if model is None else f"{workload}-{model}",
                    out=out,
                    resume=resume,
                    progress=progress,
                )
        except KeyboardInterrupt:
            _interrupted(report_path(out))
    if not is_first_rank():
        shutdown()
        return
    path = report_path(out)
    written = write_page(tune_page(report), path.with_suffix(".html")) if html else None
    if json:
        print_json({**summary_of(report), "config": str(out)})
    else:
        print_tuning(report)
        for file in (out, path, written):
            if file is not None:
                typer.echo(f"wrote {file}")
    shutdown()


def _check_free(out: Path, *, html: bool, resume: bool) -> None:
    path = report_path(out)
    page = path.with_suffix(".html")
    if path.exists() and not resume:
        raise ValueError(f"{path} exists; continue it with --resume, or choose another file with --out.")
    if html and page.exists() and not path.exists():
        raise ValueError(
            f"{page} exists and is not from a tuning, since {path.name} is missing; choose another file with --out, or "
            "pass --no-html."
        )


def _recipes(texts: list[str]) -> dict[str, tuple[Callable[[int], Any], float]]:
    recipes: dict[str, tuple[Callable[[int], Any], float]] = {}
    for text in texts:
        found = re.fullmatch(r"(.+?)=(.+)@(\d*\.?\d+)", text)
        if found is None:
            raise ValueError(
                f"--recipe: found {text!r}; give NAME=path/to/train.py:make@0.5, a share of the steps last."
            )
        name, source, share = found.groups()
        if name in recipes:
            raise ValueError(f"--recipe: found {name!r} twice; give each recipe its own name.")
        recipes[name] = function_at(source), float(share)
    return recipes


def _interrupted(path: Path) -> NoReturn:
    if path.exists():
        count = len(TuneReport.load(path).runs)
        typer.echo(f"\nStopped. {path} holds {count} finished runs; repeat the command with --resume.", err=True)
    else:
        typer.echo("\nStopped before a run was finished. Nothing was saved.", err=True)
    raise typer.Exit(130)
