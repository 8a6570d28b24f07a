"""A process of its own for a measurement that may crash or hang. Imports nothing that takes time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence


def run_within(seconds: float, command: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Run a command and return its status; None if it did not end in time. It is then killed, with what it started."""
    process = subprocess.Popen(command, env=dict(environment), start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def outcome(status: int | None, seconds: float) -> str:
    """Return how a process ended that had so many seconds; empty if all went well."""
    if status is None:
        return f"did not end in {seconds:,.0f} seconds"
    if status < 0:
        return f"crashed with {signal.Signals(-status).name}"
    return f"ended with status {status}" if status else ""
