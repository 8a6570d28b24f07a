"""Restore the default random number generators, but only if they were used."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchboost.core.torch_private import DispatchMode

__all__ = ["accelerators", "generator_states", "generators_kept", "set_generator_states"]


def accelerators(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Return the devices of tensors that draw random numbers of their own: all but the CPU and ``meta``."""
    found = {tensor.device for tensor in tensors}
    return sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)


def generator_states(devices: Sequence[torch.device]) -> list[Tensor]:
    """Return the states of torch's default generators: of the CPU, and of each of these devices."""
    return [torch.get_rng_state(), *(torch.get_device_module(device).get_rng_state(device) for device in devices)]


def set_generator_states(states: Sequence[Tensor], devices: Sequence[torch.device]) -> None:
    """Set what :func:`generator_states` has returned for these devices."""
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def generators_kept(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restore the default generators of torch and of ``random`` at the end, if this thread has drawn from them.

    ``torch.random.fork_rng`` always restores them, so numbers that other threads draw meanwhile are drawn again. Here
    this can only happen after the first draw of this thread.

    Args:
        devices: Accelerators, in addition to the CPU.
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

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self._devices = devices
        self._before: list[Tensor] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._before is None and torch.Tag.nondeterministic_seeded in func.tags:
            self._before = generator_states(self._devices)
        return func(*args, **(kwargs or {}))

    def put_back(self) -> None:
        if self._before is not None:
            set_generator_states(self._before, self._devices)
