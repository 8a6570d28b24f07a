"""Where this process stands among the ranks of a job."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist

__all__ = ["Topology"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Ranks and nodes of the running job; a single process has one of each.

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

    @classmethod
    def current(cls, devices_per_node: int | None = None) -> Topology:
        """Read the default process group, or describe a single process where there is none.

        Args:
            devices_per_node: Ranks per node; by default what the launcher says (``LOCAL_WORLD_SIZE``),
                else all ranks are taken to share one node.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        world_size = dist.get_world_size()
        per_node = devices_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return cls(rank=dist.get_rank(), world_size=world_size, devices_per_node=min(per_node, world_size))
