"""Room in the store through which the ranks of a job find each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

__all__ = ["own_store"]


def own_store(purpose: str, ranks: Sequence[int]) -> Any:
    """Return a part of the job's store for one use by these ranks, whatever the other ranks of the job do.

    It counts how often each rank has asked for the same. ``dist.new_group`` must be called by all ranks of the job, or
    takes the name of a group that was destroyed for another of the same ranks, whose members then find the old
    addresses in the store.

    Args:
        purpose: Keeps uses apart.
        ranks: Global ranks, this one among them; each of them asks in the same order.
    """
    assert dist.group.WORLD is not None
    named = ".".join(map(str, ranks))
    within = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    store = within(f"torchboost/{purpose}/{named}", dist.group.WORLD.get_group_store())
    return within(str(store.add(str(dist.get_rank()), 1)), store)
