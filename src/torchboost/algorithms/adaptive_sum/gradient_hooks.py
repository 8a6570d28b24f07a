"""Adaptive sums of gradients in place of DDP's averages, by a communication hook with its own packs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchboost.algorithms.adaptive_sum.rule import hierarchical_adasum_
from torchboost.core.torch_private import comm_hooks
from torchboost.distributed.topology import NodeGroups
from torchboost.errors import IncompatibleError

__all__ = ["BucketPacks", "Packing", "bucket_packs", "check_no_hook"]


@dataclass(frozen=True, slots=True)
class Packing:
    """Which gradients are combined together, and between which ranks.

    Args:
        places: Parameter -> its position in the model; the same on all ranks.
        pack: Position -> number of its pack; one set of collectives per pack.
        groups: Mean inside, adaptive sum across.
        begin: Called before the first bucket of a backward pass.
        note: Called with the positions in a pack and their cosines.
    """

    places: Mapping[Tensor, int]
    pack: Callable[[int], int]
    groups: NodeGroups
    begin: Callable[[], None]
    note: Callable[[Sequence[int], Tensor], None]


@dataclass(slots=True)
class _Waiting:
    buffer: Tensor
    future: torch.futures.Future[Tensor]
    packs: set[int]


class BucketPacks:
    """The state of the hook: collects the buckets of a backward pass and combines a pack once it is complete.

    DDP has no public record of what is in its buckets, so the first pass collects the parameters and combines them at
    the last bucket. A bucket is returned when all packs of its parameters are done. The collectives run inside the hook
    and do not overlap with the backward pass.

    Args:
        ddp: The model whose buckets are received.
    """

    follows_buckets = True
    """The set of parameters may change between passes, as under freezing: the last bucket combines what has arrived."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.packing: Packing | None = None
        self._group = ddp.process_group
        self._sizes: dict[int, int] = {}
        self._counted: dict[int, int] = {}
        self._arrived: dict[int, list[tuple[int, Tensor]]] = {}
        self._waiting: list[_Waiting] = []

    def switch_off(self) -> None:
        """Average from now on, as DDP does without a hook."""
        self.packing = None
        self._arrived, self._waiting = {}, []

    def receive(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Receive a bucket (``torch.distributed.GradBucket``) and return a future of its combined gradients.

        Without a packing, the gradients are averaged.
        """
        buffer = bucket.buffer()
        packing = self.packing
        if packing is None:
            buffer.div_(dist.get_world_size(self._group))
            work = dist.all_reduce(buffer, group=self._group, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])  # pyright: ignore[reportOptionalMemberAccess]
        if bucket.index() == 0:
            self._counted, self._arrived, self._waiting = {}, {}, []
            packing.begin()
        devices: list[Any] = [] if buffer.device.type == "cpu" else [buffer.device]
        self._waiting.append(_Waiting(buffer, torch.futures.Future(devices=devices), set()))
        for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            place = packing.places.get(param, len(packing.places))
            pack = packing.pack(place)
            self._arrived.setdefault(pack, []).append((place, gradient))
            self._counted[pack] = self._counted.get(pack, 0) + 1
            self._waiting[-1].packs.add(pack)
        future = self._waiting[-1].future
        for pack in sorted(self._arrived, reverse=True):
            if bucket.is_last() or self._counted[pack] == self._sizes.get(pack):
                self._combine(packing, pack)
        self._give_back()
        if bucket.is_last():
            self._sizes = self._counted
        return future

    def _combine(self, packing: Packing, pack: int) -> None:
        # In model order, so the result does not depend on the buckets.
        arrived = sorted(self._arrived.pop(pack), key=lambda entry: entry[0])
        cosines = hierarchical_adasum_([gradient for _, gradient in arrived], packing.groups)
        packing.note([place for place, _ in arrived], cosines)

    def _give_back(self) -> None:
        for waiting in list(self._waiting):
            if waiting.packs.isdisjoint(self._arrived):
                self._waiting.remove(waiting)
                waiting.future.set_result(waiting.buffer)


def bucket_packs(ddp: DistributedDataParallel) -> BucketPacks:
    """Return the state of our hook on ``ddp``; register the hook if there is none yet.

    DDP never drops a hook, so one that was switched off is reused.

    Raises:
        IncompatibleError: DDP has another communication hook.
    """
    for _, state in comm_hooks(ddp):
        if isinstance(state, BucketPacks):
            return state
    check_no_hook(ddp)
    packs = BucketPacks(ddp)
    try:
        # A lambda: DDP compares annotations with classes, and the annotations of this module are strings.
        ddp.register_comm_hook(packs, lambda state, bucket: state.receive(bucket))
    except RuntimeError as error:  # a built-in hook, which only the reducer knows
        comm_hooks(ddp).pop()
        raise IncompatibleError(_ONE_HOOK) from error
    return packs


def check_no_hook(ddp: DistributedDataParallel) -> None:
    """Raise :class:`IncompatibleError` if ``ddp`` has a communication hook that is not ours."""
    if any(not isinstance(state, BucketPacks) for _, state in comm_hooks(ddp)):
        raise IncompatibleError(_ONE_HOOK)


_ONE_HOOK = (
    "DistributedDataParallel already has a communication hook, such as gradient compression, and accepts only one; "
    "build it without that hook, or use on='delta', which needs none."
)
