"""Decide how a loader should load: windows of batches in each way, in turn, and a comparison of the pairs."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from torchboost.data.pipes import OWN, TWICE, Variant
from torchboost.measure.evidence import Interval
from torchboost.measure.statistics import exact_median

SHARE = 0.05
"""Least share of waiting at which anything is tried."""
LEAST_WAIT = 0.0005
"""Seconds of waiting per batch below which nothing is tried: to fetch a batch from a worker takes as long."""
GAIN = 1.02
"""A way is kept if the whole interval of its gain is above this."""
SETTLE, LOOK = 5, 10
"""Batches at the beginning that are not counted, and batches of one look at the share."""
WORSE = 1.0
"""Workers are given up if waiting for them takes longer than this multiple of the wait before the trial."""
FEWEST, MOST_PAIRS = 6, 12
MOST_WORKERS = 8
_WINDOW_SECONDS, _LEAST, _MOST = 0.2, 6, 40
"""A window is to last this long, with at least and at most this number of measured batches."""
_REST = 4.0
"""The time between two calls counts at most this multiple of its median: evaluations and checkpoints are no steps."""


@dataclass
class Reading:
    """The measurements of a window."""

    waits: list[float] = field(default_factory=list)  # seconds in next(), one per batch
    rests: list[float] = field(default_factory=list)  # seconds until the next call of it, one per batch
    moved: str = ""  # a generator that moved while a batch was loaded
    processor: float = 0.0  # seconds of processor time in next()
    changed: bool = False  # whether the loop changed the data set between two batches
    bytes: int = 0  # of the largest batch
    can_pin: bool = True  # whether batches in pinned memory have the same types

    def part(self, skip: int, tail: int) -> Reading:
        """Return the reading without some batches at the beginning and the end."""
        end = max(len(self.rests) - tail, 0)
        return Reading(waits=self.waits[skip:end], rests=self.rests[skip:end])

    @property
    def wait(self) -> float:
        """Mean seconds of waiting per batch."""
        return fmean(self.waits) if self.waits else 0.0

    @property
    def rest(self) -> float:
        """Mean seconds of the rest of a step, long pauses shortened."""
        most = _REST * median(self.rests) if self.rests else 0.0
        return fmean(min(rest, most) for rest in self.rests) if self.rests else 0.0

    @property
    def step(self) -> float:
        """Mean seconds of a step."""
        return max(self.wait + self.rest, 1e-9)

    @property
    def share(self) -> float:
        """The share of waiting in a step, between 0 and 1."""
        return self.wait / self.step


@dataclass(frozen=True)
class Window:
    """The next task of the loader. If an epoch ends before a window does, the window continues in the next one."""

    variant: Variant = OWN
    count: int | None = None  # of batches; None until the end of the epoch
    compared: int = 0  # the first batches that are also loaded in the process of the loop, and compared
    watched: bool = False  # whether to answer with a reason against workers if there is one, such as moved generators


@dataclass(frozen=True)
class Race:
    """The result of one comparison of a way with the previous way."""

    variant: Variant
    gain: Interval  # seconds of a step before, divided by the seconds with the variant
    pairs: int  # of windows
    before: Reading  # one batch with the medians of the batches before
    after: Reading

    @property
    def is_kept(self) -> bool:
        """Whether the gain is certain, and more than 2 %."""
        return self.gain.low > GAIN

    def __str__(self) -> str:
        """Return the result in words."""
        gain = self.gain
        return (
            f"{self.variant}: a step takes {_ms(self.after.step)} instead of {_ms(self.before.step)} "
            f"({gain.mid:.2f}x, interval {gain.low:.2f} to {gain.high:.2f}, {self.pairs} pairs)"
        )


Result = Reading | str
"""A text says why a way of loading was given up in the middle of a window, or why workers are not used."""
Script = Generator[Window, Result, Any]


class Trial:
    """Looks whether waiting for data is a real share of a step, and if so tries other ways to load.

    ``cores`` are the processors of this process. ``pins`` says whether pinned memory may be tried.
    """

    def __init__(self, *, cores: float, pins: bool) -> None:
        self._cores, self._pins = cores, pins
        self.chosen = OWN
        self.phase = "measuring"  # then "trying", then "decided"
        self.reason = ""  # why workers were excluded, empty if they were not
        self.races: list[Race] = []
        self.first: Reading | None = None  # the one that led to the trial
        self.last = Reading()  # the latest one in the way that is used
        self.compared = 0  # batches that were loaded both ways and were equal
        self._script = self._run()
        self.window = next(self._script)  # the present task of the loader

    def answer(self, result: Result) -> None:
        """Take the result of the window, and set the next one."""
        self.window = self._script.send(result)

    def _run(self) -> Script:
        reading = yield from self._need()
        self.first, self.phase = reading, "trying"
        self.reason = yield from self._look(reading)
        if not self.reason:
            yield from self._try_workers()
        if self._pins and self.chosen.workers:
            yield from self._race(replace(self.chosen, pin=True))
        self.phase = "decided"
        yield from self._use()

    def _need(self) -> Generator[Window, Result, Reading]:
        """Read until the share of waiting is high in two looks in a row. A look may extend over several epochs."""
        yield Window(count=SETTLE)
        high = 0
        while True:
            result = yield Window(count=LOOK)
            if isinstance(result, Reading):
                self.last = result
                high = high + 1 if result.share > SHARE and result.wait > LEAST_WAIT else 0
                if high == 2:
                    return result

    def _look(self, reading: Reading) -> Generator[Window, Result, str]:
        """Return why workers must be excluded, or an empty text if they can be tried."""
        watched = yield Window(count=3, watched=True)
        if isinstance(watched, str):
            return watched
        self._pins = self._pins and watched.can_pin
        self._needed = math.ceil(1.5 * reading.wait / max(reading.rest, 1e-6))
        busy = max(watched.processor / max(sum(watched.waits), 1e-9), 0.05)
        self._most = max(1, min(MOST_WORKERS, int(self._cores / busy)))
        return ""

    def _try_workers(self) -> Script:
        first = Variant(max(1, min(self._needed, self._most)))
        kept = yield from self._try(first)
        if self.reason:
            return
        if not kept and first.workers > 1:
            kept = yield from self._try(Variant(1))
        elif kept and self.last.share > SHARE and first.workers < self._most:
            yield from self._try(Variant(self._most))
        if kept and not self.reason and self.last.share > SHARE:
            yield from self._try(Variant(self.chosen.workers, prefetch=4))

    def _try(self, variant: Variant) -> Generator[Window, Result, bool]:
        """Compare the batches of a way with the loader's, then its time with the present choice's."""
        count = variant.workers * TWICE
        result = yield Window(variant, count=count, compared=count)
        if isinstance(result, str):
            self._leave(result)
            return False
        return (yield from self._race(variant))

    def _race(self, variant: Variant) -> Generator[Window, Result, bool]:
        base, readings = self.chosen, ([], [])
        ways = (base, variant)
        while True:
            order = (0, 1) if len(readings[0]) % 2 == 0 else (1, 0)
            for way in order:
                reading = yield from self._measured(ways[way])
                if isinstance(reading, str):
                    self._leave(reading)
                    return False
                readings[way].append(reading)
            race = _judged(variant, *readings)
            if race is not None:
                self.races.append(race)
                if race.is_kept:
                    self.chosen, self.last = variant, race.after
                return race.is_kept

    def _measured(self, variant: Variant) -> Generator[Window, Result, Result]:
        """Read a window in one way, and return its steady part."""
        step = self.first.step if self.first is not None else 1.0
        steps = max(_LEAST, min(_MOST, round(_WINDOW_SECONDS / step)))
        margin = max(variant.ahead, 1)
        result = yield Window(variant, count=steps + 2 * margin)
        return result if isinstance(result, str) else result.part(margin, margin)

    def _leave(self, reason: str) -> None:
        """Use no workers from now on."""
        self.reason, self.chosen = reason, OWN

    def _use(self) -> Script:
        """Use the choice, as long as it pays and its batches are equal."""
        slow = 0
        while True:
            result = yield Window(self.chosen, compared=int(self.chosen.workers > 0))
            if isinstance(result, str):
                self._leave(result)
            else:
                self.last = result
                slower = self.chosen.workers and self.first is not None and result.wait > WORSE * self.first.wait
                slow = slow + 1 if slower else 0
                if slow == 2:
                    self._leave("over two epochs, waiting for them took longer than loading without them")


def _judged(variant: Variant, before: Sequence[Reading], after: Sequence[Reading]) -> Race | None:
    """Return the result of a comparison, or None if further pairs are needed."""
    ratios = [one.step / two.step for one, two in zip(before, after, strict=True)]
    count = len(ratios)
    if count == 3 and max(ratios) < 1:
        gain = Interval(low=min(ratios), mid=median(ratios), high=max(ratios), confidence=0.75)
    elif count < FEWEST or count % 3:
        return None
    else:
        gain = exact_median(ratios)
        if gain.low <= GAIN <= gain.high and count < MOST_PAIRS:
            return None
    return Race(variant, gain, count, _typical(before), _typical(after))


def _typical(readings: Sequence[Reading]) -> Reading:
    return Reading([median(reading.wait for reading in readings)], [median(reading.rest for reading in readings)])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
