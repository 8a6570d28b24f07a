"""Run a script under torchrun in which ranks are killed: ``dying.py PLAN SCRIPT ARGUMENTS...``.

The plan has an entry per start of the ranks, ``RANK:step:K`` or ``RANK:write:K``: the rank kills itself after its
K-th update since that start, or in its K-th write of a checkpoint, when a part of the files is there. Further starts
are left alone. A rank says ``SAID`` before. The script itself knows nothing of it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.optim.optimizer import register_optimizer_step_post_hook

SAID = "this rank is killed"


def _dying_at(count: int) -> Callable[..., None]:
    calls = iter(range(1, count))

    def hook(*_: Any) -> None:
        if next(calls, None) is None:
            print(SAID, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def _arm(entry: str) -> None:
    rank, what, count = entry.split(":")
    if int(rank) != int(os.environ["RANK"]):
        return
    die = _dying_at(int(count))
    if what == "step":
        register_optimizer_step_post_hook(die)
        return
    finish = dcp.FileSystemWriter.write_data

    def write_data(self: Any, *arguments: Any) -> Any:
        written = finish(self, *arguments)
        die()
        return written

    dcp.FileSystemWriter.write_data = write_data


if __name__ == "__main__":
    plan = [entry for entry in sys.argv[1].split(",") if entry]
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if start < len(plan):
        _arm(plan[start])
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
