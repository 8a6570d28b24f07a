"""Claim: on seven workloads the levels keep their promises.

The candidates are the levers by themselves, which is what a loop by hand
can do, and the levels O1 and O2 with what their trial keeps here. Every candidate is trained against the stock loop,
paired by seed, until a sequential test decides. Runs have about 1,000 steps, those of the digits 120. Each run is saved
when it ends, and the script continues where it stopped. Results of earlier versions of this script also have a
comparison with stock in fewer steps, and a test of what passed together.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from images import of_classes
from inference import MOBILENET, mobilenet
from options import Options, run_each
from torch import nn

from torchboost.bench.bench import check_same
from torchboost.bench.digests import fingerprint_of
from torchboost.bench.factory import Factory, made_by
from torchboost.bench.report import wording
from torchboost.bench.report.table import Table
from torchboost.front import boost
from torchboost.measure.evidence import Environment, Interval
from torchboost.measure.stopwatch import environment, instructions
from torchboost.plan import Plan
from torchboost.registry import Facts
from torchboost.tuning.race import Race
from torchboost.tuning.report import STOCK, Candidate, Finding, TuneReport
from torchboost.tuning.runs import Runs
from torchboost.tuning.search import Search
from torchboost.tuning.training import Training, try_levers
from torchboost.workloads.data import Images, cifar10
from torchboost.workloads.named import Workload, find_workload

ERROR = 0.05
"""Of each test."""

TRIAL = 60.0
"""Seconds of the trial that chooses the levers."""

MARGINS = {"O1": 0, "O2": 1}
"""Place of what a level may lose among the drops of the workload; the strictest first."""

SAME = " = "
"""Between the names of candidates that turn on the same."""

NARROW = "-avx2"
"""Ending of the names of results from a processor that has AVX2 at most."""

UNTUNED = (
    "On CIFAR-10 from scratch stock trains at a rate of 0.1, which is not tuned. At better rates it ends at 52.7 % on "
    "the bottleneck ResNet, 55.5 % on the basic one and 60.3 % on the VGG. So most of the gains in accuracy in this "
    "table are gains over an untuned rate, and whether the promises are kept is tested at this rate only."
)
"""What the accuracy of stock in the results rests on; every table that shows it says so."""

JOBS = {"digits": "digits-resnet", "text-gpt": "text-gpt"}
"""The jobs of those workloads that have another one than the basic ResNet's."""


@dataclass(frozen=True)
class Case:
    """A job with its data.

    Args:
        title: For the table.
        job: The job; ``epochs`` passes over the data are a run.
        data: Its data.
        budget: Seconds.
        seeds: Most seeds of a test.
    """

    title: str
    job: Workload
    data: Any
    budget: float = 4200.0
    seeds: int = 8


def small_mobilenet() -> Workload:
    """Return a job with the first four stages of a MobileNetV2, which is enough for small images."""
    job, build = find_workload("cifar10-vgg"), lambda data: mobilenet(MOBILENET[:4])
    return replace(job, model_name="MobileNetV2 of four stages", build=build)


def images(options: Options, job: Workload) -> Case:
    job = replace(job, batch=32, epochs=2)
    data = job.load(options.data, 320 if options.smoke else 16_000)
    return Case(f"{job.model_name} on CIFAR-10", job, data, budget=6200.0)


def digits(options: Options) -> Case:
    job = find_workload("digits-resnet")
    return Case(f"{job.model_name} on digits", job, job.load(None, None), budget=900.0, seeds=16)


def gpt(options: Options) -> Case:
    job = replace(find_workload("text-gpt"), batch=16)
    data = job.load(options.text, 320 if options.smoke else 9_600)
    return Case(f"{job.model_name} on text", job, data, budget=5600.0)


