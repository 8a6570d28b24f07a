"""Float32 copies ("masters") of low-precision parameters: which parameters have one, and whether it is current."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchboost.core.torch_private import memory_stamp

if TYPE_CHECKING:
    from torchboost.optim.rules.base import Batch

__all__ = ["IN_CACHE", "LOW_PRECISION", "Stamps", "has_master", "pieces", "widened"]

LOW_PRECISION = (torch.float16, torch.bfloat16)

IN_CACHE = 2**17
"""Entries that are updated together on the CPU: half a megabyte per tensor of the update, which fits into the cache."""

PIECE = 2**22
"""Entries whose gradients are widened together: 16 MiB, unless one tensor is larger."""


def has_master(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether the update works on a float32 master of the parameter."""
    return bool(group.get("master_weights")) and param.dtype in LOW_PRECISION


def widened(value: Any) -> Any:
    """Return a low-precision tensor in float32, and any other value unchanged."""
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW_PRECISION else value


class Stamps:
    """Detect writes to a parameter after its master was last updated: by ``load_state_dict``, by hand, by a broadcast.

    torch counts the writes to a tensor, but not those through ``param.data``. These are not detected until the state is
    next loaded or copied.
    """

    def __init__(self) -> None:
        self._seen: dict[Tensor, tuple[int, int]] = {}

    def note(self, param: Tensor) -> None:
        """Record that parameter and master now hold the same values."""
        if not torch.compiler.is_compiling():
            self._seen[param] = memory_stamp(param)

    def known(self, param: Tensor) -> bool:
        """Whether the parameter has not changed since :meth:`note`."""
        return torch.compiler.is_compiling() or self._seen.get(param) == memory_stamp(param)

    def current(self, param: Tensor, master: Tensor) -> Tensor:
        """Return the master, with entries taken from the parameter if they are no longer the rounded master.

        Entries that were not written keep the precision of the master. Cost: nothing if nothing was written, otherwise
        a new master.
        """
        if self.known(param):
            return master
        near = param.detach().to(master.device)
        return torch.where(master.to(near.dtype) == near, master.float(), near.float())


def pieces(batch: Batch, limit: int | None = None) -> Iterator[Batch]:
    """Yield a batch in parts, with gradients cast to the precision of the updated tensors one part at a time.

    A part is valid until the next one is requested.

    Args:
        batch: The tensors to update.
        limit: Entries per part on the CPU; a part may exceed it by one tensor. None makes parts only to cast gradients.
    """
    near = limit is not None and all(param.device.type == "cpu" for param in batch.params)
    low = []
    if not set(LOW_PRECISION).isdisjoint(map(attrgetter("dtype"), batch.grads)):
        low = [s for s, g in zip(batch.states, batch.grads, strict=True) if g.dtype in LOW_PRECISION]
    if not near and not any("master" in state for state in low):
        yield batch
        return
    start = entries = 0
    most = limit if near and limit is not None else PIECE
    for stop, param in enumerate(batch.params, 1):
        entries += param.numel()
        if entries >= most or stop == len(batch.params):
            part = slice(start, stop)
            grads = [
                widened(g) if "master" in s else g for g, s in zip(batch.grads[part], batch.states[part], strict=True)
            ]
            yield type(batch)(batch.params[part], grads, batch.states[part])
            grads.clear()  # before the next piece is made
            start, entries = stop, 0
