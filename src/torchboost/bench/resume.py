"""Whether a saved report belongs to the measurement that would continue it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["check_same"]

ENVIRONMENT = ("torch", "torchboost", "processor", "instructions", "device", "threads")


def check_same(path: Path, saved: Any, now: Any, names: Sequence[str], history: str) -> None:
    """Check that two reports agree about some attributes and about their environment.

    Args:
        path: File of the saved report.
        saved: A report with an ``environment``. An old one may not tell its vector instructions.
        now: The report that would be made.
        names: Attributes of reports.
        history: What the file was, such as ``"was made with"``.

    Raises:
        ValueError: They disagree.
    """
    environment = [name for name in ENVIRONMENT if name != "instructions" or saved.environment.instructions]
    pairs = [(name, getattr(saved, name), getattr(now, name)) for name in names]
    pairs += [(name, getattr(saved.environment, name), getattr(now.environment, name)) for name in environment]
    for name, before, after in pairs:
        if before != after:
            raise ValueError(
                f"{path} {history} {name} {before!r}, but now it is {after!r}; they cannot be mixed. Save to another "
                "file, or do not resume."
            )
