"""Agreement of ranks that train one model together: shared values, equal steps, equal states."""

from __future__ import annotations

import hashlib
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchboost.core.torch_private import lazy_gloo
from torchboost.distributed.topology import part
from torchboost.errors import RankDisagreementError

T = TypeVar("T")

_POLL = 0.02
"""Seconds before the second look at which ranks arrived. Each later one waits twice as long."""
_PACKET = 16
"""Numbers of the first message of an exchange. Two of them identify the exchange."""
_WORD = 62
"""Ranks that one number in the store tells of."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Agreement:
    """Compare a few integers that must be equal on several ranks, over a separate gloo group.

    The group works alongside NCCL and never mixes with the collectives of the training. If a rank does not arrive, an
    error is raised after ``timeout`` seconds on every rank that is alive, long before the timeout of the training's
    group. Each of the global ``ranks`` must construct this object, and several of them in the same order. Error
    messages begin with ``subject``.

    Raises:
        RankDisagreementError: Not all ranks built it in time.

    Cost: per rank ``log2 n`` messages of 128 bytes for each :meth:`check`, over ``2 log2 n`` connections, and as many
    again if there are more than 7 figures. If ranks differ, another exchange of 8 bytes per figure and rank tells how.
    If one is missing, each other rank reads a number per 62 ranks from the store, a few times. See
    ``docs/distributed.md``.
    """

    def __init__(self, ranks: Sequence[int], *, subject: str, timeout: float = 30.0) -> None:
        self._ranks = sorted(ranks)
        self._subject = subject
        self._timeout = timeout
        # The rest of the time is for finding out which ranks are missing.
        self._wait = timeout - min(5.0, timeout / 4)
        self._calls = 0
        # Holds one ProcessGroupGloo, which torch's stubs hardly cover, until this is closed or the process exits:
        # its threads must have dropped their tensors before the interpreter ends, see ``topology.shutdown``.
        self._groups: list[Any] = []
        weakref.finalize(self, self._groups.clear)
        self._rank = dist.get_rank()
        self._at = self._ranks.index(self._rank)
        try:
            self._store = own_store("agreement", self._ranks)
            self._groups.append(lazy_gloo(self._store, self._at, len(ranks), self._wait))
            self._exchange(torch.zeros(1, device="cpu"))
        except RuntimeError as error:
            raise RankDisagreementError(
                f"{subject}: ranks {_listed(self._ranks)} train together, but not all of them started within "
                f"{self._wait:.0f} s (this is rank {self._rank}); attach on all of them."
            ) from error

    def check(self, figures: Mapping[str, int], *, hint: str) -> None:
        """Compare ``figures`` of 64 bits over the ranks. All ranks must call this with the same names.

        Raises:
            RankDisagreementError: They differ, which ``hint`` explains, or a rank did not arrive or compares other
                things. Raised on every rank that is alive.
        """
        mine = torch.tensor(list(figures.values()), dtype=torch.int64, device="cpu")
        largest = self._largest(torch.cat([mine, ~mine]), figures)
        if torch.equal(largest[: len(mine)], ~largest[len(mine) :]):
            return
        rows = torch.full((len(self._ranks), len(mine)), torch.iinfo(torch.int64).min, device="cpu")
        rows[self._at] = mine
        rows = self._largest(rows, figures)
        columns = {name: column.tolist() for name, column in zip(figures, rows.T, strict=True)}
        different = [f"{name} is {_by_value(self._ranks, of)}" for name, of in columns.items() if len(set(of)) > 1]
        same = [f"{name} {of[0]}" for name, of in columns.items() if len(set(of)) == 1]
        alike = f" ({', '.join(same)} on all)" if same else ""
        raise RankDisagreementError(f"{self._subject}: the ranks disagree: {'; '.join(different)}{alike}. {hint}")

    def largest(self, numbers: Sequence[float], *, step: str) -> list[float]:
        """Return for each number, which may be infinite, the largest one of all ranks, which all must call this.

        Raises:
            RankDisagreementError: A rank did not arrive, or has another ``step`` or another number of them. Raised on
                every rank that is alive.
        """
        mine = torch.tensor(list(numbers), dtype=torch.float64, device="cpu")
        return self._largest(mine, {step: self._calls}).tolist()

    def close(self) -> None:
        """Free the group. All ranks must call this. A second call does nothing."""
        if self._groups:
            part(self._groups.pop(), min(5.0, self._wait))

    def _largest(self, mine: Tensor, figures: Mapping[str, int]) -> Tensor:
        """Return the largest of each entry over the ranks."""
        if not self._groups:
            raise RankDisagreementError(f"{self._subject}: the ranks disagreed earlier; restart the job.")
        self._calls += 1
        started = monotonic()
        result = cause = None
        try:
            result = self._whole(mine, zlib.crc32(repr([mine.shape, *figures]).encode()))
        except RuntimeError as error:
            cause = error.with_traceback(None)  # its frames hold the group, whose end closes the connections
        if cause is not None:
            self._groups.pop().abort()  # closes the connections, so that ranks which wait for this one fail at once
            raise RankDisagreementError(self._absent(figures, started)) from cause
        if result is None:
            raise RankDisagreementError(
                f"{self._subject}: the ranks compare different things; rank {self._rank} has {mine.numel()} numbers of "
                f"{', '.join(figures)}. Give all ranks the same settings."
            )
        return result

    def _whole(self, mine: Tensor, mark: int) -> Tensor | None:
        """Exchange one packet of a fixed size, which gloo needs, then the rest. None if the ranks' marks differ."""
        numbers = mine.flatten()
        first, rest = numbers[: _PACKET - 2], numbers[_PACKET - 2 :]
        packet = torch.cat([mine.new_tensor([mark, -mark]), first, mine.new_zeros(_PACKET - 2 - len(first))])
        packet = self._exchange(packet)
        if packet[0] != -packet[1]:
            return None
        rest = self._exchange(rest) if len(rest) else rest
        return torch.cat([packet[2 : 2 + len(first)], rest]).view_as(mine)

    def _exchange(self, numbers: Tensor) -> Tensor:
        """Combine with the ranks 1, 2, 4, ... places before. After the last exchange every rank knows of all."""
        group, ranks, step = self._groups[0], len(self._ranks), 1
        deadline = monotonic() + self._wait
        while step < ranks:
            theirs = torch.empty_like(numbers)
            sent = group.send([numbers], (self._at + step) % ranks, 0)
            received = group.recv([theirs], (self._at - step) % ranks, 0)
            for work in (received, sent):
                work.wait(timedelta(seconds=max(_POLL, deadline - monotonic())))
            numbers, step = torch.maximum(numbers, theirs), 2 * step
        return numbers

    def _absent(self, figures: Mapping[str, int], started: float) -> str:
        """Name the ranks that did not arrive: those that do not answer in the store."""
        missing: list[int] = []
        had = ", ".join(f"{name} {value}" for name, value in figures.items()) or "the same call"
        try:
            self._here(1 << self._at % _WORD, self._at // _WORD)
            # Ranks that are alive fail within the same wait, and answer.
            deadline, pause = monotonic() + 0.8 * (self._timeout - self._wait), _POLL
            while (missing := self._silent()) and monotonic() < deadline:
                sleep(min(pause, max(0.0, deadline - monotonic())))
                pause *= 2
        except RuntimeError:
            who = "the process that holds the store (rank 0, unless a launcher does) has ended, perhaps others too"
        else:
            # One that arrived, but has not yet noticed, is silent too.
            who = f"{'at least one of ' if len(missing) > 1 else ''}{_listed(missing, 'rank')} did not arrive"
            who = who if missing else "the others stopped waiting for this one"
        return (
            f"{self._subject}: {who} ({had} on rank {self._rank}; ranks {_listed(self._ranks)} train together, waited "
            f"{monotonic() - started:.1f} s). Look at the first error of that rank; if one rank works alone for "
            "longer, raise the timeout."
        )

    def _silent(self) -> list[int]:
        """Return the ranks that have not told in the store that this call failed."""
        words = [self._here(0, word) for word in range(-(-len(self._ranks) // _WORD))]
        return [rank for at, rank in enumerate(self._ranks) if not words[at // _WORD] >> at % _WORD & 1]

    def _here(self, bit: int, word: int) -> int:
        return self._store.add(f"{self._calls}/{word}", bit)


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean of a tensor of shape ``()`` over the ranks, or without a group its number.

    Cost: one all-reduce of a number, and one synchronisation.
    """
    if not several():
        return float(value)
    shared = value.detach().double().clone()
    dist.all_reduce(shared)
    return float(shared) / dist.get_world_size()


def from_first_rank(value: T) -> T:
    """Return the value of the first rank, which can be pickled, or without a group the value itself."""
    if not several():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def ranks_of_shards(tensors: Iterable[Tensor]) -> list[int]:
    """Return the ranks over which FSDP2 shards any of these tensors, in order, or an empty list."""
    meshes = {id(mesh): mesh.mesh for t in tensors if (mesh := getattr(t, "device_mesh", None)) is not None}
    return sorted({rank for mesh in meshes.values() for rank in mesh.flatten().tolist()})


def several() -> bool:
    """Return whether the process is a rank of a group."""
    return dist.is_available() and dist.is_initialized()


def own_store(purpose: str, ranks: Sequence[int]) -> Any:
    """Return a store for a single use by these ranks. The other ranks of the job need not take part.

    Each of them must call this in the same order: the prefix counts the calls. ``dist.new_group`` does not serve here:
    all ranks of the job must call it, or it reuses the name of a destroyed group of the same ranks, whose members then
    find the old addresses in the store.
    """
    assert dist.group.WORLD is not None
    named = hashlib.sha256(".".join(map(str, ranks)).encode()).hexdigest()[:16]  # a short key for any number of ranks
    within = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    store = within(f"torchboost/{purpose}/{named}", dist.group.WORLD.get_group_store())
    return within(str(store.add(str(dist.get_rank()), 1)), store)


def first_holder(state: Any, shards: Sequence[int]) -> int:
    """Return the lowest rank that holds the same state as this one. All ranks must call this.

    ``shards`` are the ranks over which one such state is sharded, in order. Cost: one read of the state, and an
    all-gather of about 130 bytes per rank. Tensors are compared by the sum of their bits.
    """
    mine = hashlib.sha256(repr(_portrait(state)).encode()).hexdigest()
    figures: list[Any] = [None] * dist.get_world_size()
    step = shards[1] - shards[0] if len(shards) > 1 else 1
    short = range(shards[0], shards[-1] + 1, step)  # of any length in a few bytes
    dist.all_gather_object(figures, (mine, short if list(short) == list(shards) else tuple(shards)))
    whole = {ranks: [figures[rank][0] for rank in ranks] for _, ranks in set(figures)}
    own = whole[figures[dist.get_rank()][1]]
    return next(rank for rank, (_, ranks) in enumerate(figures) if whole[ranks] == own)


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of a tensor, or of this rank's shard, as int64: the same number on any device."""
    numbers = local_part(tensor).detach().contiguous().reshape(-1)
    if not numbers.numel():
        return torch.zeros((), dtype=torch.int64, device=numbers.device)
    return numbers.view(_BITS[numbers.element_size()]).sum(dtype=torch.int64)


def _portrait(value: Any) -> Any:
    """Return a state with tensors replaced by their kind, their shape and the sum of their bits."""
    if isinstance(value, Tensor):
        local = local_part(value)
        return local.dtype, tuple(local.shape), int(bit_sum(local))
    if isinstance(value, Mapping):
        return {key: _portrait(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return list(map(_portrait, value))
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore


def _listed(ranks: Sequence[int], noun: str = "") -> str:
    text = ", ".join(map(str, ranks))
    return text if not noun else f"{noun}{'s' if len(ranks) > 1 else ''} {text}"


def _by_value(ranks: Sequence[int], values: Sequence[int]) -> str:
    """``3 on ranks 0, 2 and 5 on rank 1``."""
    return " and ".join(
        f"{value} on {_listed([r for r, v in zip(ranks, values, strict=True) if v == value], 'rank')}"
        for value in dict.fromkeys(values)
    )
