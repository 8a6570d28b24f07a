"""What a trial chose, as figures for a trainer's loggers."""

from __future__ import annotations

from torchboost.calibration.choice import Choice

__all__ = ["figures_of"]


def figures_of(choice: Choice) -> dict[str, float]:
    """Return each lever as 1 or 0, how many times as fast a step is, if known, and the seconds of the trial."""
    figures = {f"boost/{verdict.lever}": float(verdict.kept) for verdict in choice.verdicts}
    if choice.ratio is not None:
        figures["boost/times_as_fast"] = choice.ratio.mid
    return {**figures, "boost/trial_seconds": choice.seconds if choice.source == "trial" else 0.0}
