"""A loader that measures how long the loop waits for it, and loads the same batches ahead if that pays."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from torchboost.core.hardware import usable_cores
from torchboost.core.torch_private import loads_in_this_process
from torchboost.data.draws import Draws
from torchboost.data.pipes import OWN, Pipe, Stock, Variant
from torchboost.data.sameness import bytes_of, can_be_pinned, same
from torchboost.data.sending import Packed, Unfit, pack
from torchboost.data.trial import LEAST_WAIT, SHARE, Race, Reading, Trial, Window
from torchboost.sheet import percent

PATIENCE = 30.0
"""Seconds after which a batch that does not come counts as lost, in addition to 20 times the wait for one."""
_EVERY = 64
"""Batches between two looks at the open files and the shared memory that workers need."""
_COPIES = 64
"""Batches for which there must be room in shared memory."""
_log = logging.getLogger("torchboost")


def loader(loader: Iterable[Any], *, allow_other_draws: bool = False, read_ahead: bool = False) -> Loader:
    """Return a loader that yields the same batches in the same order, and waits for them less if that is possible.

    It measures ``next()`` and the time between two calls. If waiting takes more than 5 % of a step, it tries a few
    worker processes, in windows of batches in turn with windows of the loader's own way, during the first epochs. A way
    that shortens a step by more than 2 %, by a 95 % interval over at least six pairs of windows, is kept. Otherwise
    nothing changes. On CUDA, workers are also tried with pinned memory. ``explain()`` gives the result in words.

    Batches are equal bit for bit. Indices come from the loader's own sampler, and random generators of this process
    draw what they would draw without workers. A data set that draws random numbers, from torch, NumPy, Python or a
    generator that it holds, would draw other numbers in workers. It is found by a look at these generators at every
    batch, in workers too, and by samples that are read twice. Then this process loads the batch, and all after it.

    Args:
        loader: A :class:`torch.utils.data.DataLoader` without workers. Any other iterable is only measured.
        allow_other_draws: Use workers also if the data set draws from the generators of the process. Augmentation, and
            everything that draws in this process later, such as dropout, then gets other numbers, and not the same ones
            in each run.
        read_ahead: Take indices up to some batches ahead from a sampler that computes them when it is asked. Only if
            they do not depend on what the loop does meanwhile.

    Cost: below 10 microseconds per batch. A trial loads some batches twice, and the batches of its windows in a way
    that may be slower. Each worker holds a copy of the structure of the data set. Arrays and tensors are shared.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> batches = loader(DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2))
        >>> [batch[0].tolist() for batch in batches]
        [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
        >>> batches.explain()
        'waiting for data: not judged yet, after 3 batches'
    """
    return Loader(loader, allow_other_draws=allow_other_draws, read_ahead=read_ahead)


class Loader:
    """The result of :func:`loader`. It passes on public attributes of the wrapped loader, such as ``dataset``.

    So it does ``state_dict()`` and ``load_state_dict()`` of a loader that can be resumed within an epoch.
    """

    def __init__(self, loader: Iterable[Any], *, allow_other_draws: bool = False, read_ahead: bool = False) -> None:
        self._loader, self._other_draws, self._read_ahead = loader, allow_other_draws, read_ahead
        self._plain = loader if isinstance(loader, DataLoader) and loads_in_this_process(loader) else None
        self._reading = Reading()
        self._to_compare = self._batches = self._bytes = 0
        self._pipes: dict[Variant, Pipe] = {}
        self._packed: Packed | None = None
        pins = self._plain is not None and torch.cuda.is_available() and not self._plain.pin_memory
        self._trial = Trial(cores=usable_cores(), pins=pins)
        self._latest: Callable[[], Batches | None] = lambda: None

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. If another one has begun and is not over, this one is read in the loader's own way."""
        latest = self._latest()
        if latest is not None and latest.is_open:
            return iter(self._loader)
        batches = Batches(self)
        self._latest = weakref.ref(batches)
        return batches

    def __len__(self) -> int:
        """Return the number of batches."""
        sized: Any = self._loader
        return len(sized)

    def __bool__(self) -> bool:
        """As of the loader itself."""
        return bool(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Return a public attribute of the loader itself."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)

    @property
    def choice(self) -> Variant:
        """The way that is used now."""
        return self._trial.chosen

    @property
    def waiting(self) -> float:
        """The share of waiting for data in a step, between 0 and 1, in the way that is used now. 0 if not yet known."""
        return self._trial.last.share

    def explain(self) -> str:
        """Say in one or two lines how long the loop waits for data and what was done about it."""
        trial = self._trial
        if trial.first is None:
            if not trial.last.rests:
                return f"waiting for data: not judged yet, after {self._batches} batches"
            small = trial.last.share <= SHARE or trial.last.wait <= LEAST_WAIT
            end = "not the bottleneck, nothing changed" if small else "this is looked at once more"
            return f"waiting for data: {_told(trial.last)}; {end}"
        before = f"waiting for data: {_told(trial.first)}"
        if trial.phase == "trying" and trial.chosen == OWN:
            return f"{before}; trying what helps"
        if trial.chosen != OWN:
            kept = "; then ".join(str(race) for race in trial.races if race.is_kept)
            equal = f"{trial.compared} batches compared, all equal"
            if self._other_draws:
                equal = "random numbers of the data set differ from those without workers, if it draws any"
            return f"{before}, now {_told(trial.last)}; {equal}\n{kept}"
        reason = trial.reason or "nothing paid: " + "; ".join(map(_lost, trial.races))
        return f"{before}; nothing changed: {reason}"

    def close(self) -> None:
        """End the workers. They also end with this object. A later epoch starts them again."""
        for variant in list(self._pipes):
            self._close_pipe(variant)

    def _stock(self) -> Stock | Iterator[Any]:
        """Return the loader's own iterator, one that can be read ahead if the loader loads in this process."""
        return iter(self._loader) if self._plain is None else Stock(self._plain)

    def _pipe_of(self, variant: Variant) -> Pipe:
        """Return the pipe of a way, whose workers may be from an earlier epoch."""
        assert self._plain is not None
        assert self._packed is not None
        if variant not in self._pipes:
            self._pipes[variant] = Pipe(
                self._plain,
                variant,
                self._packed,
                seed=(torch.initial_seed() + 1000 * self._batches) % 2**63,
                patience=PATIENCE + 20 * self._trial.last.step,
                other_draws=self._other_draws,
            )
        return self._pipes[variant]

    def _renew(self) -> str:
        """At the beginning of an epoch, end workers with an older data set. Return why none can start."""
        is_over = self._trial.phase == "decided" and not self._trial.chosen.workers
        if is_over or self._packed is None:
            return ""
        before = self._packed.version
        reason = self._pack()
        if reason or before is None or self._packed.version != before:
            self.close()
        return reason

    def _pack(self) -> str:
        """Pack the data set as it is now. Return why it cannot be sent, or an empty text."""
        assert self._plain is not None
        try:
            self._packed = pack((self._plain.dataset, self._plain.collate_fn))
        except Unfit as error:
            return str(error)
        return ""

    def _data_version(self) -> str | None:
        """Return the version of the data set, or None if it is too large or cannot be sent."""
        return None if self._pack() or self._packed is None else self._packed.version

    @property
    def _left(self) -> float:
        """How many batches the present window still has in this epoch."""
        count = self._trial.window.count
        return math.inf if count is None else max(count - len(self._reading.rests), self._to_compare)

    def _end_epoch(self) -> None:
        """Give the reading to the trial if the window ends with the epoch."""
        del self._reading.waits[len(self._reading.rests) :]
        if self._reading.rests and self._left in (0, math.inf):
            self._answer(self._reading)

    def _answer(self, result: Reading | str) -> None:
        """Give the result of the window to the trial, which sets the next one."""
        if self._trial.window.watched and isinstance(result, Reading):
            result = self._unfit(result) or result
        was_decided = self._trial.phase == "decided", self._trial.chosen
        self._reading = Reading()
        self._trial.answer(result)
        self._to_compare = 0 if self._other_draws else self._trial.window.compared
        is_decided = self._trial.phase == "decided", self._trial.chosen
        if is_decided[0] and is_decided != was_decided:
            for variant in [variant for variant in self._pipes if variant != self._trial.chosen]:
                self._close_pipe(variant)
            _log.info("waiting for data: %s", self._trial.chosen)

    def _close_pipe(self, variant: Variant, *, at_once: bool = False) -> None:
        """End the workers of a way, at once if one of them may never answer."""
        if variant in self._pipes:
            self._pipes.pop(variant).close(at_once=at_once)

    def _strain(self) -> str:
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
        """Return why workers are not used."""
        reason = _unsupported(self._loader, self._plain)
        if reason:
            return reason
        if reading.moved and not self._other_draws:
            return (
                f"the data set draws from {reading.moved}, and would draw other numbers in workers "
                "(allow_other_draws=True allows it)"
            )
        if reading.changed:
            return "the loop changes the data set between two batches"
        self._bytes = reading.bytes
        return self._pack() or self._no_room(_COPIES)


class Batches:
    """The iterator over one epoch. It is open as long as its end was not reached."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._stock: Any = loader._stock()
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
        loader = self._loader
        start = time.perf_counter()
        if self._left is not None:
            loader._reading.rests.append(start - self._left)
            self._left = None
        self._turn()
        try:
            batch = self._watched() if loader._trial.window.watched else self._take()
        except StopIteration:
            self.is_open, self._pipe = False, None
            loader._end_epoch()
            raise
        self._count += 1
        loader._batches += 1
        self._left = time.perf_counter()
        loader._reading.waits.append(self._left - start)
        return batch

    def _turn(self) -> None:
        """Begin the next window if one is over, and continue with the present one at the beginning of an epoch."""
        loader = self._loader
        if not self._has_begun:
            self._has_begun = True
            loader._end_epoch()  # the loop may have left the epoch before
            reason = loader._renew()
            if reason and loader._trial.window.variant.workers:
                loader._answer(reason)
            self._begin()
        elif not loader._left:
            loader._answer(loader._reading)
            self._begin()

    def _begin(self) -> None:
        window, self._pipe = self._loader._trial.window, None
        if window.variant == OWN:
            return
        reason = self._start(window)
        if reason:
            self._give_up(reason)

    def _start(self, window: Window) -> str:
        """Start to load ahead. Return why that is not possible, empty if it is."""
        loader, stock = self._loader, self._stock
        try:
            if not stock.pending:
                stock.take()
        except StopIteration:  # the loader itself loads the rest of this epoch
            return ""
        if not loader._read_ahead:
            reason = stock.unfit()
            if reason:
                return reason
        try:
            pipe = loader._pipe_of(window.variant)
            pipe.begin(stock, loader._left)
        except Exception as error:
            return f"workers cannot be started ({_first_line(error)})"
        self._pipe = pipe
        return ""

    def _take(self) -> Any:
        loader, stock, pipe = self._loader, self._stock, self._pipe
        if pipe is None:
            return next(stock)
        if self._count % _EVERY == 0 and (reason := loader._strain()):
            self._give_up(reason)
            return next(stock)
        is_compared = loader._to_compare > 0 and bool(stock.pending)
        local = self._local() if is_compared else None
        try:
            batch, fault = pipe.take()
        except StopIteration:
            self._pipe = None
            return next(stock)
        except Exception as error:
            batch, fault = None, f"the workers failed ({_first_line(error)})"
            loader._close_pipe(loader._trial.window.variant, at_once=True)
        index = stock.pending.popleft()
        if is_compared and not fault:
            loader._to_compare -= 1
            loader._trial.compared += 1
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
        self._loader._close_pipe(self._loader._trial.window.variant)
        self._loader._answer(reason)
        self._begin()

    def _watched(self) -> Any:
        """Take a batch, and note its time, size and side effects."""
        loader, reading = self._loader, self._loader._reading
        if loader._plain is None:
            return self._take()
        if self._version is not None:
            reading.changed = self._version != loader._data_version()
        draws, start = Draws(), time.process_time()
        batch = self._take()
        reading.processor += time.process_time() - start
        if self._count:  # the sampler draws for the first batch of an epoch
            reading.moved = reading.moved or draws.moved()
        reading.bytes = max(reading.bytes, bytes_of(batch))
        reading.can_pin = reading.can_pin and can_be_pinned(batch)
        self._version = None if reading.waits else loader._data_version()  # between the first two batches
        return batch


def _unsupported(loader: Any, plain: DataLoader[Any] | None) -> str:
    """Return why a loader is only measured, or an empty text if its batches can be loaded ahead."""
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


def _told(reading: Reading) -> str:
    return f"{percent(reading.share, 1)} of a step ({1e3 * reading.wait:.3g} of {1e3 * reading.step:.3g} ms)"


def _lost(race: Race) -> str:
    return f"{race.variant} {race.gain.mid:.2f}x ({race.gain.low:.2f} to {race.gain.high:.2f})"
