"""The tables of ``fewer_steps.py`` and ``fewer_steps_time.py``."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchboost.bench.report.table import Table
from torchboost.measure.evidence import BenchReport, Interval
from torchboost.measure.statistics import paired_difference, paired_ratio

ORDER = ("gpt-characters", "gpt-pieces", "speakers", "vit", "resnet-basic", "resnet-bottleneck", "fine-tuning")
WAYS = ("AdamW", "SGD", "schedule-free AdamW", "Muon", "Muon, AdamW's rate")
LEAST_SEEDS = 3


def finals(result: dict[str, Any], way: str, steps: int | None = None) -> dict[int, float]:
    """Return the metric on the test data by seed; larger is better for an accuracy, smaller for a loss."""
    wanted = result["steps"] if steps is None else steps
    return {
        run["seed"]: run[result["metric"]]
        for run in result["runs"]
        if run["way"] == way and run["split"] == "test" and run["steps"] == wanted and _chosen(result, run)
    }


def _chosen(result: dict[str, Any], run: dict[str, Any]) -> bool:
    """Whether a run has the rates that were chosen in the end."""
    return all(run[key] == value for key, value in result.get("chosen", {}).get(run["way"], {}).items())


def share_needed(result: dict[str, Any], seed: int, target: float) -> tuple[float, bool]:
    """Return the share of the steps after which Muon, its schedule fitted to them, reaches a metric.

    Between the lengths that were run the metric is interpolated. The second value is False if the shortest run was
    better already, so that the share is an upper bound.
    """
    sign = 1 if result["metric"] == "loss" else -1
    runs = [run for run in result["runs"] if run["way"] == "Muon" and run["split"] == "test" and run["seed"] == seed]
    points = sorted(
        (run["steps"] / result["steps"], sign * run[result["metric"]]) for run in runs if _chosen(result, run)
    )
    wanted = sign * target
    if points[0][1] <= wanted:
        return points[0][0], False
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 <= wanted < y0:
            return x0 + (x1 - x0) * (y0 - wanted) / (y0 - y1), True
    return float("inf"), True


def cell(result: dict[str, Any], way: str) -> str:
    found = finals(result, way)
    if not found:
        return ""
    percent = result["metric"] == "accuracy"
    text = shown_metric(result, statistics.mean(found.values()))
    base = finals(result, "AdamW")
    seeds = sorted(base.keys() & found.keys())
    if way == "AdamW" or len(seeds) < LEAST_SEEDS:
        return text
    gap = paired_difference([base[s] for s in seeds], [found[s] for s in seeds])
    factor, digits = (100, 1) if percent else (1, 3)
    low, high = (f"{factor * bound:+.{digits}f}" for bound in (gap.low, gap.high))
    return f"{text} ({low} to {high})"


def needed(result: dict[str, Any], stock: str, factor: float = 1.0) -> str:
    """Return the share of the steps that Muon needs for the metric of another optimizer, times a factor."""
    targets = finals(result, stock)
    seeds = sorted(targets.keys() & finals(result, "Muon").keys())
    if not seeds:
        return ""
    shares = [share_needed(result, seed, targets[seed]) for seed in seeds]
    middle = statistics.median(share for share, _ in shares)
    exact = all(known for share, known in shares if share == middle)
    low, high = min(share for share, _ in shares), max(share for share, _ in shares)
    shortest, usual, longest = (
        f"{factor * share:.2f}" if math.isfinite(share) else "not at all" for share in (low, middle, high)
    )
    return f"{'' if exact or not math.isfinite(middle) else 'under '}{usual} ({shortest} to {longest})"


def step_ratio(folder: Path, name: str) -> Interval | None:
    path = folder / f"fewer_steps_time-{name}.json"
    if not path.is_file():
        return None
    found = {one.name: one for one in BenchReport.load(path).contestants}
    return paired_ratio(found["Muon and fused AdamW"].samples, found["AdamW, fused"].samples)


def results(folder: Path) -> list[dict[str, Any]]:
    """Return the workloads on which Muon was run with several seeds."""
    files = [folder / f"fewer_steps-{name}.json" for name in ORDER]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    return [result for result in found if len(finals(result, "Muon")) >= LEAST_SEEDS]


def metrics_table(folder: Path) -> tuple[Table, str]:
    """Return the final metrics of all optimizers, and a sentence about the runs."""
    found = results(folder)
    lines = [(f"{result['title']}, {result['steps']} steps", *(cell(result, way) for way in WAYS)) for result in found]
    seeds = [len(finals(result, "Muon")) for result in found]
    many = f"{min(seeds)} to {max(seeds)}" if len(set(seeds)) > 1 else f"{seeds[0]}"
    machines = sorted({f"{one['environment']['processor']}, torch {one['environment']['torch']}" for one in found})
    said = (
        "The metric on test data at the end of the run: the accuracy in percent, or the loss. Each figure is the mean "
        f"of {many} seeds. The 95 % interval of the paired difference from AdamW is in parentheses. The learning rate "
        "of each optimizer is chosen on validation data from five to seven. Muon's is for the matrices; the rest has "
        "AdamW's. "
        f"{'; '.join(machines)}. All runs: `benchmarks/results/fewer_steps-*.json`."
    )
    return Table(headings=("workload", *WAYS), rows=tuple(lines)), said


def needed_table(folder: Path) -> tuple[Table, str]:
    """Return the shares of steps and of time after which Muon is as far as the others, and a sentence about them."""
    lines = []
    for result in results(folder):
        ratio = step_ratio(folder, result["name"])
        times = ("", "") if ratio is None else (f"{ratio.mid:.2f}", needed(result, "AdamW", ratio.mid))
        lines.append((result["title"], needed(result, "AdamW"), needed(result, "SGD"), *times))
    head = (
        *("workload", "steps to AdamW's metric", "to SGD's"),
        *("time of a step, times AdamW's", "time to AdamW's metric"),
    )
    said = (
        "Shares of AdamW's (SGD's) steps and time: the median over the seeds, with the smallest and the largest. "
        "Muon's schedule is fitted to the shorter run; under 0.50 means that half of the steps were enough. Times of "
        "steps: `benchmarks/results/fewer_steps_time-*.json`."
    )
    return Table(headings=head, rows=tuple(lines)), said


def rates_table(folder: Path) -> tuple[Table, str]:
    """Return what each of Muon's rates gives on the validation data, and a sentence about it."""
    found = results(folder)
    rates = sorted({rate for result in found for rate in tried(result, "Muon")})
    lines = []
    for result in found:
        metrics = tried(result, "Muon")
        of_adamw = tried(result, "AdamW")
        best = max(of_adamw, key=lambda rate: of_adamw[rate] if result["metric"] == "accuracy" else -of_adamw[rate])
        shown = (shown_metric(result, metrics[rate]) if rate in metrics else "" for rate in rates)
        lines.append((result["title"], f"{best:g}: {shown_metric(result, of_adamw[best])}", *shown))
    head = ("workload", "AdamW's best rate", *(f"Muon {rate:g}" for rate in rates))
    return Table(headings=head, rows=tuple(lines)), "The metric on the validation data, one seed each."


def tried(result: dict[str, Any], way: str) -> dict[float, float]:
    """Return the metric on the validation data by rate."""
    runs = [run for run in result["runs"] if run["way"] == way and run["split"] == "validation"]
    rest = result.get("chosen", {}).get(way, {}).get("rest_rate")
    return {run["rate"]: run[result["metric"]] for run in runs if rest in (None, run["rest_rate"])}


def shown_metric(result: dict[str, Any], value: float) -> str:
    return f"{100 * value:.1f} %" if result["metric"] == "accuracy" else f"{value:.3f}"
