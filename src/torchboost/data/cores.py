"""How many processors this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["cpu_quota", "usable_cores"]

_GROUPS = Path("/sys/fs/cgroup")


def usable_cores(groups: Path = _GROUPS) -> float:
    """Return the processors that this process may use: by its affinity, and by the CPU quota of its container.

    With several ranks on a machine (``LOCAL_WORLD_SIZE``, as torchrun sets it) each gets an equal part.
    """
    try:
        allowed: float = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        allowed = os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return min(allowed, cpu_quota(groups)) / (max(int(ranks), 1) if ranks.isdigit() else 1)


def cpu_quota(groups: Path = _GROUPS) -> float:
    """Return the quota in processors, of version 2 or 1 of control groups; infinite if there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError, ZeroDivisionError):
        limit, period = (groups / "cpu.max").read_text(encoding="ascii").split()[:2]
        return float("inf") if limit == "max" else int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        limit, period = ((groups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else float("inf")
    return float("inf")
