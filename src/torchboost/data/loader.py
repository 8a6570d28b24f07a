"""A loader that measures how long the loop waits for it, and loads the same batches ahead if that pays."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torchboost.data.epoch import Batches, Supply
from torchboost.data.pipes import OWN, Variant
from torchboost.data.trial import LEAST_WAIT, SHARE, Race, Reading

__all__ = ["Loader", "loader"]


def loader(loader: Iterable[Any], *, allow_other_draws: bool = False, read_ahead: bool = False) -> Loader:
    """Return a loader that yields the same batches in the same order, and waits for them less if that is possible.

    It measures ``next()`` and the time between two calls. If waiting takes more than 5 % of a step, it tries a few
    worker processes, in windows of batches in turn with windows of the loader's own way, during the first epochs. What
    shortens a step by more than 2 %, by a 95 % interval over at least six pairs of windows, is kept. Otherwise nothing
    changes. On CUDA, workers are also tried with pinned memory. ``explain()`` says in words what was found.

    Batches are equal bit for bit. Indices come from the loader's own sampler, and random generators of this process
    draw what they would draw without workers. A data set that draws random numbers, from torch, NumPy, Python or a
    generator that it holds, would draw other numbers in workers. It is found by a look at these generators at every
    batch, in workers too, and by samples that are read twice. Such a batch is discarded and loaded in this process, and
    workers are left out.

    Args:
        loader: A :class:`torch.utils.data.DataLoader` without workers. Any other iterable is only measured.
        allow_other_draws: Use workers also if the data set draws from the generators of the process. Augmentation, and
            everything that draws in this process later, such as dropout, then gets other numbers, and not the same ones
            in each run.
        read_ahead: Take indices up to some batches ahead from a sampler that computes them when it is asked. Only if
            they do not depend on what the loop does meanwhile.

    Raises:
        TypeError: ``loader`` is not iterable.

    Cost: below 10 microseconds per batch. A trial loads some batches twice, and those of its windows in a way that may
    be slower. Each worker holds a copy of the structure of the data set; arrays and tensors are shared.

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
    """What :func:`loader` returns. It passes on public attributes of the wrapped loader, such as ``dataset``.

    So it does ``state_dict()`` and ``load_state_dict()`` of a loader that can be resumed within an epoch.

    """

    def __init__(self, loader: Iterable[Any], *, allow_other_draws: bool = False, read_ahead: bool = False) -> None:
        if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
            raise TypeError(f"loader: found {type(loader).__name__}; allowed is what a for loop can read.")
        self._loader = loader
        self._supply = Supply(loader, other_draws=allow_other_draws, read_ahead=read_ahead)
        self._latest: Callable[[], Batches | None] = lambda: None

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. If another one has begun and is not over, this one is read in the loader's own way."""
        latest = self._latest()
        if latest is not None and latest.is_open:
            return iter(self._loader)
        batches = Batches(self._supply)
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
        return self._supply.trial.chosen

    @property
    def waiting(self) -> float:
        """The share of waiting for data in a step, between 0 and 1, in the way that is used now; 0 if not yet known."""
        return self._supply.trial.last.share

    def explain(self) -> str:
        """Say in one or two lines how long the loop waits for data and what was done about it."""
        trial = self._supply.trial
        if trial.first is None:
            if not trial.last.rests:
                return f"waiting for data: not judged yet, after {self._supply.batches} batches"
            small = trial.last.share <= SHARE or trial.last.wait <= LEAST_WAIT
            end = "not the bottleneck, nothing changed" if small else "this is looked at once more"
            return f"waiting for data: {_told(trial.last)}; {end}"
        before = f"waiting for data: {_told(trial.first)}"
        if trial.phase == "trying" and trial.chosen == OWN:
            return f"{before}; trying what helps"
        if trial.chosen != OWN:
            kept = "; then ".join(str(race) for race in trial.races if race.is_kept)
            equal = f"{trial.compared} batches compared, all equal"
            if self._supply.other_draws:
                equal = "random numbers of the data set differ from those without workers, if it draws any"
            return f"{before}, now {_told(trial.last)}; {equal}\n{kept}"
        reason = trial.reason or "nothing paid: " + "; ".join(map(_lost, trial.races))
        return f"{before}; nothing changed: {reason}"

    def close(self) -> None:
        """End the workers. They also end with this object. A later epoch starts them again."""
        self._supply.close()


def _told(reading: Reading) -> str:
    return f"{reading.share:.1%} of a step ({1e3 * reading.wait:.3g} of {1e3 * reading.step:.3g} ms)"


def _lost(race: Race) -> str:
    return f"{race.variant} {race.gain.mid:.2f}x ({race.gain.low:.2f} to {race.gain.high:.2f})"
