"""Values that all ranks of the default group share, so that they decide the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

__all__ = ["from_first_rank", "is_first_rank", "mean_over_ranks", "ranks_of_shards", "several"]

T = TypeVar("T")


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean of a number over the ranks; without a group, the number.

    Args:
        value: Of shape ``()``, on a device that the group's backend serves; not changed.

    Cost: one all-reduce of a number, and one synchronisation.
    """
    if not several():
        return float(value)
    shared = value.detach().double().clone()
    dist.all_reduce(shared)
    return float(shared) / dist.get_world_size()


def from_first_rank(value: T) -> T:
    """Return the value of the first rank, which can be pickled; without a group, the value itself."""
    if not several():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def is_first_rank() -> bool:
    """Return whether this process is the first rank, or the only one."""
    return not several() or dist.get_rank() == 0


def ranks_of_shards(tensors: Iterable[Tensor]) -> list[int]:
    """Return the ranks over which FSDP2 shards any of these tensors, in order; empty if it shards none."""
    meshes = {id(mesh): mesh.mesh for t in tensors if (mesh := getattr(t, "device_mesh", None)) is not None}
    return sorted({rank for mesh in meshes.values() for rank in mesh.flatten().tolist()})


def several() -> bool:
    """Return whether the process is a rank of a group."""
    return dist.is_available() and dist.is_initialized()
