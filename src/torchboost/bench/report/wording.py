"""Format times, ratios, accuracies and differences as short text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchboost.measure.evidence import AlgorithmRow, BenchReport, Interval

_MINUS = "\N{MINUS SIGN}"
_TIMES = "\N{MULTIPLICATION SIGN}"
_UNITS = ((1e-3, 1e6, "\N{MICRO SIGN}s"), (1.0, 1e3, "ms"), (180.0, 1.0, "s"), (10_800.0, 1 / 60, "min"))


def time_unit(value: float) -> tuple[float, str]:
    """Return the factor from seconds to the best unit for ``value`` seconds, and the unit's name."""
    for limit, factor, unit in _UNITS:
        if abs(value) < limit:
            return factor, unit
    return 1 / 3600, "h"


def _significant(value: float, digits: int = 3) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}".replace("-", _MINUS)


def seconds(value: float) -> str:
    """Format seconds: ``0.01234`` -> ``12.3 ms``."""
    factor, unit = time_unit(value)
    return f"{_significant(value * factor)} {unit}"


def seconds_interval(interval: Interval) -> str:
    """Format seconds with their interval in one unit: ``12.3 ms (12.1 to 12.6)``."""
    factor, unit = time_unit(interval.mid)
    low, mid, high = (_significant(v * factor) for v in (interval.low, interval.mid, interval.high))
    return f"{mid} {unit} ({low} to {high})"


def ratio(value: float) -> str:
    """Format a ratio: ``3.104`` -> ``3.10x``, with the multiplication sign."""
    return f"{value:.2f}{_TIMES}"


def multiple(value: float) -> str:
    """Format a factor that was chosen: ``0.5`` -> ``0.5x``, with the multiplication sign."""
    return f"{value:g}{_TIMES}"


def ratio_interval(interval: Interval) -> str:
    """Format a ratio with its interval: ``3.10x (2.95 to 3.28)``, with the multiplication sign."""
    return f"{ratio(interval.mid)} ({interval.low:.2f} to {interval.high:.2f})"


def size(count: float) -> str:
    """Format bytes: ``312 MiB``."""
    return f"{count / 2**20:,.0f} MiB"


def is_share(report: BenchReport) -> bool:
    """Whether the metric is an accuracy, as a share. It is shown in percent, and its differences in points."""
    values = [v for c in report.contestants for curve in c.curves for v in curve.metric if math.isfinite(v)]
    return report.metric_name == "accuracy" and bool(values) and all(0.0 <= v <= 1.0 for v in values)


def has_own_units(metric: str) -> bool:
    """Whether the metric with this name in a report is a user's, whose units are not known."""
    return metric == "metric"


def measure(value: float, *, share: bool) -> str:
    """Format a value of the metric: ``98.12 %`` for a share, otherwise four significant digits."""
    if not math.isfinite(value):
        return str(value)
    return f"{100 * value:.2f} %" if share else _significant(value, 4)


def difference(value: float, *, share: bool) -> str:
    """Format a signed difference of the metric: ``+0.12 points`` for a share."""
    if not math.isfinite(value):
        return str(value)
    text = f"{100 * value:+.2f} points" if share else f"{value:+.3g}"
    return text.replace("-", _MINUS)


def difference_interval(interval: Interval) -> str:
    """Format a signed difference in the units of the metric, with its bounds: ``+0.001 (-0.004 to +0.006)``."""
    low, mid, high = (difference(value, share=False) for value in (interval.low, interval.mid, interval.high))
    return f"{mid} ({low} to {high})"


def better(value: float) -> str:
    """Format a signed difference of which more is better, in the units of the metric: ``0.004 worse``."""
    if not math.isfinite(value):
        return str(value)
    return f"{abs(value):.3g} {'worse' if value < 0 else 'better'}"


def turned_on(rows: Sequence[AlgorithmRow]) -> str:
    """Name what a contestant turned on, or say ``nothing``."""
    return ", ".join(row.name for row in rows) or "nothing"


def amount(value: float, *, share: bool) -> str:
    """Format an amount of the metric without a sign: ``0.5 points`` for a share."""
    return f"{100 * value:g} points" if share else f"{value:g}"


def count(number: int, noun: str) -> str:
    """Format a count: ``1 seed``, ``2,000 seeds``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
