"""Claim: what one ``tune`` finds from the factory alone reaches the metric of tuned stock in half of the time.

On each of nine workloads, and on two that served no choice, ``tune`` first finds the best learning rate of stock, then
what reaches its metric soonest. What it found is then confirmed with seeds that it has not seen: plain stock at the
rate that ``tune`` found for it, against what ``boost`` makes of ``boost.json``. The rival is the best loop by hand, at
the same rate of stock: a fused optimizer, channels-last, bfloat16 autocast if it is fast here, texts padded to the
longest of their batch; once with the optimizer of stock, and once with Muon for the matrices, its rate and its length
chosen by hand on the validation data. Nothing is compiled by hand, since the runs take less than three minutes. Level
O1 is run as well, at the same rate: it promises the metric of stock.

Seconds are processor time from the construction of the model to the last update. What both have in common, the load of
the data and the evaluation, does not count. Use one thread and one core: ``OMP_NUM_THREADS=1 taskset -c 0 python
half_time.py``. Each run is saved when it ends; ``--resume`` continues where the script stopped.
"""

from __future__ import annotations

import itertools
import json
import math
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from figures import allowed, final, machine, signed, unit_of
from fine_tuned_llama import FineTunedLlama
from foreign_workloads import FOREIGN
from options import Options, options_of, parser
from saved_runs import Result, SavedRuns, results

import torchboost
from torchboost.bench.contestants import Loop, Recipe, averaged, build_loop
from torchboost.bench.factory import Factory, Parts, metric_of, one_epoch, score_of
from torchboost.bench.report import wording
from torchboost.bench.report.table import Table
from torchboost.core.torch_private import forget_compiled
from torchboost.measure.evidence import Environment, Interval
from torchboost.measure.statistics import mean_of, paired_difference, paired_ratio
from torchboost.workloads.data import Images
from torchboost.workloads.named import Workload, find_workload

STOCK, TUNED, HAND, HAND_MUON, LEVEL = "stock", "tuned", "by hand", "by hand, Muon", "O1"
LEVELS = (LEVEL, "O2")
RECIPES = {STOCK: "stock", HAND: "hand", HAND_MUON: "hand", **{level: level for level in LEVELS}}
"""Way -> the contestant of ``torchboost bench`` that it is."""
SEEDS, FRESH = 8, 2000
"""Seeds of the confirmation, and the first one. Those of ``tune`` begin at 0 and at 1000."""
MUON_RATES, MUON_SHARES = (0.01, 0.02, 0.04, 0.08, 0.16), (0.5, 0.7, 1.0)
"""Rates by hand, tried with half of the steps; then lengths, of which the first one is taken that is good enough."""
MOST_TEST, MOST_VALIDATION = 4_000, 5_000
"""Images for tests, since more of them would take longer than the training, and for validation. The VGG was tuned with
2,000 of the second."""

UNITS = "Texts have bits per character or word as their metric. "
HEADINGS = (
    *("workload", "stock's rate found", "stock tuned: metric, seconds", "what tune chose"),
    *("metric, against stock", "time, times stock's", "cost of tuning, in runs of stock"),
)

Make = Callable[[int], Any]


class Job(Protocol):
    """What is said about a workload."""

    name: str
    title: str
    model_name: str
    metric: Any
    drops: tuple[float, float]
    epochs: int


@dataclass(frozen=True)
class Case:
    """The size of a run of stock, and the time for its tuning.

    Args:
        samples: Training samples; None for all.
        epochs: Passes over them; None for those of the workload.
        minutes: Of the tuning.
    """

    samples: int | None = None
    epochs: int | None = None
    minutes: float = 30.0


CASES = {
    "digits-resnet": Case(minutes=5.0),
    "cifar10-resnet-bottleneck": Case(samples=6_400, epochs=2),
    "cifar10-resnet-bottleneck-small": Case(samples=12_800, epochs=2),
    "cifar10-resnet-basic": Case(samples=16_000, epochs=2),
    "cifar10-vgg": Case(samples=16_000, epochs=2),
    "text-gpt": Case(),
    "docstrings-transformer": Case(),
    "pieces-gpt": Case(),
    FineTunedLlama.name: Case(),
    "cifar10-timm-vit": Case(samples=12_800),
    "pieces-neox": Case(),
}
OTHERS: dict[str, Workload | FineTunedLlama] = {one.name: one for one in (FineTunedLlama(), *FOREIGN)}
"""Workloads that have no name on the command line of torchboost."""


def workload(name: str) -> Workload | FineTunedLlama:
    return OTHERS.get(name) or find_workload(name)


