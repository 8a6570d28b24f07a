"""Shut down a group of ranks: no rank leaves while another needs it, and no thread is cut off."""

from __future__ import annotations

import gc
from contextlib import suppress
from datetime import timedelta
from time import sleep
from typing import Any

import torch.distributed as dist

__all__ = ["part", "shutdown"]

_LET_GO = 0.1
"""Seconds for gloo's threads to take the interpreter's lock and drop their last tensors; they need microseconds."""


def shutdown() -> None:
    """Wait for all ranks, then destroy the process groups. Make this the last call of a script.

    On Python before 3.14 ``dist.destroy_process_group()`` alone may abort the process after all work is done, with
    "terminate called without an active exception": a thread of gloo that still drops the tensors of the last collective
    needs the interpreter's lock while the interpreter shuts down
    (https://github.com/pytorch/pytorch/issues/190489). A barrier does not help, and FSDP2 keeps the groups alive in
    caches. This function waits for these threads.

    Call it on all ranks at the normal end of a script. After an error on one rank let the process exit, so that the
    launcher ends the others; here they would wait until the timeout of the group. Without a process group this
    function does nothing.

    Cost: a barrier, a garbage collection and 0.1 s.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # the destructor of a group that is no longer referenced joins its threads
    sleep(_LET_GO)


def part(gloo: Any, patience: float) -> None:
    """Wait until all ranks of a ``ProcessGroupGloo`` are done with it; call this before it is dropped.

    Args:
        gloo: The group.
        patience: Longest wait in seconds, for a rank that leaves alone after an error.
    """
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=patience)
    with suppress(RuntimeError):
        gloo.barrier(options).wait()
