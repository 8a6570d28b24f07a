"""The commands."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from json import loads as json_of
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer

from torchboost import __version__
from torchboost.bench.bench import CONTESTANTS, run_bench
from torchboost.bench.contestants import Recipe
from torchboost.bench.report.page import bench_page, write_page
from torchboost.bench.report.table import print_report
from torchboost.cli.doctor import doctor
from torchboost.cli.shared import (
    Data,
    Device,
    Display,
    Html,
    Json,
    TrainLimit,
    chosen,
    fail,
    json_only,
    loaded,
    print_json,
    print_table,
    print_tuning,
    summary_of,
    usable_device,
    user_errors,
)
from torchboost.config import BoostConfig
from torchboost.core.arguments import seconds_of
from torchboost.core.hardware import device_fault, half_precision
from torchboost.errors import ConfigError
from torchboost.measure.evidence import BenchReport
from torchboost.plan import Plan
from torchboost.registry import LEVELS, REGISTRY, Facts
from torchboost.tuning.report import TuneReport, tune_page
from torchboost.tuning.results import RESULTS, data_of_results, machines, recipe_rows, result_rows, results_in
from torchboost.tuning.tune import report_path
from torchboost.tuning.tune import tune as run_tune
from torchboost.workloads.named import WORKLOADS

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(doctor)


NAMES = ", ".join(dict.fromkeys(workload.name.partition("-")[0] for workload in WORKLOADS))
POINT = 0.01
MOST_COMPARED = 6
"""Reports whose recipes are shown side by side."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"torchboost {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Faster training of PyTorch models within a stated accuracy budget, measured."""


@app.command()
def levels(json: Json = False) -> None:
    """Show what each level turns on, and what each algorithm does."""
    table = {
        level: {name: _settings_of(REGISTRY[name].algorithm(**settings)) for name, settings in row.items()}
        for level, row in LEVELS.items()
    }
    if json:
        algorithms = [{"name": e.name, "summary": e.summary, "section": e.section} for e in REGISTRY.values()]
        print_json({"levels": table, "algorithms": algorithms})
        return

    def mark(settings: Mapping[str, Any] | None) -> str:
        if settings is None:
            return "-"
        return ", ".join(f"{key}={value}" for key, value in settings.items()) or "on"

    rows = [[e.name, *(mark(row.get(e.name)) for row in LEVELS.values()), e.summary] for e in REGISTRY.values()]
    print_table(["algorithm", *LEVELS, "what it does"], rows)
    typer.echo("A level leaves out what does not fit the model or the machine: see `torchboost explain`.")


def _settings_of(algorithm: Any) -> dict[str, Any]:
    return {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm) if field.init}


def _refuse(error: ConfigError, json: bool) -> NoReturn:
    if not json:
        fail(str(error))
    parts = {name: getattr(error, name) for name in ("path", "found", "allowed", "hint")}
    print_json({"valid": False, **parts, "message": str(error)})
    raise typer.Exit(1)


def _load(config: str | None) -> BoostConfig:
    if config != "-":
        return BoostConfig.load(Path(config) if config is not None else None)
    text = sys.stdin.read().lstrip()
    # BoostConfig.load takes text that is not a JSON object for a path; here it can only be a mistake.
    if not text.startswith("{"):
        content = f"text on standard input that starts with {text[:20]!r}" if text else "nothing on standard input"
        raise ConfigError("", found=content, allowed="a JSON object")
    return BoostConfig.load(text)


@app.command()
def explain(
    config: Annotated[
        str | None, typer.Argument(help="A JSON file, or - for standard input.", metavar="[BOOST.JSON]")
    ] = None,
    level: Annotated[str, typer.Option(help="O0, O1 or O2.")] = "O1",
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    device: Annotated[str, typer.Option(help="Type of the training device.")] = "cpu",
    convolutions: Annotated[
        int | None, typer.Option(min=0, help="Number of convolutions in the model. Default: not known.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what a level and a configuration turn on for this machine, what they leave out, and why."""
    try:
        loaded = _load(config)
        plan = Plan.of(level, loaded, _facts(loaded, nodes, device, convolutions))
    except ConfigError as error:
        _refuse(error, json)
    if not json:
        typer.echo(plan.explain())
        return
    on = [{"name": a.name, "summary": REGISTRY[a.name].summary, "settings": _settings_of(a)} for a in plan.algorithms]
    dropped = [{"name": d.name, "reason": d.reason} for d in plan.dropped]
    recipe = plan.recipe.model_dump(mode="json")
    print_json({"level": plan.level, "mode": plan.mode, "recipe": recipe, "algorithms": on, "dropped": dropped})


def _facts(config: BoostConfig, nodes: int, device: str, convolutions: int | None) -> Facts:
    try:
        kind = torch.device(device)
    except RuntimeError:
        fail(f"--device: found {device!r}; allowed: a device of torch, such as cpu or cuda.")
    here = config.common.device_number if nodes > 1 else 1
    half = half_precision(kind, convolutions) if device_fault(kind) is None else None
    return Facts(
        world_size=nodes * here,
        nodes=nodes,
        devices_per_node=here,
        device=kind.type,
        half_precision=None if half is None else half.fast,
        half_precision_reason="" if half is None else half.reason,
        convolutions=convolutions,
    )


@app.command()
def bench(
    workload: Annotated[str, typer.Argument(help=f"{NAMES}, or path/to/train.py:make.")] = "digits",
    data: Data = None,
    contestants: Annotated[
        str, typer.Option(help="Names, comma-separated: stock, hand, O0, O1, O2, or with additions: hand+compile.")
    ] = ",".join(CONTESTANTS),
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved rounds of step timing.")] = 20,
    seeds: Annotated[int, typer.Option(min=0, help="Training runs per contestant; 0: step times only.")] = 3,
    epochs: Annotated[int | None, typer.Option(min=0, help="Epochs per run. Default: the workload's.")] = None,
    train_limit: TrainLimit = None,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for report.json and report.html.")] = Path("out/bench"),
    decide: Annotated[
        str | None,
        typer.Option(help="Add seeds until the accuracy of every level is decided, or this time is over: 240s, 10m."),
    ] = None,
    accuracy: Annotated[
        bool, typer.Option("--accuracy", help="A factory's evaluate returns an accuracy, a share between 0 and 1.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the report in --out.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the report in --out.")] = False,
    html: Html = True,
    json: Json = False,
) -> None:
    """Measure how fast and how well the levels train a workload, against the stock and the hand-tuned loop."""
    out = out.absolute()  # a factory's file may change the working directory
    path = out / "report.json"
    before = path.stat().st_mtime_ns if path.exists() and not resume else None
    names = [name.strip() for name in contestants.split(",") if name.strip()]
    progress = Display(sys.stderr)
    with user_errors(progress), json_only(json):
        try:
            for name in names:
                Recipe.parse(name)
            place = usable_device(device)
            choice = chosen(workload, data=data, accuracy=accuracy)
            if path.exists() and not (resume or force):
                raise ValueError(
                    f"--out: {path} exists; continue it with --resume, overwrite it with --force, or choose "
                    "another folder."
                )
            report = run_bench(
                loaded(choice, data, train_limit, place),
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
            message = "Stopped before anything was measured. Nothing was saved."
            if path.exists() and path.stat().st_mtime_ns != before:
                runs = sum(len(contestant.curves) for contestant in BenchReport.load(path).contestants)
                message = f"Stopped. {path} holds the step times and {runs} finished training runs; repeat the command "
                message += "with --resume to continue."
            typer.echo(f"\n{message}", err=True)
            raise typer.Exit(130) from None
        report.save(path)
        page = write_page(bench_page(report), out / "report.html") if html else None
    if json:
        print_json({**summary_of(report), "report": str(path), "html": str(page) if page else None})
        return
    print_report(report)
    typer.echo("\n".join(f"wrote {file}" for file in (path, page) if file is not None))


@app.command()
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
    rate: Annotated[str, typer.Option(help="search: also your learning rate. fixed: keep it.")] = "search",
    prior: Annotated[
        list[Path] | None,
        typer.Option(help="Begin from this report of a similar training. May be repeated; the last one counts."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=3, max=100, help="Most seeds of a test.")] = 12,
    data: Data = None,
    train_limit: TrainLimit = None,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="The configuration; the report is saved next to it.")] = Path("boost.json"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the report next to --out.")] = False,
    html: Html = True,
    json: Json = False,
) -> None:
    """Find what gives your metric in the least time, test it with fresh seeds, and write it as a configuration."""
    out = out.absolute()  # a factory may change the folder
    progress = Display(sys.stderr)
    with user_errors(progress), json_only(json):
        try:
            path = report_path(out)
            page = path.with_suffix(".html")
            if html and page.exists() and not path.exists():
                raise ValueError(
                    f"{page} exists and is not from a tuning, since {path.name} is missing; choose another file "
                    "with --out, or pass --no-html."
                )
            place = usable_device(device)
            choice = chosen(workload, data=data, train_limit=train_limit)
            factory = loaded(choice, data, train_limit, place)
            report = run_tune(
                factory.make,
                drop=POINT * drop,
                budget=budget,
                epochs=epochs or factory.epochs,
                total_steps=total_steps,
                rate=rate,
                prior=prior or (),
                seeds=seeds,
                device=place,
                title=workload,
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
    files = [out, path, *([write_page(tune_page(report), page)] if html else [])]
    if json:
        print_json({**summary_of(report), "config": str(out)})
    else:
        print_tuning(report)
        typer.echo("\n".join(f"wrote {file}" for file in files))


@app.command()
def results(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(help="Reports of `torchboost tune`, or folders with them. Default: this folder."),
    ] = None,
    json: Json = False,
) -> None:
    """List the tunings that were made, and compare what they found."""
    with user_errors():
        found = results_in(sources or [Path()])
    if json:
        print_json(data_of_results(found))
    elif not found:
        typer.echo("No report of a tuning was found; their names end with .report.json.")
    else:
        print_table(RESULTS, result_rows(found))
        head, *compared = recipe_rows(found)
        if len(head) <= 1 + MOST_COMPARED:
            print_table(head, compared)
        else:
            typer.echo(f"Name at most {MOST_COMPARED} reports to compare their recipes.")
        typer.echo("\n".join(machines(found)))


@app.command()
def report(
    source: Annotated[
        Path, typer.Argument(help="A report that `torchboost bench` or `torchboost tune` saved.", metavar="REPORT.JSON")
    ],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page to this file.")] = None,
    json: Json = False,
) -> None:
    """Show a saved report as a table or as an HTML page."""
    with user_errors():
        try:
            is_tuning = "findings" in json_of(source.read_bytes())
        except (ValueError, TypeError):
            is_tuning = False  # any other file is checked as a report of ``bench``
        loaded = (TuneReport if is_tuning else BenchReport).load(source)
        content = tune_page(loaded) if isinstance(loaded, TuneReport) else bench_page(loaded)
        page = write_page(content, html) if html is not None else None
    if json:
        print_json({**summary_of(loaded), "html": str(page) if page else None})
        return
    if page is not None:
        typer.echo(f"wrote {page}")
    elif isinstance(loaded, TuneReport):
        print_tuning(loaded)
    else:
        print_report(loaded)
