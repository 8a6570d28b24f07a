"""Interrupt a block of a trial that takes longer than it may."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

import torch

__all__ = ["TimeUp", "time_limit"]


class TimeUp(BaseException):
    """The time of a block is over. Not an ``Exception``, so that no handler inside the block catches it."""


_DEVICES = ("cpu", "cuda", "mps", "xpu")


class _Modes(NamedTuple):
    """What ``no_grad`` and ``autocast`` switch for a thread.

    They do it in Python, so an interrupt can come after the switch and before the block that switches back.

    Args:
        grad: Whether gradients are recorded.
        autocast: For each device, whether autocast is on, and its precision.
        nesting: How many autocast contexts are open. When the last one ends, torch drops its casts of the weights.
    """

    grad: bool
    autocast: dict[str, tuple[bool, torch.dtype]]
    nesting: int

    @classmethod
    def now(cls) -> _Modes:
        torch.autocast_increment_nesting()
        autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES}
        return cls(torch.is_grad_enabled(), autocast, torch.autocast_decrement_nesting())

    def restore(self) -> None:
        torch.set_grad_enabled(self.grad)
        for kind, (enabled, dtype) in self.autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting() > self.nesting:
            pass
        torch.clear_autocast_cache()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the block after ``seconds``, as Ctrl-C would: between two instructions of Python.

    What the block has switched in torch for this thread, gradients and autocast, is then as before. A kernel or a
    compiler that runs at that moment is completed first. The limit needs the signal ``SIGALRM``. It has no effect
    outside the main thread, on Windows, or if the program uses this signal itself.

    Args:
        seconds: Above 0.

    Raises:
        TimeUp: The time is over.
    """
    if not _is_free():
        yield
        return
    running = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        if running:
            raise TimeUp

    modes, before = _Modes.now(), signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
        try:
            yield
        finally:
            running = False
    except TimeUp:
        modes.restore()
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_free() -> bool:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0] == 0