def fine_tuning(options: Options) -> Case:
    """A network that has learned classes 0 to 4 learns classes 5 to 9, of which it has seen none."""
    job = replace(find_workload("cifar10-resnet-basic"), batch=32, epochs=2)
    every = cifar10(options.data).held_out().limited(320 if options.smoke else 32_000)
    before, after = of_classes(every, 0, 5), of_classes(every, 5, 5)
    network = _trained(replace(job, batch=64), before)

    def build(data: Any) -> nn.Module:
        made = copy.deepcopy(network)
        nn.init.normal_(made.fc.weight, std=0.01)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        return made

    slower = replace(job, name="fine-tuning", build=build, optimizer=lambda p, **k: job.optimizer(p, lr=0.02, **k))
    return Case(f"fine-tuning a {job.model_name} on five classes of CIFAR-10", slower, after)


def _trained(job: Workload, data: Images) -> nn.Module:
    parts = made_by(job.factory(data).make, 0)
    steps = data.steps(job.batch)
    assert parts.schedule is not None
    schedule = parts.schedule(parts.optimizer, steps)
    for inputs, targets in parts.batches:
        parts.loss(parts.model(inputs), targets).backward()
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        schedule.step()
    return parts.model


WORKLOADS: dict[str, Callable[[Options], Case]] = {
    "digits": digits,
    "resnet-basic": lambda options: images(options, find_workload("cifar10-resnet-basic")),
    "resnet-bottleneck": lambda options: images(options, find_workload("cifar10-resnet-bottleneck-small")),
    "vgg": lambda options: images(options, find_workload("cifar10-vgg")),
    "mobilenet": lambda options: images(options, small_mobilenet()),
    "text-gpt": gpt,
    "fine-tuning": fine_tuning,
}


def on_at(make: Callable[[int], Any], level: str, steps: int, seconds: float) -> dict[str, Any]:
    """Return the section ``extra`` of what a level turns on here, after its trial."""
    parts = made_by(make, 0)
    boosted = boost(parts.model, parts.optimizer, level=level, total_steps=steps, calibrate=seconds)
    for inputs, targets in islice(iter(parts.batches), 1):
        parts.loss(boosted.model(inputs), targets).backward()
    on = {one.name for one in boosted.plan.algorithms}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        boosted.plan.save(file)
        written = json.loads(file.read_text(encoding="utf-8"))["extra"]
    boosted.remove()
    return {name: value for name, value in written.items() if name in on}


def joined(candidates: dict[str, dict[str, Any]], make: Callable[[int], Any]) -> dict[str, dict[str, Any]]:
    """Return the candidates with those joined under one name that turn on the same, so that it is trained once."""
    parts = made_by(make, 0)
    facts = Facts.measure(parts.model, loop="own")
    names: dict[tuple[object, ...], list[str]] = {}
    for name, extra in candidates.items():
        names.setdefault(Plan.of("O0", {"extra": extra}, facts).algorithms, []).append(name)
    return {SAME.join(same): candidates[same[0]] for same in names.values()}


def measure(name: str, options: Options) -> Path:
    work = WORKLOADS[name](options)
    out = options.out / f"promises-{name}{_narrow()}{'-smoke' if options.smoke else ''}.report.json"
    factory = work.job.factory(work.data)
    parts, steps = made_by(factory.make, 0), work.job.epochs * work.data.steps(work.job.batch)
    report = TuneReport(
        title=work.title,
        model=type(parts.model).__name__,
        parameters=sum(param.numel() for param in parts.model.parameters()),
        drop=work.job.drops[0],
        budget_seconds=150.0 if options.smoke else work.budget,
        steps=steps,
        total_steps=steps,
        most_seeds=work.seeds,
        error=ERROR,
        environment=environment("cpu"),
        fingerprint=fingerprint_of(parts),
        source=factory.source,
    )
    if out.is_file():
        saved = TuneReport.load(out)
        check_same(
            out, saved, report, ("title", "drop", "steps", "most_seeds", "error", "fingerprint"), "was made with"
        )
        report = saved.model_copy(update={"whole": []})
    else:
        chosen = chosen_by_levels(factory.make, steps, 2.0 if options.smoke else TRIAL)
        findings = [Finding(candidate=Candidate(name=name, extra=extra)) for name, extra in chosen.items()]
        report = report.model_copy(update={"findings": findings})
    raced(factory, report, lambda made: made.save(out), options).save(out)
    return out


