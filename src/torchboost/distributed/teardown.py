"""The end of a group of ranks: nobody leaves while another still needs it, and no thread is cut off."""

from __future__ import annotations

import gc
from contextlib import suppress
from datetime import timedelta
from time import sleep
from typing import Any

import torch.distributed as dist

__all__ = ["part", "shutdown"]

_LET_GO = 0.1
"""Seconds in which gloo's threads take the interpreter's lock and drop their last tensors; they need microseconds."""


def shutdown() -> None:
    """End this rank's part in the job: wait for all ranks, then destroy the process groups. The last call of a script.

    ``dist.destroy_process_group()`` alone may end in an abort of the process, "terminate called without an active
    exception", after all work is done, on Python before 3.14: a thread of gloo that still drops the tensors of the
    last collective needs the interpreter's lock, and the interpreter is on its way out
    (https://github.com/pytorch/pytorch/issues/190489). A barrier does not help, and FSDP2 keeps the groups alive in
    caches. This waits for these threads.

    Call it where a script ends as it should, on all ranks. After an error of one rank let the process die, so that the
    launcher ends the others: they would wait here until the timeout of the group. Without a process group this does
    nothing.

    Cost: a barrier, a garbage collection and 0.1 s.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # a group that nothing holds any more is joined by its own destructor
    sleep(_LET_GO)


def part(gloo: Any, patience: float) -> None:
    """Wait until all ranks of a ``ProcessGroupGloo`` are done with it; to be called before it is dropped.

    Args:
        gloo: The group.
        patience: Seconds. A rank that leaves alone, after an error of its own, waits for the others only so long.
    """
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=patience)
    with suppress(RuntimeError):
        gloo.barrier(options).wait()
