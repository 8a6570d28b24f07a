"""The commands. Each loads what it needs when it runs, so that ``--version`` and ``--help`` answer at once."""

from __future__ import annotations

import shlex
import sys
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from torchboost import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

NAMES = "digits, cifar10, text, docstrings, pieces"
POINT = 0.01
MOST_COMPARED = 6
"""Reports whose recipes are shown side by side."""


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
def levels(json: Json = False, csv: Csv = False) -> None:
    """Show what each level turns on, and what each algorithm does."""
    from torchboost.cli.plans import show_levels

    show_levels(json=json, csv=csv)


@app.command()
def explain(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A JSON file, - for one on standard input, or path/to/train.py:make for your model.",
            metavar="[BOOST.JSON | TRAIN.PY:MAKE]",
        ),
    ] = None,
    level: Annotated[str, typer.Option(help="O0, O1 or O2.")] = "O1",
    total_steps: Annotated[int | None, typer.Option(min=1, help="Updates of the whole run.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    device: Annotated[str, typer.Option(help="Type of the training device, or auto.")] = "cpu",
    convolutions: Annotated[
        int | None, typer.Option(min=0, help="Number of convolutions in the model. Default: not known.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what a level turns on for this machine, a configuration or a model, what it omits, and why."""
    from torchboost.cli.plans import show_plan, show_plan_of_model
    from torchboost.cli.shared import fail, names_file

    if source is not None and names_file(source):
        if nodes != 1 or convolutions is not None:
            fail("--nodes and --convolutions: leave them out; the model and the process tell.")
        show_plan_of_model(source, level, total_steps=total_steps, device=device, json=json)
    else:
        show_plan(
            source, level, total_steps=total_steps, nodes=nodes, device=device, convolutions=convolutions, json=json
        )


@app.command()
def new(
    file: Annotated[Path, typer.Argument(help="The file to write, which must not exist.", metavar="TRAIN.PY")],
    json: Json = False,
) -> None:
    """Write a file with a small training that `bench`, `tune` and `doctor` run, to put your own in its place."""
    from importlib.resources import files

    try:
        if file.suffix != ".py":
            raise ValueError(f"found {str(file)!r}; needed: a name that ends with .py.")
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as stream:  # another process may write it at the same time
            stream.write(files("torchboost.cli").joinpath("template.txt").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        exists = isinstance(error, FileExistsError)
        typer.echo(f"Error: {f'{file} exists; choose another name.' if exists else error}", err=True)
        raise typer.Exit(1) from None
    after = f"torchboost bench {shlex.quote(str(file))}:make --epochs 10 --accuracy"
    if json:
        typer.echo(dumps({"file": str(file), "next": after}, indent=2))
    else:
        typer.echo(f"wrote {file}\nNext: {after}")


@app.command()
def bench(
    workload: Annotated[str, typer.Argument(help=f"{NAMES}, or path/to/train.py:make.")] = "digits",
    data: Data = None,
    contestants: Annotated[
        str, typer.Option(help="Comma-separated: stock (the plain loop), hand, O0, O1, O2, O1+compile, boost.json.")
    ] = "stock,hand,O1,O2",
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved rounds of step timing.")] = 20,
    seeds: Annotated[int, typer.Option(min=0, help="Training runs per contestant; 0: step times only.")] = 3,
    epochs: Annotated[int | None, typer.Option(min=0, help="Epochs per run. Default: the workload's.")] = None,
    train_limit: TrainLimit = None,
    device: Device = "auto",
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
    csv: Csv = False,
) -> None:
    """Measure how fast and how well the levels train a workload, against the plain (stock) and the hand-tuned loop."""
    from torchboost.bench.bench import run_bench
    from torchboost.bench.contestants import Recipe
    from torchboost.bench.report.page import bench_page, write_page
    from torchboost.cli.shared import (
        Display,
        answer_only,
        chosen,
        loaded,
        show,
        usable_device,
        usable_folder,
        user_errors,
    )
    from torchboost.core.arguments import seconds_of
    from torchboost.measure.evidence import BenchReport

    out = out.absolute()  # a factory's file may change the working directory
    path = out / "report.json"
    before = path.stat().st_mtime_ns if path.exists() and not resume else None
    names = [name.strip() for name in contestants.split(",") if name.strip()]
    progress = Display(sys.stderr)
    with user_errors(progress), answer_only(json or csv):
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
            usable_folder(out)
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
    show(report, json=json, csv=csv, report=path, html=page)
    if not (json or csv):
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
    steps: Annotated[
        int | None, typer.Option(min=1, help="Updates per run, in place of --epochs. The batches may be endless.")
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
    processes: Annotated[
        int, typer.Option(min=1, help="Runs made at the same time, each on a GPU or on a part of the threads.")
    ] = 1,
    data: Data = None,
    train_limit: TrainLimit = None,
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="The configuration; the report is saved next to it.")] = Path("boost.json"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the report next to --out.")] = False,
    html: Html = True,
    json: Json = False,
    csv: Csv = False,
) -> None:
    """Find what gives your metric in the least time, test it with fresh seeds, and write it as a configuration."""
    from torchboost.bench.report.page import write_page
    from torchboost.cli.shared import Display, answer_only, chosen, loaded, show, usable_device, user_errors
    from torchboost.tuning.report import TuneReport, tune_page
    from torchboost.tuning.tune import report_path
    from torchboost.tuning.tune import tune as run_tune

    out = out.absolute()  # a factory may change the folder
    progress = Display(sys.stderr)
    with user_errors(progress), answer_only(json or csv):
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
                epochs=epochs if steps is not None else epochs or factory.epochs,
                steps=steps,
                total_steps=total_steps,
                rate=rate,
                prior=prior or (),
                seeds=seeds,
                device=place,
                title=workload,
                out=out,
                resume=resume,
                processes=processes,
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
    show(report, json=json, csv=csv, config=out)
    if not (json or csv):
        typer.echo("\n".join(f"wrote {file}" for file in files))


@app.command()
def results(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(help="Reports of `torchboost tune`, or folders with them. Default: this folder."),
    ] = None,
    json: Json = False,
    csv: Csv = False,
) -> None:
    """List the tunings that were made, and compare what they found."""
    from torchboost.bench.report.table import print_table
    from torchboost.cli.shared import print_csv, print_json, user_errors
    from torchboost.tuning.results import (
        RESULTS,
        data_of_results,
        figures_of_results,
        machines,
        recipe_rows,
        result_rows,
        results_in,
    )

    with user_errors():
        found = results_in(sources or [Path()])
    if json:
        print_json(data_of_results(found))
    elif csv:
        print_csv(figures_of_results(found))
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
def compare(
    first: Annotated[
        Path, typer.Argument(help="A report of `torchboost bench` or `torchboost tune`.", metavar="A.JSON")
    ],
    second: Annotated[Path, typer.Argument(help="A report of the same command.", metavar="B.JSON")],
    json: Json = False,
    csv: Csv = False,
) -> None:
    """Show two reports side by side: what changed, by how much, and whether machine or versions did."""
    from torchboost.bench.report.comparison import compared, comparison_table, remarks
    from torchboost.bench.report.table import print_table
    from torchboost.cli.shared import fail, print_csv, print_json, saved_report, user_errors
    from torchboost.measure.evidence import BenchReport

    with user_errors():
        found = [saved_report(path) for path in (first, second)]
    benches = [each for each in found if isinstance(each, BenchReport)]
    if not benches:
        results([first, second], json=json, csv=csv)
        return
    if len(benches) == 1:
        fail("one is a report of bench and the other one of tune; give two of the same command.")
    rows = compared(*benches)
    if json:
        print_json({"contestants": [row.model_dump(mode="json") for row in rows], "remarks": remarks(*benches)})
    elif csv:
        print_csv(rows)
    else:
        table = comparison_table(*benches)
        typer.echo(f"A: {first}, {benches[0].environment.date}\nB: {second}, {benches[1].environment.date}\n")
        print_table(table.headings, table.rows)
        typer.echo("\n" + "\n".join(remarks(*benches)))


@app.command()
def report(
    source: Annotated[
        Path, typer.Argument(help="A report that `torchboost bench` or `torchboost tune` saved.", metavar="REPORT.JSON")
    ],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page to this file.")] = None,
    json: Json = False,
    csv: Csv = False,
) -> None:
    """Show a saved report as a table or as an HTML page."""
    from torchboost.bench.report.page import bench_page, write_page
    from torchboost.cli.shared import saved_report, show, user_errors
    from torchboost.tuning.report import TuneReport, tune_page

    with user_errors():
        loaded = saved_report(source)
        text = tune_page(loaded) if isinstance(loaded, TuneReport) else bench_page(loaded)
        page = write_page(text, html) if html is not None else None
    if page is not None and not (json or csv):
        typer.echo(f"wrote {page}")
    else:
        show(loaded, json=json, csv=csv, html=page)


@app.command()
def doctor(
    factory: Annotated[
        str | None,
        typer.Argument(
            help="Also time the parts of this training's step, and what it wastes.", metavar="[TRAIN.PY:MAKE]"
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the factory's training to time.")] = 20,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Show what is installed, how fast this machine computes, and where the time of a step goes or is wasted."""
    from torchboost.cli.doctor import show_doctor

    show_doctor(factory, steps=steps, device=device, json=json)