def loaded(name: str, options: Options) -> tuple[Workload | FineTunedLlama, Factory, int]:
    """Return a workload at its size, its factory, and the steps of a run of stock."""
    job, case = workload(name), CASES[name]
    data = job.load(options.path_for(name), 4 * job.batch if options.smoke else case.samples)
    if isinstance(data, Images):
        data = replace(_shorter(data, MOST_TEST), validation=_shorter(data.validation, MOST_VALIDATION))
    job = replace(job, epochs=1 if options.smoke else case.epochs or job.epochs)
    return job, job.factory(data), job.epochs * data.steps(job.batch)


def _shorter(data: Any, most: int) -> Any:
    return replace(data, test_inputs=data.test_inputs[:most], test_labels=data.test_labels[:most])


def scaled(make: Make, rate: float, optimizer: Callable[[Parts], Any] | None = None) -> Make:
    """Return a factory with the learning rates times ``rate``, and then another optimizer made of its own."""

    def made(seed: int) -> Parts:
        parts = Parts(*make(seed))
        for group in parts.optimizer.param_groups:
            group["lr"] = rate * group["lr"]
        return parts if optimizer is None else parts._replace(optimizer=optimizer(parts))

    return made


def with_muon(sample: Any, rate: float, parts: Parts) -> Any:
    return torchboost.optim.muon_from(parts.optimizer, parts.model, lr=rate, sample=sample)


@dataclass(frozen=True)
class Bench:
    """A workload with what was found for it.

    Args:
        factory: Of stock.
        steps: Of a run of stock.
        config: What ``tune`` wrote.
        rate: What ``tune`` found as the best multiple of stock's learning rate.
        sample: Inputs of a batch.
        runs: Those that were made.
    """

    factory: Factory
    steps: int
    config: Path
    rate: float
    sample: Any
    runs: SavedRuns

    def run(self, way: str, seed: int, **chosen: float) -> Result:
        """Return a run that was made before, or make it."""
        return self.runs.get({"way": way, "seed": seed, **chosen}, lambda: self.trained(way, seed, **chosen))

    def trained(self, way: str, seed: int, **chosen: float) -> Result:
        """Train once, and return its processor time, the metric and the score on the validation data."""
        forget_compiled()
        torch.manual_seed(seed)
        wall, began = time.perf_counter(), cpu_seconds()
        loop = self._loop(way, seed, **chosen)
        for inputs, targets in itertools.islice(_batches(loop.parts, seed), loop.steps):
            loop.step(inputs, targets)
        seconds, wall = cpu_seconds() - began, time.perf_counter() - wall
        parts, on = loop.parts, {"on": [row.name for row in loop.algorithms]} if way in LEVELS else {}
        with averaged(parts.optimizer):
            scores = {"metric": metric_of(parts, parts.model), "score": score_of(parts, parts.model)}
        return {"steps": loop.steps, **on, "seconds": seconds, "wall": wall, **scores}

    def _loop(self, way: str, seed: int, share: float = 1.0, muon: float = 0.0, rate: float | None = None) -> Loop:
        steps = max(2, round(share * self.steps))
        if way == TUNED:
            return build_loop(Recipe.parse(str(self.config)), self.factory, seed=seed, steps=steps)
        optimizer = None if way != HAND_MUON else partial(with_muon, self.sample, muon)
        factory = replace(self.factory, make=scaled(self.factory.make, rate or self.rate, optimizer))
        return build_loop(Recipe.parse(RECIPES[way]), factory, seed=seed, steps=steps)


def _batches(parts: Parts, seed: int) -> Iterator[tuple[Any, Any]]:
    for epoch in itertools.count():
        yield from one_epoch(parts.batches, seed=seed, epoch=epoch, device=torch.device("cpu"))


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it started and that have ended, such as a compiler."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def muon_by_hand(bench: Bench, drop: float) -> dict[str, float]:
    """Return Muon's rate and share of the steps as they are found by hand, on the validation data, with one seed."""

    def score(rate: float, share: float) -> float:
        found = bench.run(HAND_MUON, 0, muon=rate, share=share)["score"]
        return found if math.isfinite(found) else -math.inf

    best = max(MUON_RATES, key=lambda rate: score(rate, MUON_SHARES[0]))
    target = bench.run(STOCK, 0)["score"] - drop
    enough = (share for share in MUON_SHARES[:-1] if score(best, share) >= target)
    return {"muon": best, "share": next(enough, MUON_SHARES[-1])}


def measure(name: str, options: Options, *, budget: str | None = None, seeds: int = SEEDS, hand: bool = True) -> Path:
    job, factory, steps = loaded(name, options)
    minutes = CASES[name].minutes
    file = options.file("half_time", name)
    return measured(job, factory, steps, options, file, budget=budget or f"{minutes:g}m", seeds=seeds, hand=hand)


