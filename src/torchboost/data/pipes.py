"""Load the batches of a loader ahead of the loop, in worker processes that report why a batch differs."""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torchboost.core.torch_private import (
    forgive_lost_workers,
    iterator_of_indices,
    load_index,
    next_index,
    stop_workers,
)
from torchboost.data.draws import Draws, is_own
from torchboost.data.sameness import parts_of, same, shares_memory
from torchboost.data.sending import Packed

TWICE = 2
"""The first batches that each worker loads a second time, to see whether both are equal."""

_READY = tuple(map(type, (iter([]), iter(()), iter(range(0)), iter(range(2**70)), iter(torch.empty(0)))))
"""Iterators over values that exist already: reading one ahead of time runs no code of a sampler."""
_DRAWN_AT_ONCE = (SubsetRandomSampler, WeightedRandomSampler, SequentialSampler)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to load."""

    workers: int = 0  # processes; 0 means in the process of the loop
    prefetch: int = 2  # batches that each worker loads ahead
    pin: bool = False  # whether batches from workers are copied to pinned memory

    @property
    def ahead(self) -> int:
        """Batches that are loaded ahead at most."""
        return self.workers * self.prefetch

    def __str__(self) -> str:
        """Name it in words."""
        if not self.workers:
            return "no workers"
        text = f"{self.workers} worker{'s' if self.workers > 1 else ''}, {self.prefetch} batches ahead each"
        return f"{text} and pinned memory" if self.pin else text


OWN = Variant()
"""The loader's own way."""


