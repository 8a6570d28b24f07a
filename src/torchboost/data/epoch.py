"""The batches of an epoch: each is timed, and loaded in the way that the trial asks for."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import shutil
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from torchboost.core.torch_private import loads_in_this_process
from torchboost.data.cores import usable_cores
from torchboost.data.draws import Draws
from torchboost.data.pipes import OWN, Pipe, Stock, Variant
from torchboost.data.sameness import bytes_of, can_be_pinned, same
from torchboost.data.sending import Packed, Unfit, pack
from torchboost.data.trial import Reading, Trial, Window

__all__ = ["Batches", "Supply"]

PATIENCE = 30.0
"""Seconds after which a batch that does not come counts as lost, in addition to 20 times the wait for one."""
_EVERY = 64
"""Batches between two looks at the open files and the shared memory that workers need."""
_COPIES = 64
"""Batches for which there must be room in shared memory."""
_log = logging.getLogger("torchboost")


class Supply:
    """What stays between epochs: the trial, the workers, and the data set as they have it.

    Args:
        loader: Any iterable.
        other_draws: Whether the data set may draw other random numbers.
        read_ahead: Whether any sampler may be read ahead.

    Attributes:
        trial: Decides what to do.
        reading: Of the present window.
        to_compare: Batches of the present window that are still to be loaded in both ways.
        batches: Number of batches so far.
    """

    def __init__(self, loader: Iterable[Any], *, other_draws: bool, read_ahead: bool) -> None:
        self.loader, self.other_draws, self.read_ahead = loader, other_draws, read_ahead
        self.plain = loader if isinstance(loader, DataLoader) and loads_in_this_process(loader) else None
        self.reading = Reading()
        self.to_compare = self.batches = self._bytes = 0
        self._pipes: dict[Variant, Pipe] = {}
        self._packed: Packed | None = None
        ask = weakref.WeakMethod(self._unfit)  # no cycle, so that the workers end with the loader
        pins = self.plain is not None and torch.cuda.is_available() and not self.plain.pin_memory
        self.trial = Trial(lambda reading: (ask() or str)(reading), cores=usable_cores(), pins=pins)

    def stock(self) -> Stock | Iterator[Any]:
        """Return the loader's own iterator; one that can be read ahead if the loader loads in this process."""
        return iter(self.loader) if self.plain is None else Stock(self.plain)

    def pipe_of(self, variant: Variant) -> Pipe:
        """Return the pipe of a way, whose workers may be from an earlier epoch."""
        assert self.plain is not None
        assert self._packed is not None
        if variant not in self._pipes:
            self._pipes[variant] = Pipe(
                self.plain,
                variant,
                self._packed,
                seed=(torch.initial_seed() + 1000 * self.batches) % 2**63,
                patience=PATIENCE + 20 * self.trial.last.step,
                other_draws=self.other_draws,
            )
        return self._pipes[variant]

    def renew(self) -> str:
        """At the beginning of an epoch, end workers with an older data set. Return why none can start."""
        is_over = self.trial.phase == "decided" and not self.trial.chosen.workers
        if is_over or self._packed is None:
            return ""
        before = self._packed.version
        reason = self._pack()
        if reason or before is None or self._packed.version != before:
            self.close()
        return reason

    def _pack(self) -> str:
        """Pack the data set as it is now. Return why it cannot be sent; empty if it can."""
        assert self.plain is not None
        try:
            self._packed = pack((self.plain.dataset, self.plain.collate_fn))
        except Unfit as error:
            return str(error)
        return ""

    def version(self) -> str | None:
        """Return the version of the data set; None if it is too large, or cannot be sent."""
        return None if self._pack() or self._packed is None else self._packed.version

    @property
    def left(self) -> float:
        """How many batches the present window still has in this epoch."""
        count = self.trial.window.count
        return math.inf if count is None else max(count - len(self.reading.rests), self.to_compare)

    def end_epoch(self) -> None:
        """Give the reading to the trial if the window ends with the epoch."""
        del self.reading.waits[len(self.reading.rests) :]
        if self.reading.rests and self.left in (0, math.inf):
            self.answer(self.reading)

    def answer(self, result: Reading | str) -> None:
        """Give the result of the window to the trial, which sets the next one."""
        was_decided = self.trial.phase == "decided", self.trial.chosen
        self.reading = Reading()
        self.trial.answer(result)
        self.to_compare = 0 if self.other_draws else self.trial.window.compared
        is_decided = self.trial.phase == "decided", self.trial.chosen
        if is_decided[0] and is_decided != was_decided:
            for variant in [variant for variant in self._pipes if variant != self.trial.chosen]:
                self.close_pipe(variant)
            _log.info("waiting for data: %s", self.trial.chosen)

    def close_pipe(self, variant: Variant, *, at_once: bool = False) -> None:
        """End the workers of a way; at once if one of them may never answer."""
        if variant in self._pipes:
            self._pipes.pop(variant).close(at_once=at_once)

    def close(self) -> None:
        """End all workers."""
        for variant in list(self._pipes):
            self.close_pipe(variant)

    def strain(self) -> str:
        """Return why workers must stop, if the loop keeps so many of their batches that files or memory run out."""
        with contextlib.suppress(ImportError, OSError):
            import resource

            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            if most != resource.RLIM_INFINITY and len(os.listdir("/proc/self/fd")) > most / 2:
                return f"the loop keeps batches from workers, which are open files, of which {most} are allowed"
        return self._no_room(4)

    def _no_room(self, copies: int) -> str:
        size, free = self._bytes, _shared_memory()
        if size * copies <= free:
            return ""
        return (
            f"batches of {size / 2**20:.3g} MiB need more shared memory than the {free / 2**20:.3g} MiB that are free"
        )

    def _unfit(self, reading: Reading) -> str:
        """Return why workers are left out."""
        reason = _unsupported(self.loader, self.plain)
        if reason:
            return reason
        if reading.moved and not self.other_draws:
            return (
                f"the data set draws from {reading.moved}, and would draw other numbers in workers "
                "(allow_other_draws=True allows it)"
            )
        if reading.changed:
            return "the loop changes the data set between two batches"
        self._bytes = reading.bytes
        return self._pack() or self._no_room(_COPIES)


