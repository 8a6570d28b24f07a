"""The options that several commands have. They load nothing but the parser, so that ``--help`` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _one_format(context: typer.Context, asked: bool) -> bool:
    if asked and (context.params.get("json") or context.params.get("csv")):
        raise typer.BadParameter("found --json and --csv; give one of them.")
    return asked


Json = Annotated[bool, typer.Option("--json", callback=_one_format, help="Answer in JSON.")]
Csv = Annotated[bool, typer.Option("--csv", callback=_one_format, help="Answer in CSV, with plain numbers.")]
Html = Annotated[bool, typer.Option("--html/--no-html", help="Write a page next to the report.")]
Data = Annotated[Path | None, typer.Option(help="Path of the data, for workloads that need it.")]
TrainLimit = Annotated[int | None, typer.Option(min=1, help="Use only so many training samples.")]
Device = Annotated[str, typer.Option(help="Where to train: auto (a GPU if there is one), cpu, cuda, cuda:1, ...")]