def chosen_by_levels(make: Callable[[int], Any], steps: int, trial: float) -> dict[str, dict[str, Any]]:
    """Return what the levels turn on here, and the levers by themselves, as candidates."""
    levels = {level: on_at(make, level, steps, trial) for level in MARGINS}
    levers = dict.fromkeys(try_levers(make, steps=steps, seconds=trial)[0], True)
    ways = {**levels, f"levers: {', '.join(levers)}": levers}
    return joined({name: extra for name, extra in ways.items() if extra}, make)


def raced(factory: Factory, report: TuneReport, save: Callable[[TuneReport], object], options: Options) -> TuneReport:
    """Train each candidate against the stock loop until a test decides, and save the report after each run."""
    started = time.perf_counter() - report.spent_seconds

    def told() -> None:
        update = {"runs": list(runs.made.values()), "spent_seconds": time.perf_counter() - started}
        save(report.model_copy(update=update))
        options.progress(report.title, len(runs.made), 0, f"{runs.spent:.0f} s of {report.budget_seconds:.0f} s")

    runs = Runs(
        train=Training(make=factory.make, steps=report.steps, device=torch.device("cpu")),
        budget=report.budget_seconds,
        total_steps=report.total_steps,
        made={(run.name, run.seed): run for run in report.runs},
        told=told,
    )
    recipes = [Candidate(name=STOCK), *(finding.candidate for finding in report.findings)]
    race = Race(search=Search(runs=runs, recipes=recipes, drop=report.drop), most=report.most_seeds, error=report.error)
    found = [race.confirm(plan, report.error) for plan in recipes[1:]]
    update = {"findings": found, "runs": list(runs.made.values()), "state": "complete"}
    return report.model_copy(update={**update, "spent_seconds": time.perf_counter() - started})


def _narrow() -> str:
    """Return the ending of file names for a processor that has AVX2 at most, or is told to be one (``zoo.py``)."""
    return NARROW if instructions() == "AVX2" else ""


def load(folder: Path, ending: str = "") -> dict[str, TuneReport]:
    """Return the reports of the workloads that were run."""
    found = {name: folder / f"promises-{name}{ending}.report.json" for name in WORKLOADS}
    return {name: TuneReport.load(path) for name, path in found.items() if path.is_file()}


def stock_metric(report: TuneReport, job: Workload) -> str:
    """Return the final metric of stock, the mean of its seeds."""
    return final([run.metric for run in report.runs if (run.name, run.steps) == (STOCK, report.steps)], job)


def final(metrics: list[float], job: Any) -> str:
    """Format the mean of final metrics: an accuracy in percent, a loss in nats, otherwise bits."""
    mean = statistics.fmean(metrics)
    unit = "nats" if job.metric == "loss" else "bits"
    return f"{100 * mean:.1f} %" if job.metric == "accuracy" else f"{-mean:.3f} {unit}"


def job_of(name: str) -> Workload:
    return find_workload(JOBS.get(name, "cifar10-resnet-basic"))


def table(folder: Path, ending: str = "") -> tuple[Table, str]:
    """Return the levels, the levers and the result of the tuning on every workload that was run, and a note."""
    reports = load(folder, ending)
    lines = [line for name, report in reports.items() for line in _lines(name, report)]
    head = ("workload", "way", "speed of a run", "metric, against stock", "seeds", "against fewer steps", "verdict")
    machines = sorted({machine(r.environment) for r in reports.values()})
    said = (
        "Speed is the time of a stock run over that of the way, with set-up. The levers were chosen before the runs "
        "by a trial of at most 60 s, which is not counted. Intervals of the metric hold at every look of the test. The "
        f"text has bits per character as its metric. {'; '.join(machines)}. "
        f"Every run: `benchmarks/results/promises-*{ending}.report.json`. {UNTUNED}"
    )
    return Table(headings=head, rows=tuple(lines)), said