def measured(
    job: Job, factory: Factory, steps: int, options: Options, file: Path, *, budget: str, seeds: int, hand: bool
) -> Path:
    """Tune a workload and confirm what was found, and return the file of the runs."""
    config = file.with_name(f"{file.stem}.boost.json")
    report = torchboost.tune(
        factory.make,
        drop=job.drops[0],
        budget=20.0 if options.smoke else budget,
        epochs=job.epochs,
        title=f"{job.model_name}: {job.title}",
        out=config,
        resume=options.resume,
        progress=options.progress,
    )
    parts = factory.build(0)
    rate, written = report.stock.rate, json.loads(config.read_text(encoding="utf-8"))
    written.pop("about", None)
    about = {
        "name": job.name,
        "title": report.title,
        "steps": steps,
        "drop": job.drops[0],
        "lr": parts.optimizer.param_groups[0]["lr"],
        "rate": rate,
        "tuning": {"seconds": report.spent_seconds, "runs": len(report.runs)},
    }
    runs = SavedRuns(file, about, resume=options.resume, same=("title", "steps", "rate"))
    if runs.result.get("config") != written:
        runs.result["runs"] = [run for run in runs.result["runs"] if run["way"] != TUNED]
    runs.result["config"] = written
    bench = Bench(factory, steps, config, rate, next(iter(parts.batches))[0], runs)
    muon = muon_by_hand(bench, job.drops[0]) if hand else {}
    runs.note("muon", muon)
    ways: list[tuple[str, dict[str, float]]] = [(STOCK, {}), (TUNED, {})]
    ways += [(HAND, {}), (HAND_MUON, muon), (LEVEL, {})] if hand else []
    for number, seed in enumerate(range(FRESH, FRESH + seeds)):
        turn = number % len(ways)
        for way, chosen in (*ways[turn:], *ways[:turn]):
            bench.run(way, seed, **chosen)
    return file


def confirmed(folder: Path) -> list[Result]:
    """Return the workloads that were run with at least two fresh seeds, in their order."""
    return [result for result in results(folder, "half_time", CASES).values() if len(_fresh(result, TUNED)) > 1]


def table(folder: Path) -> tuple[Table, str]:
    """Return how soon what was tuned reaches the metric of tuned stock, what it costs to find it, and a note."""
    found = confirmed(folder)
    lines = [line(result, workload(result["name"])) for result in found]
    return Table(headings=HEADINGS, rows=tuple(lines)), said_of(found)


def line(result: Result, job: Job) -> tuple[str, ...]:
    """Return the line of a workload in the table."""
    stock = _fresh(result, STOCK).values()
    cost = result["tuning"]["seconds"] / mean_of(run["wall"] for run in stock)
    seconds = mean_of(run["seconds"] for run in stock)
    return (
        f"{result['title']}, {result['steps']:,} steps",
        f"{result['rate'] * result['lr']:g}, {_times(result['rate'])} its own",
        f"{final([run['metric'] for run in stock], job)}, {wording.seconds(seconds)}",
        chosen_in(result["config"]),
        *_against_stock(result, TUNED, job),
        f"{cost:.0f}",
    )


def rival_table(folder: Path) -> tuple[Table, str]:
    """Return the same of the best loops by hand, and the time of what was tuned against each of these."""
    lines, found = [], confirmed(folder)
    for result in found:
        job, cells = workload(result["name"]), list[str]()
        for way in (HAND, HAND_MUON):
            ours, theirs = _fresh(result, TUNED), _fresh(result, way)
            seeds = sorted(ours.keys() & theirs.keys())
            if len(seeds) < 2:
                cells += ["", "", ""]
                continue
            left = paired_ratio(*([one[seed]["seconds"] for seed in seeds] for one in (ours, theirs)))
            cells += [*_against_stock(result, way, job), wording.ratio_interval(left)]
        muon = result.get("muon") or {}
        rate = f"{muon['muon']:g}, {muon['share']:.0%} of the steps" if muon else ""
        lines.append((result["title"], *cells[:3], rate, *cells[3:]))
    head = (
        *("workload", "by hand: metric, against stock", "time, times stock's", "time of the tuned run, times its"),
        *("Muon by hand: rate, length", "metric, against stock", "time, times stock's"),
        "time of the tuned run, times its",
    )
    return Table(headings=head, rows=tuple(lines)), said_of(found)


