"""The torchrun helper reports failures with what was written, and leaves no process behind."""

from __future__ import annotations

import os
from time import monotonic, sleep

import pytest

from tests.support.torchrun import TorchrunError, torchrun


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.dist
@pytest.mark.slow
def test_a_script_that_hangs_is_ended_with_its_ranks(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, sys, time\nprint('PID', os.getpid(), sys.argv[1], flush=True)\nassert sys.argv[1] == 'x'\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(TorchrunError, match="did not end within 12 s") as caught:
        torchrun(script, "x", ranks=1, timeout=12)
    pids = [int(line.split()[1]) for line in str(caught.value).splitlines() if line.startswith("PID")]
    assert len(pids) == 1
    deadline = monotonic() + 10
    while not _gone(pids[0]) and monotonic() < deadline:
        sleep(0.05)
    assert _gone(pids[0])


@pytest.mark.dist
def test_a_script_that_fails_is_quoted(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('that is why')\n")
    with pytest.raises(TorchrunError, match=r"(?s)ended with \[1\].*that is why"):
        torchrun(script, ranks=1, timeout=60)
