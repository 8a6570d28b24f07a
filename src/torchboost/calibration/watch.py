"""Notice that training is no longer as it was at the trial: slower steps, or inputs of another size."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchboost.calibration.next_call import Gate, entries_in, is_training_call
from torchboost.calibration.passes import Call
from torchboost.core.algorithm import Attachment
from torchboost.core.torch_private import compiled_call, compiled_graphs, interceptor_of

__all__ = ["StepWatch"]

_WINDOW = 50
_SKIPPED = 5
"""Steps at the beginning that are not counted: compilation, first allocations."""
_SLOWER = 1.3
_WINDOWS = 2
"""So many windows in a row must be slower, so that a pause or a busy minute does not count."""
_RESIZED = 0.25
_SAMPLES = 4
"""The inputs of so many sampled calls in a row must be larger, or smaller, so that padding to varying lengths does not
count."""


class StepWatch(Attachment):
    """Compares steps and inputs with those of the trial, and reports once if a step takes 30 % longer or inputs change.

    Time: the median of 50 steps counts, twice in a row. Evaluation, checkpoints and pauses are single long intervals,
    which a median ignores.

    Size: after each 50 steps, the entries of the inputs of the next training call are counted. If the number is more
    than 25 % above, or below, four times in a row, this is reported. If the loop compiled something after the trial,
    inputs are not counted, because this could compile the model once more.

    Args:
        model: The bare model, as the loop or DDP calls it.
        optimizer: Each of its steps is an update.
        report: Called once, after an update, with what was found: the time of a step, the size of the inputs, or both.
        entries: Entries of the inputs of the trial. If None, the first ones that are counted are compared with.
        read: The clock.

    Cost: one reading of a clock and one entry of a list per update; the size of one call in 50.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        report: Callable[[str], None],
        *,
        entries: int | None = None,
        read: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self._report, self._read = model, report, read
        self._last: float | None = None
        self._skip = _SKIPPED
        self._times: list[float] = []
        self._usual: float | None = None
        self._slow = 0
        self._reference = "before" if entries is None else "at the trial"
        self._usual_entries, self._entries = entries, 0
        self._resized, self._side = 0, 0
        self._next: Gate | None = None
        self._over = False
        self._graphs = compiled_graphs()
        super().__init__(optimizer.register_step_post_hook(self._look), undo=self._stop_counting)

    def _look(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._over:
            return
        now = self._read()
        last, self._last = self._last, now
        if last is None or self._skip > 0:
            self._skip -= 1
            return
        self._times.append(now - last)
        # One step more after each odd size, so that it is not the short last batch of an epoch each time.
        if len(self._times) >= _WINDOW + self._resized:
            seconds = median(self._times)
            self._times.clear()
            self._judge(seconds)

    def _judge(self, seconds: float) -> None:
        usual = self._usual = seconds if self._usual is None else self._usual
        self._slow = self._slow + 1 if seconds > _SLOWER * usual else 0
        slower, resized = self._slow >= _WINDOWS, self._resized >= _SAMPLES
        if not slower and not resized:
            self._count_next()
            return
        found = [f"a step takes {1e3 * seconds:.1f} ms, after the trial it took {1e3 * usual:.1f} ms"] if slower else []
        if self._resized:
            found.append(f"the inputs have {self._entries:,} entries, {self._reference} {self._usual_entries:,}")
        self._over = True  # torch walks through the hooks of the step just now, so this one stays until remove()
        self._report(", and ".join(found))

    def _count_next(self) -> None:
        compiled_elsewhere = compiled_call(self._model) is None and compiled_graphs() != self._graphs
        if interceptor_of(self._model) is None and not compiled_elsewhere:
            self._next = Gate(self._model, self._seen)

    def _seen(self, call: Call) -> bool:
        if not is_training_call(self._model, call):
            return False
        self._next, self._entries = None, entries_in(call)
        entries = self._entries
        usual = self._usual_entries = entries if self._usual_entries is None else self._usual_entries
        side = (entries > (1 + _RESIZED) * usual) - (entries < (1 - _RESIZED) * usual)
        self._resized = self._resized + 1 if side and side == self._side else abs(side)
        self._side = side
        return True

    def _stop_counting(self) -> None:
        if self._next is not None:
            self._next.remove()
