"""What a tuning found, in words."""

from __future__ import annotations

import math

from torchboost.measure.evidence import Interval
from torchboost.tuning.evidence import Finding, TuneReport

__all__ = ["HEADINGS", "cost", "headline", "horizon", "notes", "rows"]


HEADINGS = ("candidate", "outcome", "speed", "memory", "metric against stock", "seeds", "why")


def headline(report: TuneReport) -> str:
    """Return the answer in one sentence, or how far the tuning came."""
    if report.state != "complete":
        return f"Not finished: {len(report.runs)} runs in {report.spent_seconds:.0f} s; continue with --resume."
    recipes = "".join(_of_recipe(found) for found in report.findings if found.candidate.recipe)
    return _answer(report) + recipes


def _of_recipe(found: Finding) -> str:
    if found.outcome != "kept" or found.speed is None:
        return ""
    return f" The recipe {found.candidate.name} keeps the metric in {1 / found.speed.mid:.0%} of the time."


def _answer(report: TuneReport) -> str:
    proven = proven_whole(report)
    if proven is not None:
        gain = "" if proven.speed is None else f" A training then takes {1 / proven.speed.mid:.0%} of the time."
        return f"Turn on {proven.candidate.name}.{gain}"
    if any(found.outcome == "kept" and not found.candidate.recipe for found in report.findings):
        reason = report.whole[-1].reason if report.whole else "it was not tried"
        return f"Nothing is turned on: what passed alone was not shown to keep the metric in the final test ({reason})."
    return f"Nothing is turned on: no candidate was shown to save time and keep the metric within {report.drop:g}."


def cost(report: TuneReport) -> str:
    """Return what the answer costs in the metric; empty if nothing is turned on."""
    proven = proven_whole(report)
    if proven is None or proven.difference is None:
        return ""
    change = proven.difference
    return (
        f"The metric changes by {change.mid:+.2g}, at worst {change.low:+.2g} at {change.confidence:.1%} confidence, "
        f"over {proven.seeds} seeds; {report.drop:g} was accepted."
    )


def proven_whole(report: TuneReport) -> Finding | None:
    """Return the final test that passed; None without one."""
    return next((found for found in reversed(report.whole) if found.outcome == "kept"), None)


def horizon(report: TuneReport) -> str:
    """Return for which runs the answer holds, and what it could have seen."""
    seen = [found.detectable for found in report.findings if found.detectable is not None]
    power = f" The tests could see a drop of {max(seen):.3g} beyond the accepted one." if seen else ""
    return (
        f"Runs of {report.steps:,} steps, at most {report.most_seeds} seeds; the answer is for {report.total_steps:,} "
        f"steps. A drop that only shows later in a longer run cannot be seen.{power}"
    )


def notes(report: TuneReport) -> list[str]:
    """Return what else a reader must know: which levers were no candidates, and the notes of the tuning."""
    left_out = "; ".join(f"{name} ({reason})" for name, reason in report.left_out.items())
    said = [f"The trial of the levers left out {left_out}"] if left_out else []
    return [f"{note}." for note in (*said, *report.notes)]


def rows(report: TuneReport) -> list[list[str]]:
    """Return a line of text per candidate and final test."""
    lines = [_row(found, found.candidate.name) for found in report.findings]
    for found in report.whole:
        reason = f"{found.candidate.name}: {found.reason}"
        lines.append(_row(found.model_copy(update={"reason": reason}), "together"))
    return lines


def _row(found: Finding, name: str) -> list[str]:
    speed = "" if found.speed is None else f"{found.speed.mid:.2f}x"
    memory = "" if found.memory is None else f"{found.memory:.2f}x"
    shown = interval(found.difference)
    return [name, found.outcome or "open", speed, memory, shown, str(found.seeds or ""), found.reason]


def interval(found: Interval | None) -> str:
    """Return a difference with its bounds."""
    if found is None or not math.isfinite(found.mid):
        return ""
    return f"{found.mid:+.4f} ({found.low:+.4f} to {found.high:+.4f})"
