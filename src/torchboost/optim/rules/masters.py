"""Low-precision parameters that are updated in float32: on a float32 copy ("master"), or with stochastic rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor

from torchboost.core.torch_private import memory_stamp
from torchboost.errors import IncompatibleError
from torchboost.optim.rules.batch import Batch

__all__ = [
    "IN_CACHE",
    "LOW_PRECISION",
    "PIECE",
    "MasterWeights",
    "Stamps",
    "check_narrow",
    "has_master",
    "is_rounded",
    "local",
    "parts",
    "pieces",
    "rounded_pieces",
    "rows_widened",
    "stochastic",
    "stochastically_rounded",
    "widened",
]

MasterWeights = bool | Literal["stochastic"]

LOW_PRECISION = (torch.float16, torch.bfloat16)

IN_CACHE = 2**17
"""Entries that are updated together on the CPU: half a megabyte per tensor of the update, which fits into the cache."""

PIECE = 2**22
"""Entries whose gradients are widened together: 16 MiB, unless one tensor is larger."""


def has_master(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether the update works on a float32 master of the parameter."""
    return bool(group.get("master_weights")) and not stochastic(group) and param.dtype in LOW_PRECISION


def stochastic(group: Mapping[str, Any]) -> bool:
    """Whether the group has ``master_weights="stochastic"``."""
    return group.get("master_weights") == "stochastic"


def is_rounded(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether the update works in float32 without a master, and rounds the new weights stochastically.

    Raises:
        IncompatibleError: The group asks for it, and the parameter is in float16.
    """
    if not stochastic(group) or param.dtype not in LOW_PRECISION:
        return False
    if param.dtype is not torch.bfloat16:
        raise IncompatibleError(
            f"master_weights='stochastic' is for bfloat16, found a parameter in {param.dtype} of shape "
            f"{tuple(param.shape)}. Use master_weights=True for it."
        )
    return True


def check_narrow(param: Tensor, state: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Check that entries of the state can update a parameter of low precision as it is.

    Raises:
        IncompatibleError: One of its shape is in float32.
    """
    held = {key: state.get(key) for key in keys if key != "step"}  # a count, always in float32
    wide = [key for key, value in held.items() if isinstance(value, Tensor) and _is_wide(value, param)]
    if wide:
        raise IncompatibleError(
            f"found {', '.join(wide)} in float32 for a parameter in {param.dtype} that would now be updated as it is; "
            "keep 'master_weights' and the precision of the model as they were."
        )


def _is_wide(value: Tensor, param: Tensor) -> bool:
    return value.dtype is torch.float32 and value.shape == param.shape


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


def rows_widened(grad: Tensor | None) -> Tensor | None:
    """Return sparse rows in float32, so that merging them loses less; dense gradients are cast later."""
    return widened(grad) if grad is not None and grad.is_sparse else grad


def parts(batch: Batch, limit: int) -> Iterator[Batch]:
    """Yield a batch in parts of ``limit`` entries; a part may exceed it by one tensor."""
    start = entries = 0
    for stop, param in enumerate(batch.params, 1):
        entries += param.numel()
        if entries >= limit or stop == len(batch.params):
            part = slice(start, stop)
            yield type(batch)(batch.params[part], batch.grads[part], batch.states[part])
            start, entries = stop, 0


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
    for part in parts(batch, limit if near and limit is not None else PIECE):
        part.grads[:] = [widened(g) if "master" in s else g for g, s in zip(part.grads, part.states, strict=True)]
        yield part
        part.grads.clear()  # before the next piece is made


def rounded_pieces(batch: Batch, seed: int, limit: int | None = None) -> Iterator[Batch]:
    """Yield a batch in parts in float32, and round each part's new weights when the next part is requested.

    The same seed rounds the same way, so that all ranks get the same weights, and a resumed run those of one that was
    not interrupted.

    Args:
        batch: The tensors to update.
        seed: At least 0.
        limit: Entries per part; a part may exceed it by one tensor.
    """
    noise: dict[torch.device, torch.Generator] = {}
    for part in parts(batch, limit or PIECE):
        wide = list(map(widened, part.params))
        yield type(batch)(wide, list(map(widened, part.grads)), part.states)
        for own, new in zip(part.params, wide, strict=True):
            if new is not own:
                if own.device not in noise:
                    noise[own.device] = torch.Generator(own.device).manual_seed(seed)
                local(own).copy_(stochastically_rounded(local(new), noise[own.device]))


def stochastically_rounded(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return float32 values in bfloat16, each rounded to one of its two neighbours, the nearer one more often.

    The mean over many roundings is the value. Infinities and nan stay as they are.
    Cost: one random number per value, and three temporary tensors of the size of ``values``.

    Args:
        values: Float32.
        generator: On the device of the values; None for torch's own.
    """
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = values.contiguous().view(torch.int32)
    near = noise.add_(bits).bitwise_and_(-(2**16)).view(torch.float32)
    return torch.where(values.isfinite(), near, values).to(torch.bfloat16)


def local(tensor: Tensor) -> Tensor:
    """Return the shard of a sharded tensor that this rank holds, and any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
