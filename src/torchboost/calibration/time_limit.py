"""Interrupt a block of a trial that takes longer than it may."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["TimeUp", "time_limit"]


class TimeUp(BaseException):
    """The time of a block is over. Not an ``Exception``, so that no handler inside the block catches it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the block after ``seconds``, as Ctrl-C would: between two instructions of Python.

    A kernel or a compiler that runs at that moment is completed first. The limit needs the signal ``SIGALRM``. It has
    no effect outside the main thread, on Windows, or if the program uses this signal itself.

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

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
        try:
            yield
        finally:
            running = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_free() -> bool:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0] == 0
