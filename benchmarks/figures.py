"""How the tables state a metric, a difference of it and a machine."""

from __future__ import annotations

import statistics
from typing import Any

from torchboost.bench.report import wording
from torchboost.measure.evidence import Environment, Interval


def unit_of(job: Any) -> str:
    """Return in what a difference of a job's metric is told."""
    return {"accuracy": "points", "loss": "nats"}.get(job.metric, "bits")


def final(metrics: list[float], job: Any) -> str:
    """Format the mean of final metrics: an accuracy in percent, a loss in nats, otherwise bits."""
    mean, unit = statistics.fmean(metrics), unit_of(job)
    return f"{100 * mean:.1f} %" if unit == "points" else f"{-mean:.3f} {unit}"


def allowed(drop: float, unit: str = "points") -> str:
    return f"{100 * drop:g} points" if unit == "points" else f"{drop:g} {unit}"


def machine(found: Environment) -> str:
    told = (found.processor, found.instructions, wording.count(found.threads, "thread"))
    return ", ".join(filter(None, told))


def signed(interval: Interval, unit: str = "points") -> str:
    """Format a difference of the metric with its bounds: points of a share with their signs, else better or worse."""
    values = interval.mid, interval.low, interval.high
    if unit != "points":
        return _better(unit, *(round(value, 3) for value in values))
    mid, low, high = (f"{100 * value:+.2f}".replace("-", "\N{MINUS SIGN}") for value in values)
    return f"{mid} points ({low} to {high})"


def _better(unit: str, mid: float, *bounds: float) -> str:
    """Format a difference of which more is better. Each bound has its word if they are on different sides."""
    words = ["" if not value else " better" if value > 0 else " worse" for value in (mid, *bounds)]
    apart = {*words[1:]} - {"", words[0]}
    low, high = (f"{abs(value):.3f}{word if apart else ''}" for value, word in zip(bounds, words[1:], strict=True))
    return f"{abs(mid):.3f} {unit}{words[0]} ({low} to {high})"