def level_table(folder: Path) -> tuple[Table, str]:
    """Return the metric of level O1 against stock, at the rate found for stock, and whether O1 kept its promise."""
    lines, found = [], [result for result in confirmed(folder) if len(_fresh(result, LEVEL)) > 1]
    for result in found:
        job, stock, level = workload(result["name"]), _fresh(result, STOCK), _fresh(result, LEVEL)
        seeds = sorted(stock.keys() & level.keys())
        pairs = [(stock[seed]["metric"], level[seed]["metric"]) for seed in seeds]
        gap, drop = paired_difference(*zip(*pairs, strict=True)), result["drop"]
        stock_metric = final([run["metric"] for run in stock.values()], job)
        cells = (result["title"], stock_metric, turned_on([level[seed] for seed in seeds]))
        lines.append((*cells, signed(gap, unit_of(job)), allowed(drop, unit_of(job)), verdict(gap, drop)))
    head = ("workload", "stock tuned: metric", "switches on", "metric, against stock", "may lose", "promise")
    return Table(headings=head, rows=tuple(lines)), said_of(found, LEVEL)


def verdict(gap: Interval, drop: float) -> str:
    """Return whether a metric that may be lower by ``drop`` is shown to be, or not to be, by more."""
    return "kept" if gap.low >= -drop else "broken" if gap.high < -drop else "not decided"


def turned_on(runs: Sequence[Result]) -> str:
    """Return what a level turned on, and in how many runs if not in all."""
    count = Counter(name for run in runs for name in run["on"])
    names = (name if times == len(runs) else f"{name} ({times} of {len(runs)})" for name, times in count.items())
    return ", ".join(names) or "nothing"


def _fresh(result: Result, way: str) -> dict[int, Result]:
    return {run["seed"]: run for run in result["runs"] if run["way"] == way and run["seed"] >= FRESH}


def _against_stock(result: Result, way: str, job: Job) -> tuple[str, str]:
    """Return the difference in the metric and the time of runs, or that the metric of stock is not reached."""
    stock, own = _fresh(result, STOCK), _fresh(result, way)
    seeds = sorted(stock.keys() & own.keys())
    if len(seeds) < 2:
        return "", ""
    pairs = [(stock[seed]["metric"], own[seed]["metric"]) for seed in seeds]
    if not all(math.isfinite(metric) for _, metric in pairs):
        return "diverged", "not reached"
    gap = paired_difference(*zip(*pairs, strict=True))
    ratio = paired_ratio(*([one[seed]["seconds"] for seed in seeds] for one in (own, stock)))
    reached = gap.mid >= -result["drop"]
    time = wording.ratio_interval(ratio)
    return signed(gap, unit_of(job)), time if reached else f"not reached; a run takes {time}"


def _times(rate: float) -> str:
    return "as" if rate == 1 else f"{rate:g} times"


def chosen_in(config: Result) -> str:
    """Return in words what a configuration turns on."""
    recipe = config.get("recipe") or {}
    optimizer, length, rate = recipe.get("optimizer"), recipe.get("length", 1.0), recipe.get("rate", 1.0)
    names = {"muon": "Muon", "schedule_free_adamw": "schedule-free AdamW"}
    said = [f"{names.get(optimizer, optimizer)} at {recipe.get('lr'):g}"] if optimizer else []
    said += [f"{length:.0%} of the steps"] if length != 1 else []
    said += [f"rates times {rate:g}"] if rate != 1 else []
    said += [name for name, value in config.get("extra", {}).items() if value is not False]
    return ", ".join(said) or "nothing"


def said_of(found: list[Result], way: str = TUNED, claim: str = "half_time", units: str = UNITS) -> str:
    """Return the note below a table: seeds, confidence, machines and files."""
    seeds = sorted({len(_fresh(result, way)) for result in found})
    many = " to ".join(str(count) for count in dict.fromkeys((seeds[0], seeds[-1]))) if seeds else "0"
    machines = sorted({machine(Environment(**result["environment"])) for result in found})
    timed = (
        "Intervals of times are those of the median, with 95 %. Times are processor time of whole runs, with set-up. "
        "The metric of stock is reached if the mean difference is within the accepted drop. "
    )
    return (
        f"{many} seeds that no choice has seen. Each bound of a difference in the metric holds with 95 %. "
        f"{'' if way == LEVEL else timed}{units}{'; '.join(machines)}. All runs: `benchmarks/results/{claim}-*.json`."
    )


def main(argv: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("workload", nargs="*", default=[], help=f"any of {', '.join(CASES)}; all without one")
    made.add_argument("--budget", help="time of each tuning, such as 30m; default: by workload")
    made.add_argument("--seeds", type=int, default=SEEDS, help="seeds of the confirmation (default: %(default)s)")
    made.add_argument("--no-hand", dest="hand", action="store_false", help="leave out the loops by hand")
    given = made.parse_args(argv)
    options = options_of(given)
    seeds = 2 if options.smoke else given.seeds
    for name in given.workload or CASES:
        print(f"wrote {measure(name, options, budget=given.budget, seeds=seeds, hand=given.hand)}")


if __name__ == "__main__":
    main()
