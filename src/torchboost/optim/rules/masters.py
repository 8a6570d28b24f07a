"""Masters: float32 copies of weights in low precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torchboost.core.torch_private import foreach, memory_stamp, sparse_rows
from torchboost.distributed.agreement import local_part
from torchboost.errors import IncompatibleError
from torchboost.optim.tensors import Batch, is_rows

LOW_PRECISION = (torch.float16, torch.bfloat16)

IN_CACHE = 2**17
"""Entries that are updated together on the CPU: half a megabyte per tensor of the update, which fits into the cache."""

PIECE = 2**22
"""Entries whose gradients are widened together: 16 MiB, unless one tensor is larger."""


def has_master(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether the update works on a float32 master of the parameter."""
    return bool(group.get("master_weights")) and param.dtype in LOW_PRECISION


def check_narrow(param: Tensor, state: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Refuse a state that cannot update a parameter of low precision as it is: with float32 entries of its shape."""
    entries = {key: state.get(key) for key in keys if key != "step"}  # a count, always in float32
    tensors = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
    wide = [key for key, value in tensors.items() if value.dtype is torch.float32 and value.shape == param.shape]
    if wide:
        raise IncompatibleError(
            f"found {', '.join(wide)} in float32 for a parameter in {param.dtype} that would now be updated as it is; "
            "keep 'master_weights' and the precision of the model as they were."
        )


def widened(value: Any) -> Any:
    """Return a low-precision tensor in float32, and any other value unchanged."""
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW_PRECISION else value


class Stamps:
    """Write masters into their parameters, and detect writes to a parameter since then, as by a broadcast.

    torch counts the writes to a tensor, but not writes through ``param.data``. These are not detected until the state
    is next loaded or copied.
    """

    def __init__(self) -> None:
        self._seen: dict[Tensor, tuple[int, int]] = {}

    def note(self, param: Tensor) -> None:
        """Record that parameter and master now hold the same values."""
        if not torch.compiler.is_compiling():
            self._seen[param] = memory_stamp(param)

    def current(self, param: Tensor, master: Tensor) -> Tensor:
        """Return the master, or if the parameter was written to, a new one with the entries that were written."""
        if torch.compiler.is_compiling() or self._seen.get(param) == memory_stamp(param):
            return master
        near = param.detach().to(master.device)
        return torch.where(master.to(near.dtype) == near, master.float(), near.float())

    def write_back(self, group: Mapping[str, Any], batch: Batch) -> None:
        """Round the masters of a batch into their parameters: all entries, or the rows of a sparse gradient."""
        params = [param for param in group["params"] if param.grad is not None]
        worked = [entry for entry in zip(params, batch.params, batch.grads, strict=True) if entry[1] is not entry[0]]
        pairs = [(param, master) for param, master, grad in worked if not is_rows(grad)]
        for param, master, grad in worked:
            if is_rows(grad):
                rows = sparse_rows(grad)
                param.index_copy_(0, rows, master.index_select(0, rows).to(param.dtype))
        if pairs:
            foreach.copy_([local_part(param) for param, _ in pairs], [local_part(master) for _, master in pairs])
        for param in params:
            if has_master(param, group):
                self.note(param)


def pieces(batch: Batch, limit: int | None = None) -> Iterator[Batch]:
    """Yield a batch in parts in the precision of the update. Each is valid until the next one is requested.

    On the CPU a part has ``limit`` entries, or one tensor more. None makes parts only to cast tensors.
    """
    near = limit is not None and all(param.device.type == "cpu" for param in batch.params)
    low = not set(LOW_PRECISION).isdisjoint(map(attrgetter("dtype"), batch.grads))
    if not near and not (low and any("master" in state for state in batch.states)):
        yield batch
        return
    size = limit if near and limit is not None else PIECE
    start = entries = 0
    for stop, param in enumerate(batch.params, 1):
        entries += param.numel()
        if entries < size and stop < len(batch.params):
            continue
        part = batch.select(range(start, stop))
        pairs = zip(part.grads, part.states, strict=True)
        part.grads[:] = [widened(grad) if "master" in state else grad for grad, state in pairs]
        yield part
        part.grads.clear()  # before the next part is made
        start, entries = stop, 0
