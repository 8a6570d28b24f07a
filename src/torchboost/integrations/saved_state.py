"""What a trainer keeps of a boosted training: its state in a checkpoint, and what the trial chose, for loggers."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchboost.calibration.choice import Choice
from torchboost.core.files import write_whole
from torchboost.front import Boosted

__all__ = ["figures_of", "load_state", "save_state", "warn_of_missing_state"]


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state completely or not at all.

    Raises:
        OSError: The file cannot be written.
    """
    data = io.BytesIO()
    torch.save(dict(state), data)
    write_whole(path, data.getvalue())


def load_state(path: Path, boosted: Boosted, log: logging.Logger) -> None:
    """Load a state into a boosted pair. Without a file, warn that the algorithms start again.

    Raises:
        ValueError: The file was written with another level or configuration. Nothing is loaded.
    """
    if path.exists():
        boosted.load_state_dict(torch.load(path, weights_only=True))
    else:
        warn_of_missing_state(boosted, log)


def warn_of_missing_state(boosted: Boosted, log: logging.Logger) -> None:
    """Name the algorithms that start again because a checkpoint does not have their state."""
    counting = [name for name, state in boosted.state_dict()["attached"].items() if state]
    if counting:
        log.warning(
            "the checkpoint was written without torchboost, so these start as in a new run: %s.", ", ".join(counting)
        )


def figures_of(choice: Choice) -> dict[str, float]:
    """Return each lever as 1 or 0, how many times as fast a step is, if known, and the seconds of the trial."""
    figures = {f"boost/{verdict.lever}": float(verdict.kept) for verdict in choice.verdicts}
    if choice.ratio is not None:
        figures["boost/times_as_fast"] = choice.ratio.mid
    return {**figures, "boost/trial_seconds": choice.seconds if choice.source == "trial" else 0.0}
