"""Claim: at their best learning rates the levels keep their promises, on networks that O2 changes.

Runs have about 1,000 steps, since O2 has switches only in shorter ones. Stock and O2 are each trained once at the same
multiples of the workload's learning rate, and have the one that is best on the validation data. The grid grows until
two rates beyond it, on each side, are worse. Then seeds that no choice has seen are trained in four ways: stock, O1 at
stock's rate, O2, and the rival of O2, which is O1 in as much time: in fewer steps, with the schedule fitted to them.

Seconds are those of ``half_time.py``, and so is the way to run it: ``OMP_NUM_THREADS=1 taskset -c 0 python
level_rates.py``. Each run is saved when it ends; ``--resume`` continues where the script stopped.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from cases import WORKLOADS, Case, job_of
from figures import allowed, final, machine, signed
from half_time import FRESH, STOCK, Bench, turned_on, verdict
from options import Options, run_each
from saved_runs import Result, Run, SavedRuns, results

from torchboost.bench.report import wording
from torchboost.bench.report.table import Table
from torchboost.measure.evidence import Environment, Interval
from torchboost.measure.statistics import mean_of, paired_difference, paired_ratio

MARGINS = {"O1": 0, "O2": 1}
"""Place of what a level may lose among the drops of the workload."""
O1, O2 = MARGINS
SEEDS = {"digits": 8, "vgg": 8, "resnet-basic": 5, "fine-tuning": 5}
"""Workload -> fresh seeds."""
LONGER = {"digits": {"batch": 16, "epochs": 21}}
"""How the workload has 1,000 steps whose runs elsewhere have fewer."""
RATES = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Multiples of the learning rate of the workload."""
BEYOND = 2
"""Rates that are tried beyond the best one on each side, since one may be worse by chance."""
SAME_TIME = 0.97
"""O1 is its own rival in as much time if this share of its time, or more, is O2's."""


def case_of(name: str, options: Options) -> Case:
    case = WORKLOADS[name](options)
    job = replace(case.job, **LONGER.get(name, {}))
    return replace(case, job=replace(job, epochs=1) if options.smoke else job)


def best_rate(bench: Bench, way: str) -> float:
    """Return the multiple of the learning rate with the best score on the validation data, with one seed."""

    def score(rate: float) -> float:
        found = bench.run(way, 0, rate=rate)["score"]
        return found if math.isfinite(found) else -math.inf

    def best() -> int:  # of equal ones that next to the workload's own
        return max(range(len(rates)), key=lambda at: (score(rates[at]), -abs(math.log2(rates[at]))))

    rates = sorted(RATES)
    while best() < BEYOND:
        rates.insert(0, rates[0] / 2)
    while best() >= len(rates) - BEYOND:
        rates.append(2 * rates[-1])
    return rates[best()]


def measure(name: str, options: Options) -> Path:
    case = case_of(name, options)
    factory, steps = case.job.factory(case.data), case.job.epochs * case.data.steps(case.job.batch)
    about = {"title": case.title, "steps": steps, "lr": factory.build(0).optimizer.param_groups[0]["lr"]}
    runs = SavedRuns(options.file("level_rates", name), about, resume=options.resume, same=("title", "steps"))
    bench = Bench(factory, steps, Path(), 1.0, None, runs)
    rates = {way: best_rate(bench, way) for way in (STOCK, O2)}
    runs.note("rates", rates)
    chosen = {STOCK: rates[STOCK], O1: rates[STOCK], O2: rates[O2]}
    made = runs.result["runs"]
    runs.result["runs"] = [run for run in made if run["seed"] < FRESH or run["rate"] == chosen[run["way"]]]
    seeds = range(FRESH, FRESH + (2 if options.smoke else SEEDS[name]))
    ways = list(chosen.items())
    for number, seed in enumerate(seeds):
        turn = number % len(ways)
        for way, rate in (*ways[turn:], *ways[:turn]):
            bench.run(way, seed, rate=rate, share=1.0)
    share = round(_seconds(runs.result, O2) / _seconds(runs.result, O1), 2)
    runs.note("share", share if share < SAME_TIME else 1.0)
    for seed in seeds:
        bench.run(O1, seed, rate=rates[STOCK], share=runs.result["share"])
    return runs.file