class Batches:
    """The iterator over one epoch.

    Args:
        supply: Of the loader.

    Attributes:
        is_open: Whether the end was not reached.
    """

    def __init__(self, supply: Supply) -> None:
        self._supply = supply
        self._stock: Any = supply.stock()
        self._pipe: Pipe | None = None
        self._has_begun = False
        self._count = 0
        self._left: float | None = None
        self._version: str | None = None
        self.is_open = True

    def __iter__(self) -> Iterator[Any]:
        """Return the iterator itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch of the loader."""
        supply = self._supply
        start = time.perf_counter()
        if self._left is not None:
            supply.reading.rests.append(start - self._left)
            self._left = None
        self._turn()
        try:
            batch = self._watched() if supply.trial.window.watched else self._take()
        except StopIteration:
            self.is_open, self._pipe = False, None
            supply.end_epoch()
            raise
        self._count += 1
        supply.batches += 1
        self._left = time.perf_counter()
        supply.reading.waits.append(self._left - start)
        return batch

    def _turn(self) -> None:
        """Begin the next window if one is over, and go on with the present one at the beginning of an epoch."""
        supply = self._supply
        if not self._has_begun:
            self._has_begun = True
            supply.end_epoch()  # the loop may have left the epoch before
            reason = supply.renew()
            if reason and supply.trial.window.variant.workers:
                supply.answer(reason)
            self._begin()
        elif not supply.left:
            supply.answer(supply.reading)
            self._begin()

    def _begin(self) -> None:
        window, self._pipe = self._supply.trial.window, None
        if window.variant == OWN:
            return
        reason = self._start(window)
        if reason:
            self._give_up(reason)

    def _start(self, window: Window) -> str:
        """Start to load ahead. Return why that is not possible, empty if it is."""
        supply, stock = self._supply, self._stock
        try:
            if not stock.pending:
                stock.take()
        except StopIteration:  # what is left of this epoch is left to the loader itself
            return ""
        if not supply.read_ahead:
            reason = stock.unfit()
            if reason:
                return reason
        try:
            pipe = supply.pipe_of(window.variant)
            pipe.begin(stock, supply.left)
        except Exception as error:
            return f"workers cannot be started ({_first_line(error)})"
        self._pipe = pipe
        return ""

    def _take(self) -> Any:
        supply, stock, pipe = self._supply, self._stock, self._pipe
        if pipe is None:
            return next(stock)
        if self._count % _EVERY == 0 and (reason := supply.strain()):
            self._give_up(reason)
            return next(stock)
        is_compared = supply.to_compare > 0 and bool(stock.pending)
        local = self._local() if is_compared else None
        try:
            batch, fault = pipe.take()
        except StopIteration:
            self._pipe = None
            return next(stock)
        except Exception as error:
            batch, fault = None, f"the workers failed ({_first_line(error)})"
            supply.close_pipe(supply.trial.window.variant, at_once=True)
        index = stock.pending.popleft()
        if is_compared and not fault:
            supply.to_compare -= 1
            supply.trial.compared += 1
            if not same(local, batch):
                fault = "a batch from a worker differs from the same one loaded in this process"
        if not fault:
            return local if is_compared else batch
        self._give_up(fault)
        return local if is_compared else stock.load(index)

    def _local(self) -> Any:
        """Load the next pending batch in this process. An error is the data set's own."""
        try:
            return self._stock.load(self._stock.pending[0])
        except BaseException:
            self._stock.pending.popleft()
            self._give_up("the data set raised an error in this process")
            raise

    def _give_up(self, reason: str) -> None:
        self._supply.close_pipe(self._supply.trial.window.variant)
        self._supply.answer(reason)
        self._begin()

    def _watched(self) -> Any:
        """Take a batch, and look what else happens."""
        supply, reading = self._supply, self._supply.reading
        if supply.plain is None:
            return self._take()
        if self._version is not None:
            reading.changed = self._version != supply.version()
        draws, start = Draws(), time.process_time()
        batch = self._take()
        reading.processor += time.process_time() - start
        if self._count:  # the sampler draws for the first batch of an epoch
            reading.moved = reading.moved or draws.moved()
        reading.bytes = max(reading.bytes, bytes_of(batch))
        reading.can_pin = reading.can_pin and can_be_pinned(batch)
        self._version = None if reading.waits else supply.version()  # between the first two batches
        return batch


def _unsupported(loader: Any, plain: DataLoader[Any] | None) -> str:
    """Return why a loader is only measured; empty if its batches can be loaded ahead."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} is only measured, as is everything but a DataLoader of torch"
    if loader.num_workers:
        return f"the loader has {loader.num_workers} workers already; try more with num_workers"
    if plain is None:
        return f"a {type(loader).__name__} has an iterator of its own, and is only measured; try its num_workers"
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is an iterable, of which each worker would yield all samples"
    if isinstance(loader.dataset, MapDataPipe):
        return "its data set is a graph of data pipes"
    if loader.worker_init_fn is not None:
        return "its worker_init_fn expects workers that torch starts; try num_workers"
    if torch.multiprocessing.get_context().get_start_method() != "fork":
        return "workers are only tried if they start by fork, since others run the script again; try num_workers"
    if multiprocessing.current_process().daemon:
        return "this process is a daemon, which may not start workers"
    return ""


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _shared_memory() -> float:
    """Return the free bytes of the memory that workers hand over batches in."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return math.inf
