"""Measurements in a process of their own, which may crash or hang."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import pytest

processes = importlib.import_module("processes")

WITH_A_CHILD = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


def is_running(process: str) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the state of a process is read from /proc")
def test_a_process_that_takes_too_long_is_killed_with_its_children(tmp_path: Path):
    file = tmp_path / "started"
    assert processes.run_within(2.0, [sys.executable, "-c", WITH_A_CHILD, str(file)], {}) is None
    child = file.read_text()
    for _ in range(100):
        if not is_running(child):
            break
        time.sleep(0.1)
    assert not is_running(child)
    assert processes.outcome(None, 2.0) == "did not end in 2 seconds"


@pytest.mark.parametrize(
    ("code", "said"),
    [("", ""), ("raise SystemExit(2)", "ended with status 2"), ("import os; os.abort()", "crashed with SIGABRT")],
)
def test_how_a_process_ended(code: str, said: str):
    assert processes.outcome(processes.run_within(60, [sys.executable, "-c", code], {}), 60) == said
