"""The short commands, and the registration of the long ones."""

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
from torchboost.bench.report.table import markdown, print_report
from torchboost.bench.report.template import bench_page, write_page
from torchboost.cli.bench import bench
from torchboost.cli.doctor import doctor
from torchboost.cli.shared import Json, fail, print_json, print_table, print_tuning, summary_of, user_errors
from torchboost.cli.tune import tune
from torchboost.config import BoostConfig
from torchboost.core.hardware import device_fault, half_precision
from torchboost.errors import ConfigError
from torchboost.measure.evidence import BenchReport
from torchboost.plan import Plan, resolve
from torchboost.registry import LEVELS, REGISTRY, Facts
from torchboost.tuning.report import TuneReport, tune_page

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(bench)
app.command()(doctor)
app.command()(tune)


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


EVERYTHING = Facts(world_size=8, nodes=2, devices_per_node=4, half_precision=True, convolutions=53)


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


@app.command()
def check(
    config: Annotated[str, typer.Argument(help="A JSON file, or - for standard input.", metavar="BOOST.JSON")],
    json: Json = False,
) -> None:
    """Check a configuration: names, types, ranges, and the settings of every algorithm in it."""
    try:
        loaded = _load(config)
        for level in LEVELS:
            resolve(loaded, level, EVERYTHING)
    except ConfigError as error:
        _refuse(error, json)
    if json:
        print_json({"valid": True, "config": loaded.model_dump(mode="json")})
    else:
        typer.echo(f"{config}: valid, mode {loaded.boost.mode}")


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
    print_json({"level": plan.level, "mode": plan.mode, "algorithms": on, "dropped": dropped})


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
def report(
    source: Annotated[
        Path, typer.Argument(help="A report that `torchboost bench` or `torchboost tune` saved.", metavar="REPORT.JSON")
    ],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page to this file.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown; not for a tuning.")] = False,
    json: Json = False,
) -> None:
    """Show a saved report as a table, as Markdown or as an HTML page."""
    with user_errors():
        try:
            is_tuning = "findings" in json_of(source.read_bytes())
        except (ValueError, TypeError):
            is_tuning = False  # any other file is checked as a report of ``bench``
        loaded = (TuneReport if is_tuning else BenchReport).load(source)
        if as_markdown and isinstance(loaded, TuneReport):
            fail(
                "--markdown: this is a report of `torchboost tune`, which has no Markdown; leave it out, or use --html."
            )
        content = tune_page(loaded) if isinstance(loaded, TuneReport) else bench_page(loaded)
        page = write_page(content, html) if html is not None else None
    if json:
        print_json({**summary_of(loaded), "html": str(page) if page else None})
        return
    if isinstance(loaded, TuneReport):
        if page is None:
            print_tuning(loaded)
    elif as_markdown:
        typer.echo(markdown(loaded), nl=False)
    elif page is None:
        print_report(loaded)
    if page is not None:
        typer.echo(f"wrote {page}", err=as_markdown)
