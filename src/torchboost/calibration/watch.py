"""Notice that training steps have become slower than they were after the trial."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from torch.optim import Optimizer

from torchboost.core.algorithm import Attachment

__all__ = ["StepWatch"]

_WINDOW = 50
_SKIPPED = 5
"""Steps at the beginning that are not counted: compilation, first allocations."""
_SLOWER = 1.3
_WINDOWS = 2
"""So many windows in a row must be slower, so that a pause or a busy minute does not count."""


class StepWatch(Attachment):
    """Compares the time between updates with that of the first ones, and reports once if it has grown by 30 %.

    The median of 50 steps counts, twice in a row. Evaluation, checkpoints and pauses are single long intervals, which a
    median ignores.

    Args:
        optimizer: Each of its steps is an update.
        report: Called once with the median seconds of a step before and now.
        read: The clock.

    Cost: one reading of a clock and one entry of a list per update.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        report: Callable[[float, float], None],
        *,
        read: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._report, self._read = report, read
        self._last: float | None = None
        self._skip = _SKIPPED
        self._times: list[float] = []
        self._usual: float | None = None
        self._slow = 0
        super().__init__(optimizer.register_step_post_hook(self._look))

    def _look(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        now = self._read()
        last, self._last = self._last, now
        if last is None or self._skip > 0:
            self._skip -= 1
            return
        self._times.append(now - last)
        if len(self._times) >= _WINDOW:
            self._judge(median(self._times))
            self._times.clear()

    def _judge(self, seconds: float) -> None:
        if self._usual is None:
            self._usual = seconds
            return
        self._slow = self._slow + 1 if seconds > _SLOWER * self._usual else 0
        if self._slow >= _WINDOWS:
            self.remove()
            self._report(self._usual, seconds)
