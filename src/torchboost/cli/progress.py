"""The progress of long commands on standard error: bars on a terminal, a few plain lines otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

__all__ = ["Display", "Lines", "display"]


class Display(Protocol):
    """A :class:`~torchboost.measure.stopwatch.Progress` that remembers the last phase."""

    phase: str

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` parts of ``phase`` are done."""
        ...


class Lines:
    """Prints one line at the start and the end of a phase, and at most ten lines in between."""

    def __init__(self, stream: TextIO) -> None:
        self.phase = ""
        self._stream = stream
        self._tenth = -1

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Print a line if the phase is new or another tenth of it is done."""
        tenth = 10 * done // max(total, 1)
        if phase == self.phase and tenth == self._tenth:
            return
        self.phase, self._tenth = phase, tenth
        print(f"{phase}: {done} of {total}{f' ({note})' if note else ''}", file=self._stream, flush=True)


@contextmanager
def display(stream: TextIO | None = None) -> Iterator[Display]:
    """Yield a display on ``stream``, by default standard error. Bars are removed at the end."""
    output = sys.stderr if stream is None else stream
    if not output.isatty():
        yield Lines(output)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=Console(file=output), transient=True) as bars:
        yield _Bars(bars)


class _Bars:
    """Draws one bar per phase."""

    def __init__(self, bars: object) -> None:
        from rich.progress import Progress, TaskID

        assert isinstance(bars, Progress)
        self.phase = ""
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        self.phase = phase
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total, note=note)
        self._bars.update(self._tasks[phase], completed=done, total=total, note=note)
