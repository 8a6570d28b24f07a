"""Two reports of a benchmark side by side, such as before and after a change, or of two machines."""

from __future__ import annotations

import math

from pydantic import BaseModel

from torchboost.bench.report import wording
from torchboost.bench.report.table import NOTHING, Table
from torchboost.bench.verdict import LEAST_PAIRS, finals_of
from torchboost.measure.evidence import BenchReport, Contestant, Interval, Record
from torchboost.measure.statistics import mean_of, paired_difference, unpaired_ratio

MACHINE = ("processor", "instructions", "cores", "threads", "device", "platform", "torch", "python", "torchboost")
METRIC = ("metric_name", "metric_higher_is_better")
TRAINING = ("workload", "model", "parameters", "batch", "epochs", "train_samples", *METRIC, "source", "data")


class Compared(Record):
    """A contestant of two reports, A and B: times per step, and means of the last metric.

    Args:
        speed: The first time over the second, above 1 if the second report is faster. None with fewer than six samples.
        difference: The second metric minus the first, over the seeds that both have. Without bounds if they are fewer
            than three, None if they have none or the metric is another one.
        seeds: How many these are.
    """

    name: str
    step_a: Interval
    step_b: Interval
    speed: Interval | None
    final_a: float | None
    final_b: float | None
    difference: Interval | None
    seeds: int


def compared(first: BenchReport, second: BenchReport) -> list[Compared]:
    """Return the contestants that both reports have, in the order of the first."""
    others = {contestant.name: contestant for contestant in second.contestants}
    same = not differing(first, second, METRIC)
    return [_pair(one, others[one.name], same) for one in first.contestants if one.name in others]


def _pair(one: Contestant, other: Contestant, same_metric: bool) -> Compared:
    enough = min(len(one.samples), len(other.samples)) >= LEAST_PAIRS
    ours, theirs = finals_of(one), finals_of(other)
    seeds = [seed for seed in ours if seed in theirs] if same_metric else []
    changes = [theirs[seed] - ours[seed] for seed in seeds]
    difference = None
    if len(seeds) >= 3 and all(map(math.isfinite, changes)):
        difference = paired_difference([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
    elif seeds:
        difference = Interval(low=-math.inf, mid=mean_of(changes), high=math.inf)
    return Compared(
        name=one.name,
        step_a=one.step_seconds,
        step_b=other.step_seconds,
        speed=unpaired_ratio(one.samples, other.samples) if enough else None,
        final_a=mean_of(ours.values()) if ours else None,
        final_b=mean_of(theirs.values()) if theirs else None,
        difference=difference,
        seeds=len(seeds),
    )


def comparison_table(first: BenchReport, second: BenchReport) -> Table:
    """Return a row per contestant that both have: both times, their ratio, both metrics, their difference."""
    shares = wording.is_share(first), wording.is_share(second)

    def metric(value: float | None, share: bool) -> str:
        return NOTHING if value is None else wording.measure(value, share=share)

    def change(found: Interval | None) -> str:
        if found is None:
            return NOTHING
        low, mid, high = (wording.difference(value, share=all(shares)) for value in (found.low, found.mid, found.high))
        bounds = f" ({low.removesuffix(' points')} to {high.removesuffix(' points')})"
        return mid + (bounds if math.isfinite(found.low) else "")

    rows = [
        (
            each.name,
            wording.seconds_interval(each.step_a),
            wording.seconds_interval(each.step_b),
            NOTHING if each.speed is None else wording.ratio_interval(each.speed),
            metric(each.final_a, shares[0]),
            metric(each.final_b, shares[1]),
            change(each.difference),
        )
        for each in compared(first, second)
    ]
    metrics = f"{first.metric_name}, A", f"{second.metric_name}, B"
    return Table(("contestant", "step, A", "step, B", "speed, B to A", *metrics, "B - A"), tuple(rows))


def differing(first: BaseModel, second: BaseModel, names: tuple[str, ...]) -> dict[str, tuple[object, object]]:
    """Return the fields that are not the same in two records, with both values."""
    pairs = {name: (getattr(first, name, ""), getattr(second, name, "")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _recorded(value: object) -> object:
    return value if isinstance(value, bool) else value or "not recorded"


def remarks(first: BenchReport, second: BenchReport) -> list[str]:
    """Return the warnings that a reader needs before they trust the differences."""
    lines = []
    machine = differing(first.environment, second.environment, MACHINE)
    training = differing(first, second, TRAINING)
    for what, found in ("machine or the versions differ", machine), ("training differs", training):
        if found:
            both = "; ".join(f"{name}: {_recorded(a)}, {_recorded(b)}" for name, (a, b) in found.items())
            lines.append(f"The {what}, and the differences above with them. {both}.")
    names = [{contestant.name for contestant in report.contestants} for report in (first, second)]
    if alone := sorted(names[0] ^ names[1]):
        lines.append(f"In one report only: {', '.join(alone)}.")
    others = {contestant.name: contestant for contestant in second.contestants}
    for one in first.contestants:
        other = others.get(one.name, one)
        if one.algorithms != other.algorithms or one.source != other.source:
            a, b = (wording.turned_on(each.algorithms) for each in (one, other))
            said = f"A turned on {a}, B {b}" if a != b else f"both turned on {a}, with other settings"
            lines.append(f"{one.name} is not the same in both: {said}.")
    lines.append(
        "The two were not timed in turns: another load of the machine shows as a difference, which the interval of the "
        "speed does not contain. To compare two ways to train, let one `torchboost bench` time both."
    )
    return lines
