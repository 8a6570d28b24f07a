"""Ranks and nodes of a job, the place of this process among them, and their common end."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from time import sleep
from typing import Any

import torch.distributed as dist

from torchboost.errors import IncompatibleError

__all__ = ["NodeGroups", "Topology", "part", "shutdown"]

_LET_GO = 0.1
"""Seconds for gloo's threads to take the interpreter's lock and drop their last tensors. They need microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Ranks and nodes of the running job. A single process has one of each.

    Args:
        rank: Index of this process, from 0.
        world_size: Number of processes.
        devices_per_node: Number of processes on one node.
    """

    rank: int = 0
    world_size: int = 1
    devices_per_node: int = 1

    @property
    def nodes(self) -> int:
        """Number of nodes, rounded up when the last one is not full."""
        return -(-self.world_size // self.devices_per_node)

    @property
    def node(self) -> range:
        """The ranks of this node."""
        first = self.rank - self.rank % self.devices_per_node
        return range(first, min(first + self.devices_per_node, self.world_size))

    def check_full(self) -> None:
        """Raise :class:`IncompatibleError` on all ranks unless every node has the same number of ranks.

        A launcher tells each rank about its own node only, so the ranks exchange the numbers: all must call this.
        """
        sizes = [self.devices_per_node]
        if dist.is_available() and dist.is_initialized():
            sizes = [0] * dist.get_world_size()
            dist.all_gather_object(sizes, self.devices_per_node)
        if len(set(sizes)) > 1 or self.world_size % self.devices_per_node:
            numbers = " and ".join(map(str, sorted(set(sizes))))
            raise IncompatibleError(
                f"found nodes of {numbers} ranks, and {self.world_size} ranks in total; start the same number of ranks "
                "on every node, or set common.device_number to a number that divides them all."
            )

    @classmethod
    def current(cls, devices_per_node: int | None = None) -> Topology:
        """Read the default process group, or without one describe a single process.

        Without ``devices_per_node`` the launcher's number (``LOCAL_WORLD_SIZE``) counts, and without that one node.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        world_size = dist.get_world_size()
        per_node = devices_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return cls(rank=dist.get_rank(), world_size=world_size, devices_per_node=min(per_node, world_size))


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """The process groups of this rank: of its node, and of the ranks with its position on each node."""

    inside: dist.ProcessGroup
    across: dist.ProcessGroup

    @classmethod
    def of(cls, topology: Topology) -> NodeGroups:
        """Create both groups. All ranks of the job must call this at the same point.

        Raises:
            IncompatibleError: The nodes do not all have the same number of ranks.
        """
        ranks, per_node = topology.world_size, topology.devices_per_node
        topology.check_full()
        inside, _ = dist.new_subgroups_by_enumeration(
            [list(range(first, first + per_node)) for first in range(0, ranks, per_node)]
        )
        across, _ = dist.new_subgroups_by_enumeration([list(range(i, ranks, per_node)) for i in range(per_node)])
        assert isinstance(inside, dist.ProcessGroup)
        assert isinstance(across, dist.ProcessGroup)
        return cls(inside, across)


def shutdown() -> None:
    """Wait for all ranks, then destroy the process groups. Make this the last call of a script.

    On Python before 3.14 ``dist.destroy_process_group()`` alone may abort the process after all work is done, with
    "terminate called without an active exception": a thread of gloo that still drops the tensors of the last collective
    needs the interpreter's lock while the interpreter shuts down
    (https://github.com/pytorch/pytorch/issues/190489). If a ``DistributedDataParallel`` outlives the group, its
    destructor may join such a thread while it holds the lock, and the process hangs. This function waits for them.

    Call it on all ranks at the normal end of a script. After an error on one rank let the process exit, so that the
    launcher ends the others. Without a process group this function does nothing. Cost: a barrier, a garbage collection
    and 0.1 s.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # a group without references joins its threads in its destructor
    sleep(_LET_GO)


def part(gloo: Any, patience: float) -> None:
    """Wait, at most ``patience`` seconds, until all ranks of a ``ProcessGroupGloo`` are done with it, to drop it."""
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=patience)
    with suppress(RuntimeError):
        gloo.barrier(options).wait()