def machine(found: Environment) -> str:
    told = (found.processor, found.instructions, wording.count(found.threads, "thread"))
    return ", ".join(filter(None, told))


def _lines(name: str, report: TuneReport) -> list[tuple[str, ...]]:
    job = job_of(name)
    share = job.metric == "accuracy"
    levers = next((one.candidate.name for one in report.findings if "levers" in one.candidate.name), "")
    shown = [one for one in report.findings if one.candidate.name == levers or "levers" not in one.candidate.name]
    ordered = sorted(shown, key=lambda one: one.candidate.name != levers)
    seeds = len({run.seed for run in report.runs if run.name == STOCK and run.steps == report.steps})
    lines = [(STOCK, wording.ratio(1.0), stock_metric(report, job), str(seeds), "", "")]
    lines += [(one.candidate.name, *_cells(one, share), _verdict(one, job)) for one in ordered]
    lines += [(f"tuned: {one.candidate.name}", *_cells(one, share), one.reason) for one in report.whole[-1:]]
    return [(f"{report.title}, {report.steps:,} steps" if not at else "", *line) for at, line in enumerate(lines)]


def _cells(found: Finding, share: bool) -> tuple[str, ...]:
    speed = "" if found.speed is None else wording.ratio_interval(found.speed)
    rival = "" if found.rival is None else f"{signed(found.rival, share)}, {found.rival_share:.0%} of the steps"
    return speed, signed(found.difference, share), str(found.seeds), rival


def signed(interval: Interval | None, share: bool) -> str:
    """Format a difference of the metric with its bounds: a share in points, otherwise bits better or worse."""
    if interval is None:
        return ""
    values = interval.mid, interval.low, interval.high
    if not share:
        return _in_bits(*(round(value, 3) for value in values))
    mid, low, high = (f"{100 * value:+.2f}".replace("-", "\N{MINUS SIGN}") for value in values)
    return f"{mid} points ({low} to {high})"


def _in_bits(mid: float, *bounds: float) -> str:
    """Format a difference of which more is better. Each bound has its word if they are on different sides."""
    words = ["" if not value else " better" if value > 0 else " worse" for value in (mid, *bounds)]
    apart = {*words[1:]} - {"", words[0]}
    low, high = (f"{abs(value):.3f}{word if apart else ''}" for value, word in zip(bounds, words[1:], strict=True))
    return f"{abs(mid):.3f} bits{words[0]} ({low} to {high})"


def _verdict(found: Finding, job: Workload) -> str:
    """Return whether the levels of a candidate keep their promises, and what became of another candidate."""
    levels = [level for level in MARGINS if level in found.candidate.name.split(SAME)]
    if not levels:
        return found.outcome or "not decided"
    said = (": ".join(promised(found, level, job)) for level in levels)
    return "; ".join(f"{level} {text}" for level, text in zip(levels, said, strict=True))


def promised(found: Finding, level: str, job: Workload) -> tuple[str, str]:
    """Return what a level promises, and whether it is kept."""
    drop = job.drops[MARGINS[level]]
    share = job.metric == "accuracy"
    promise = f"at most {wording.amount(drop, share=share)}{' lower' if share else ' bits worse'}"
    if found.difference is None:
        return promise, "not decided"
    if found.difference.low > -drop:
        return promise, "kept"
    return promise, "not kept" if found.difference.high < -drop else "not decided"


if __name__ == "__main__":
    run_each(__doc__, "workload", WORKLOADS, measure)