def _fresh(result: Result, way: str, share: float = 1.0) -> dict[int, Run]:
    return {run["seed"]: run for run in result["runs"] if (run["way"], run.get("share")) == (way, share)}


def _seconds(result: Result, way: str) -> float:
    return mean_of(run["seconds"] for run in _fresh(result, way).values())


def complete(folder: Path) -> dict[str, Result]:
    """Return the workloads of which every run was made."""
    return {name: result for name, result in results(folder, "level_rates", SEEDS).items() if "share" in result}


def gained(folder: Path, name: str) -> str:
    """Return the difference in accuracy of O2 to stock on one workload."""
    result = results(folder, "level_rates", (name,))[name]
    return signed(_gap(_fresh(result, STOCK), _fresh(result, O2))[1])


def table(folder: Path) -> tuple[Table, str]:
    """Return metric and time of each way on every workload that was run, and a note."""
    found = complete(folder)
    lines = [line for name, result in found.items() for line in _lines(name, result)]
    head = ("workload", "way", "rate", "metric, against stock", "time, times stock's", "may lose")
    seeds = sorted({str(len(_fresh(result, STOCK))) for result in found.values()})
    machines = sorted({machine(Environment(**result["environment"])) for result in found.values()})
    said = (
        f"{' to '.join(seeds)} seeds that no choice has seen. Stock and O2 are at the rate that is best for each of "
        "them on validation data, of at least five. Each bound of a difference holds with 95 %. Times are processor "
        f"time of whole runs, with set-up. {'; '.join(machines)}. All runs: `benchmarks/results/level_rates-*.json`."
    )
    return Table(headings=head, rows=tuple(lines)), said


def _lines(name: str, result: Result) -> list[tuple[str, ...]]:
    job, stock, share = job_of(name), _fresh(result, STOCK), result["share"]
    rates = {way: f"{rate * result['lr']:g}" for way, rate in result["rates"].items()}
    reached = final([run["metric"] for run in stock.values()], job)
    seconds = wording.seconds(_seconds(result, STOCK))
    lines = [(f"{result['title']}, {result['steps']:,} steps", STOCK, rates[STOCK], reached, seconds, "")]
    for level, rate in ((O1, rates[STOCK]), (O2, rates[O2])):
        own = _fresh(result, level)
        on = turned_on(list(own.values()))
        lines.append(("", f"{level}: {on}", rate, *_against(stock, own, job.drops[MARGINS[level]])))
    if share < 1:
        own = _fresh(result, O1, share)
        metric, *_ = _against(stock, own, math.inf)
        lines.append(("", f"O1, {share:.0%} of the steps: as much time as O2", rates[STOCK], metric, "", ""))
    return lines


def _gap(stock: dict[int, Run], own: dict[int, Run]) -> tuple[list[int], Interval]:
    seeds = sorted(stock.keys() & own.keys())
    return seeds, paired_difference(*([one[seed]["metric"] for seed in seeds] for one in (stock, own)))


def _against(stock: dict[int, Run], own: dict[int, Run], drop: float) -> tuple[str, str, str]:
    """Return the difference in accuracy, the ratio of the times, and whether the promise is kept."""
    seeds, gap = _gap(stock, own)
    ratio = paired_ratio(*([one[seed]["seconds"] for seed in seeds] for one in (own, stock)))
    promise = f"{allowed(drop)}: {verdict(gap, drop)}"
    return signed(gap), wording.ratio_interval(ratio), promise


if __name__ == "__main__":
    run_each(__doc__, "workload", SEEDS, measure)
