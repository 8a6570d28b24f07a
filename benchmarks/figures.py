"""How the tables state a metric, a difference of it and a machine."""

from __future__ import annotations

import statistics
from typing import Any

from torchboost.bench.report import wording
from torchboost.measure.evidence import Environment, Interval


def final(metrics: list[float], job: Any) -> str:
    """Format the mean of final metrics: an accuracy in percent, a loss in nats, otherwise bits."""
    mean = statistics.fmean(metrics)
    unit = "nats" if job.metric == "loss" else "bits"
    return f"{100 * mean:.1f} %" if job.metric == "accuracy" else f"{-mean:.3f} {unit}"


def machine(found: Environment) -> str:
    told = (found.processor, found.instructions, wording.count(found.threads, "thread"))
    return ", ".join(filter(None, told))


def signed(interval: Interval | None, share: bool) -> str:
    """Format a difference of the metric with its bounds: a share in points, otherwise bits per character."""
    if interval is None:
        return ""
    factor, digits, unit = (100, 2, "points") if share else (1, 3, "bits")
    values = (f"{factor * value:+.{digits}f}" for value in (interval.low, interval.mid, interval.high))
    low, mid, high = (value.replace("-", "\N{MINUS SIGN}") for value in values)
    return f"{mid} {unit} ({low} to {high})"
