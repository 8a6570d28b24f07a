"""Restore the default random number generators, but only if they were used."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchboost.core.torch_private import DispatchMode

__all__ = ["generators_kept"]


@contextmanager
def generators_kept(devices: Sequence[int] = ()) -> Iterator[None]:
    """Restore the default generators of torch and of ``random`` at the end, if this thread has drawn from them.

    ``torch.random.fork_rng`` always restores them, so numbers that other threads draw meanwhile are drawn again. Here
    this can only happen after the first draw of this thread.

    Args:
        devices: Indices of CUDA devices, in addition to the CPU.
    """
    python = random.getstate()
    with _Draws(devices) as draws:
        try:
            yield
        finally:
            draws.put_back()
            if random.getstate() != python:
                random.setstate(python)


class _Draws(DispatchMode):
    """Record the state of the default generators before the first draw of this thread."""

    def __init__(self, devices: Sequence[int]) -> None:
        super().__init__()
        self._devices = devices
        self._before: list[Tensor] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._before is None and torch.Tag.nondeterministic_seeded in func.tags:
            self._before = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]
        return func(*args, **(kwargs or {}))

    def put_back(self) -> None:
        if self._before is not None:
            torch.set_rng_state(self._before[0])
            for device, state in zip(self._devices, self._before[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