class Stock:
    """The loader's own iterator over one epoch, from which indices can also be taken ahead."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._loader, self._sampler = loader, sampler
        self._batches = iter(loader)
        self._taken = 0
        self._error: Exception | None = None
        self.pending: deque[Any] = deque()  # indices that were taken ahead, in order, whose batches are not delivered

    def __next__(self) -> Any:
        """Return the next batch as the loader itself does."""
        if self.pending:
            return self.load(self.pending.popleft())
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self._taken += 1
        return next(self._batches)

    def load(self, index: Any) -> Any:
        """Load the batch of an index in this process."""
        return load_index(self._batches, index)

    def take(self) -> None:
        """Take one more index ahead. ``StopIteration``: the loop must ask for its batch first, or there is none."""
        if self._error is not None or self._taken >= self._most():
            raise StopIteration
        try:
            self.pending.append(next_index(self._batches))
        except StopIteration:
            raise
        except Exception as error:  # the sampler's: the loop gets it when it asks for that batch
            self._error = error
            raise StopIteration from None
        self._taken += 1

    def _most(self) -> float:
        """Return how many indices can be taken early: the end is left to the loop, since samplers may draw there."""
        innermost = self._innermost()
        draws_at_the_end = isinstance(innermost, RandomSampler) and innermost.generator is not None
        try:
            return len(self._sampler) - int(draws_at_the_end)
        except (TypeError, NotImplementedError):
            return float("inf")

    def _innermost(self) -> Any:
        """Return the sampler of single indices."""
        return self._sampler.sampler if type(self._sampler).__iter__ is BatchSampler.__iter__ else self._sampler

    def unfit(self) -> str:
        """Return why indices cannot be taken ahead of time, or an empty text. An index was taken before."""
        for sampler in (self._sampler, self._innermost()):
            if hasattr(sampler, "state_dict"):
                return "its sampler has a state, which would be ahead of the loop in a checkpoint"
        iterator = iterator_of_indices(self._batches)
        if isinstance(iterator, _READY) or _is_drawn_at_once(self._innermost(), self._sampler, iterator):
            return ""
        return "its sampler computes indices when asked, and may depend on the loop (read_ahead=True allows it)"


def _is_drawn_at_once(innermost: Any, sampler: Any, iterator: Any) -> bool:
    if not isinstance(iterator, GeneratorType):
        return False
    if sampler is not innermost:
        # The indices of one iterator are grouped, which the generator of the groups holds.
        values = inspect.getgeneratorlocals(iterator).values()
        inner = [each for value in values for each in (value if isinstance(value, list) else [value])]
        inner = [each for each in inner if hasattr(each, "__next__") and not isinstance(each, zip)]
        if inner and all(isinstance(each, _READY) for each in inner):
            return True
    rule = getattr(type(innermost), "__iter__", None)
    if rule is RandomSampler.__iter__:
        own = innermost.generator is None
        return own or (not innermost.replacement and innermost.num_samples <= len(innermost.data_source))
    return any(rule is known.__iter__ for known in _DRAWN_AT_ONCE)


class _Feed(Sampler[Any]):
    """The sampler of a pipe: hands out a number of indices, first those that are pending."""

    def __init__(self) -> None:
        self.stock: Stock | None = None
        self.left = 0.0
        self.again: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.stock is None or self.left <= 0:
            raise StopIteration
        self.left -= 1
        if self.again:
            return self.again.popleft()
        self.stock.take()
        return self.stock.pending[-1]


class _Job(Dataset[Any]):
    """Runs in a worker: loads a batch, and says why it must not be used, if so."""

    def __init__(self, packed: Packed, batched: bool, *, other_draws: bool) -> None:
        self._packed, self._batched, self._other_draws = packed, batched, other_draws
        self._dataset: Any = None
        self._collate: Any = None
        self._count = 0

    def __getitem__(self, index: Any) -> tuple[Any, str]:
        try:
            if self._collate is None:
                self._dataset, self._collate = self._packed.unpack()
                self._draws = Draws(self._packed.generators)
            return self._checked(index)
        except Exception as error:
            return None, f"in a worker, the data set raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def _load(self, index: Any) -> Any:
        if not self._batched:
            return self._collate(self._dataset[index])
        together = getattr(self._dataset, "__getitems__", None)
        return self._collate(together(index) if together else [self._dataset[each] for each in index])

    def _checked(self, index: Any) -> tuple[Any, str]:
        self._count += 1
        batch = self._load(index)
        moved = self._draws.moved()
        if is_own(moved):
            return None, "the data set draws from a generator that it holds, of which each worker has a copy"
        if moved and not self._other_draws:
            return None, f"the data set draws from {moved}, and would draw other numbers in a worker"
        if self._count <= TWICE:
            if not all(map(_can_be_sent, parts_of(batch)[1])):
                return None, "its batches hold tensors that are not on the CPU, not dense, or part of a graph"
            again = self._load(index)
            moved = self._draws.moved() or moved
            if not moved and not same(batch, again):
                return None, "the data set returns another value if a sample is read twice"
            if shares_memory(batch, again):
                return None, "the data set hands out its own memory, in which the loop could write"
        return batch, ""


def _can_be_sent(array: Any) -> bool:
    if not isinstance(array, Tensor):
        return True
    return array.device.type == "cpu" and array.layout == torch.strided and not array.requires_grad


class Pipe:
    """Loads batches ahead in one way, for windows of a stock iterator. Workers are kept between windows.

    They count as lost if a batch takes longer than ``patience`` seconds. With ``other_draws`` they may draw from the
    generators of their process.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        variant: Variant,
        packed: Packed,
        *,
        seed: int,
        patience: float,
        other_draws: bool,
    ) -> None:
        self._feed = _Feed()
        self._batches: Any = None
        with _quiet():
            self._loader: DataLoader[Any] | None = DataLoader(
                _Job(packed, loader.batch_sampler is not None, other_draws=other_draws),
                batch_size=None,
                sampler=self._feed,
                collate_fn=lambda answer: answer,
                num_workers=variant.workers,
                prefetch_factor=variant.prefetch,
                persistent_workers=True,
                timeout=patience,
                multiprocessing_context="fork",
                pin_memory=variant.pin or loader.pin_memory,
                generator=torch.Generator().manual_seed(seed),
            )

    def begin(self, stock: Stock, count: float) -> None:
        """Begin to load up to ``count`` batches ahead, first those that are pending. The first call starts workers."""
        assert self._loader is not None
        self._feed.stock, self._feed.left, self._feed.again = stock, count, deque(stock.pending)
        with _quiet():
            self._batches = iter(self._loader)
        forgive_lost_workers(self._batches)

    def take(self) -> tuple[Any, str]:
        """Return the next batch of the window and why it must not be used, empty if it may be."""
        return next(self._batches)

    def close(self, *, at_once: bool = False) -> None:
        """End the workers, at once if one of them may never answer."""
        if at_once:
            stop_workers(self._batches)
        self._batches = self._loader = self._feed.stock = None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence two warnings: workers that wait may outnumber the processors, and a worker that hangs is given up."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork")
        yield
