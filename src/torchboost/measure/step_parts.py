"""The parts of a training step and how long each takes: data loading, forward, backward, update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from torchboost.errors import IncompatibleError
from torchboost.measure.stopwatch import Clock, Progress

__all__ = ["LOADING", "StepParts", "time_step_parts"]

LOADING = "data loading"
PARTS = (LOADING, "forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class StepParts:
    """The times of the parts of several steps.

    Attributes:
        seconds: Part -> seconds, one entry per step. The parts are data loading, forward, backward and optimizer.
    """

    seconds: Mapping[str, list[float]]

    @property
    def steps(self) -> int:
        """Number of measured steps."""
        return len(self.seconds[LOADING])

    def median(self, part: str) -> float:
        """Return the median seconds of a part."""
        return median(self.seconds[part])

    def share(self, part: str) -> float:
        """Return the share of a part in the total time of all steps, between 0 and 1.

        Totals are compared and not medians: a loader with workers delivers several batches at once, and then lets the
        loop wait for the next ones.
        """
        total = sum(map(sum, self.seconds.values()))
        return sum(self.seconds[part]) / total if total > 0 else 0.0


def time_step_parts(
    batches: Iterable[Any],
    *,
    load: Callable[[Any], Any],
    forward: Callable[[Any], Tensor],
    update: Callable[[], object],
    steps: int = 20,
    warmup: int = 3,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> StepParts:
    """Train some steps and time their parts. The device is waited for after each part.

    If the batches end, they are iterated again, and the start of the new iterator counts as loading. If they can be
    iterated only once, the steps end with them.

    Args:
        batches: One epoch.
        load: Moves a batch to the device; counts as loading.
        forward: Maps a batch to its loss.
        update: Updates the weights and clears the gradients.
        steps: Maximum number of measured steps.
        warmup: Number of steps before them, which are not measured.
        clock: By default the wall clock. Pass ``Clock.of(device)`` for a GPU.
        progress: Called after every step.

    Raises:
        ValueError: ``steps`` is below 1, or ``warmup`` is negative.
        IncompatibleError: There are not more batches than steps of the warm-up.
    """
    if steps < 1 or warmup < 0:
        raise ValueError(f"found steps={steps}, warmup={warmup}; needed: steps >= 1, warmup >= 0.")
    clock = clock if clock is not None else Clock()
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    endless = _again(batches)
    for done in range(warmup + steps):
        marks = [clock()]
        batch = next(endless, None)
        if batch is None:
            break
        batch = load(batch[0])
        marks.append(clock())
        loss = forward(batch)
        marks.append(clock())
        loss.backward()
        marks.append(clock())
        update()
        marks.append(clock())
        if done >= warmup:
            for part, start, end in zip(PARTS, marks, marks[1:], strict=False):
                seconds[part].append(end - start)
        if progress is not None:
            progress("steps", done + 1, warmup + steps)
    if not seconds[LOADING]:
        raise IncompatibleError(f"the batches ended in the warm-up; needed: more than {warmup} of them.")
    return StepParts(seconds)


def _again(batches: Iterable[Any]) -> Iterator[tuple[Any]]:
    """Yield each batch in a tuple, so that None can be one. Start again at the end, unless there is nothing left."""
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield (batch,)
        if empty or iter(batches) is batches:
            return
