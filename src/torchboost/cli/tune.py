"""``torchboost tune``: find out what may be turned on for a model, and write the configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from torchboost.bench.factory import function_at
from torchboost.bench.report.template import write_page
from torchboost.cli import shared
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
    model: shared.Model = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE:MAKE@SHARE",
            help="Another factory, trained for a share of the steps. Repeatable.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=3, max=100, help="Most seeds per comparison.")] = 12,
    data: shared.Data = None,
    train_limit: shared.TrainLimit = None,
    device: shared.Device = "cpu",
    out: Annotated[Path, typer.Option(help="The configuration; the report is saved next to it.")] = Path("boost.json"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the report next to --out.")] = False,
    html: shared.Html = True,
    json: shared.Json = False,
) -> None:
    """Find out what may be turned on for your model without losing accuracy, and write it as a configuration."""
    out = out.absolute()  # a factory may change the folder
    with shared.user_errors(), shared.json_only(json), shared.display() as progress:
        try:
            with shared.input_errors(progress):
                path = report_path(out)
                page = path.with_suffix(".html")
                if html and page.exists() and not path.exists():
                    raise ValueError(
                        f"{page} exists and is not from a tuning, since {path.name} is missing; choose another file "
                        "with --out, or pass --no-html."
                    )
                place = shared.usable_device(device)
                choice = shared.chosen(workload, model=model, data=data, train_limit=train_limit)
                factory = shared.loaded(choice, data, train_limit, place)
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
            message = "Stopped before a run was finished. Nothing was saved."
            if report_path(out).exists():
                runs = len(TuneReport.load(report_path(out)).runs)
                message = f"Stopped. {report_path(out)} holds {runs} finished runs; repeat the command with --resume."
            typer.echo(f"\n{message}", err=True)
            raise typer.Exit(130) from None
    if is_first_rank():
        files = [out, path, *([write_page(tune_page(report), page)] if html else [])]
        if json:
            shared.print_json({**shared.summary_of(report), "config": str(out)})
        else:
            shared.print_tuning(report)
            typer.echo("\n".join(f"wrote {file}" for file in files))
    shutdown()


def _recipes(texts: list[str]) -> dict[str, tuple[Callable[[int], Any], float]]:
    recipes: dict[str, tuple[Callable[[int], Any], float]] = {}
    for text in texts:
        match = re.fullmatch(r"(.+?)=(.+)@(\d*\.?\d+)", text)
        if match is None:
            raise ValueError(
                f"--recipe: found {text!r}; give NAME=path/to/train.py:make@0.5, a share of the steps last."
            )
        name, source, share = match.groups()
        if name in recipes:
            raise ValueError(f"--recipe: found {name!r} twice; give each recipe its own name.")
        recipes[name] = function_at(source), float(share)
    return recipes
