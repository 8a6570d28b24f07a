"""Separate prefixes in the store through which the ranks of a job find each other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

__all__ = ["own_store"]


def own_store(purpose: str, ranks: Sequence[int]) -> Any:
    """Return a store for a single use by these ranks; the other ranks of the job need not take part.

    The prefix counts how often each rank has called this. ``dist.new_group`` does not serve here: all ranks of the job
    must call it, or it reuses the name of a destroyed group of the same ranks, whose members then find the old
    addresses in the store.

    Args:
        purpose: Keeps uses apart.
        ranks: Global ranks, this one included; each of them must call this in the same order.
    """
    assert dist.group.WORLD is not None
    named = hashlib.sha256(".".join(map(str, ranks)).encode()).hexdigest()[:16]  # a short key for any number of ranks
    within = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    store = within(f"torchboost/{purpose}/{named}", dist.group.WORLD.get_group_store())
    return within(str(store.add(str(dist.get_rank()), 1)), store)
