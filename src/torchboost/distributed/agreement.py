"""Check that ranks which train one model together are at the same step, and name those that are not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from torchboost.distributed.store import own_store
from torchboost.distributed.teardown import part
from torchboost.errors import RankDisagreementError

__all__ = ["Agreement"]

_POLL = 0.02
"""Seconds between two looks at which ranks arrived."""


class Agreement:
    """Compare a few integers that must be equal on several ranks, over a separate gloo group.

    The group works alongside NCCL and never mixes with the collectives of the training. If a rank does not arrive, an
    error is raised after ``timeout`` seconds, long before the timeout of the training's group.

    Args:
        ranks: Global ranks, this one included. Each of them must construct this object; if there are several, in the
            same order.
        subject: What is compared; every error message begins with it.
        timeout: Seconds within which an error is raised on every rank that is alive.

    Raises:
        RankDisagreementError: Not all ranks built it in time.

    Cost: see ``docs/algorithms/grad_freeze.md``; one all-gather of 8 bytes per figure for each :meth:`check`.
    """

    def __init__(self, ranks: Sequence[int], *, subject: str, timeout: float = 30.0) -> None:
        self._ranks = sorted(ranks)
        self._subject = subject
        self._timeout = timeout
        # The rest of the time is for finding out which ranks are missing.
        self._wait = timeout - min(5.0, timeout / 4)
        self._calls = 0
        # Holds one ProcessGroupGloo, which torch's stubs hardly cover, until this is closed or the process exits:
        # its threads must have dropped their tensors before the interpreter ends, see ``teardown.shutdown``.
        self._groups: list[Any] = []
        weakref.finalize(self, self._groups.clear)
        self._rank = dist.get_rank()
        try:
            self._store = own_store("agreement", self._ranks)
            position = self._ranks.index(self._rank)
            group = dist.ProcessGroupGloo(self._store, position, len(ranks), timedelta(seconds=self._wait))
        except RuntimeError as error:
            raise RankDisagreementError(
                f"{subject}: ranks {_listed(self._ranks)} train together, but not all of them started within "
                f"{self._wait:.0f} s (this is rank {self._rank}); attach on all of them."
            ) from error
        self._groups.append(group)

    def check(self, figures: Mapping[str, int], *, hint: str) -> None:
        """Compare ``figures`` with those of the other ranks; all ranks must call this with the same names.

        Args:
            figures: Name -> value that fits into 64 bits.
            hint: What to do if they differ.

        Raises:
            RankDisagreementError: They differ, or a rank did not arrive; raised on every rank that is alive.
        """
        mine = torch.tensor(list(figures.values()), dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(mine) for _ in self._ranks]
        self._together(lambda group: group.allgather([rows], [mine]), figures)
        columns = {name: column.tolist() for name, column in zip(figures, torch.stack(rows).T, strict=True)}
        different = [
            f"{name} is {_by_value(self._ranks, found)}" for name, found in columns.items() if len(set(found)) > 1
        ]
        if different:
            same = [f"{name} {found[0]}" for name, found in columns.items() if len(set(found)) == 1]
            alike = f" ({', '.join(same)} on all)" if same else ""
            raise RankDisagreementError(f"{self._subject}: the ranks disagree: {'; '.join(different)}{alike}. {hint}")

    def largest(self, numbers: Sequence[float], *, step: str) -> list[float]:
        """Return for each number the largest one of all ranks; all ranks must call this with as many numbers.

        Args:
            numbers: Any numbers, infinity included.
            step: What this rank does, for the message.

        Raises:
            RankDisagreementError: A rank did not arrive; raised on every rank that is alive.
        """
        mine = torch.tensor(list(numbers), dtype=torch.float64, device="cpu")
        rows = [torch.empty_like(mine) for _ in self._ranks]
        self._together(lambda group: group.allgather([rows], [mine]), {step: self._calls})
        return torch.stack(rows).amax(0).tolist()

    def close(self) -> None:
        """Free the group; all ranks must call this. A second call does nothing."""
        if self._groups:
            part(self._groups.pop(), min(5.0, self._wait))

    def _together(self, collective: Callable[[Any], Any], figures: Mapping[str, int]) -> None:
        if not self._groups:
            raise RankDisagreementError(f"{self._subject}: the ranks disagreed earlier; restart the job.")
        self._calls += 1
        started = monotonic()
        try:
            collective(self._groups[0]).wait()
        except RuntimeError as error:
            self._abandon()
            raise RankDisagreementError(self._absent(figures, started)) from error

    def _abandon(self) -> None:
        """Close the connections, so that ranks which wait for this one fail at once."""
        self._groups.pop().abort()

    def _absent(self, figures: Mapping[str, int], started: float) -> str:
        """Name the ranks that did not arrive: those that do not answer in the store."""
        missing = list(self._ranks)
        had = ", ".join(f"{name} {value}" for name, value in figures.items()) or "the same call"
        try:
            self._store.set(f"{self._calls}/{self._rank}", "here")
            # Ranks that are alive fail within the same wait, and answer.
            deadline = monotonic() + 0.8 * (self._timeout - self._wait)
            while missing and monotonic() < deadline:
                missing = [rank for rank in missing if not self._store.check([f"{self._calls}/{rank}"])]
                sleep(_POLL)
        except RuntimeError:
            who = "the process that holds the store (rank 0, unless a launcher does) has ended, perhaps others too"
        else:
            who = f"{_listed(missing, 'rank')} did not arrive" if missing else "the others stopped waiting for this one"
        return (
            f"{self._subject}: {who} ({had} on rank {self._rank}; ranks {_listed(self._ranks)} train together, waited "
            f"{monotonic() - started:.1f} s). Look at the first error of that rank; if one rank works alone for "
            "longer, raise the timeout."
        )


def _listed(ranks: Sequence[int], noun: str = "") -> str:
    text = ", ".join(map(str, ranks))
    return text if not noun else f"{noun}{'s' if len(ranks) > 1 else ''} {text}"


def _by_value(ranks: Sequence[int], values: Sequence[int]) -> str:
    """``3 on ranks 0, 2 and 5 on rank 1``."""
    return " and ".join(
        f"{value} on {_listed([r for r, v in zip(ranks, values, strict=True) if v == value], 'rank')}"
        for value in dict.fromkeys(values)
    )
