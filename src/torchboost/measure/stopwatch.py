"""The clock of the project: fair, paired timing of several callables."""

from __future__ import annotations

import functools
import gc
import math
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from torchboost.core.torch_private import compiled_graphs, cpu_capabilities
from torchboost.measure.evidence import Environment, Interval, Ratio
from torchboost.measure.statistics import bootstrap_median, detectable_ratio, paired_ratio

__all__ = [
    "Clock",
    "Comparison",
    "Progress",
    "Warmup",
    "collector_off",
    "compare",
    "device_name",
    "environment",
    "interrupts_kept",
    "package_version",
    "processor_name",
]


class Progress(Protocol):
    """Called while work is in progress. The command line prints it."""

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Report that ``done`` of ``total`` parts of ``phase`` are done. ``note`` names the current part."""


@dataclass(frozen=True, slots=True)
class Clock:
    """A clock that is read when the device has finished its queue.

    Args:
        read: Returns seconds, monotonically.
        synchronize: Waits for the device. Called before each reading.
    """

    read: Callable[[], float] = time.perf_counter
    synchronize: Callable[[], object] = bool

    @classmethod
    def of(cls, device: torch.device | str = "cpu") -> Clock:
        """Return a clock that waits for ``device`` before each reading."""
        device = torch.device(device)
        if device.type in ("cpu", "meta"):
            return cls()
        return cls(synchronize=functools.partial(torch.accelerator.synchronize, device))

    def __call__(self) -> float:
        """Wait for the device and return the seconds."""
        self.synchronize()
        return self.read()


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """The rule by which a contestant counts as warm.

    It is warm if no graph was compiled in the last ``window`` calls and their median time is within ``tolerance`` of
    the median of the ``window`` calls before them. It counts as unsettled after ``limit`` calls or ``seconds``,
    whichever comes first, but not before ``least`` calls.

    Args:
        least: Minimum number of calls.
        window: Number of calls whose times are compared.
        tolerance: Relative difference that is allowed.
        limit: Maximum number of calls.
        seconds: Maximum time. The current call is finished.
    """

    least: int = 3
    window: int = 3
    tolerance: float = 0.15
    limit: int = 40
    seconds: float = 180.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Raw times of all contestants in the same rounds, and the intervals computed from them.

    Args:
        samples: Name -> seconds per call, one entry per round.
        warmup_seconds: Name -> seconds of warm-up, including compilation.
        baselines: Names that the others are compared with.
        unsettled: Names whose time still changed at the end of the warm-up.
    """

    samples: Mapping[str, list[float]]
    warmup_seconds: Mapping[str, float]
    baselines: tuple[str, ...]
    unsettled: tuple[str, ...] = ()

    def step_seconds(self, name: str) -> Interval:
        """Return the median time of a call with its interval."""
        return bootstrap_median(self.samples[name])

    def ratio(self, name: str, baseline: str) -> Ratio:
        """Return how many times as fast as ``baseline`` ``name`` is, paired by round."""
        base, other = self.samples[baseline], self.samples[name]
        detectable = detectable_ratio(base, other)
        return Ratio(
            baseline=baseline,
            interval=paired_ratio(base, other),
            pairs=len(other),
            detectable=detectable if math.isfinite(detectable) else None,
        )

    def ratios(self, name: str) -> list[Ratio]:
        """Return the ratios of ``name`` to every baseline except itself."""
        return [self.ratio(name, baseline) for baseline in self.baselines if baseline != name]


def compare(
    contestants: Mapping[str, Callable[[], object]],
    *,
    baselines: Sequence[str],
    timed: Mapping[str, Callable[[], object]] | None = None,
    around: Mapping[str, Callable[[], AbstractContextManager[None]]] | None = None,
    pairs: int = 20,
    calls: int = 1,
    warmup: Warmup | None = None,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Time several callables against each other in one process.

    Each contestant is warmed up until all of its graphs are compiled. Then there are ``pairs`` rounds, in each of which
    every contestant is timed once. Two consecutive rounds use a random order and its reverse (B C A, A C B), so a slow
    drift of the machine affects all contestants equally, and a short disturbance affects one round, which the median
    ignores. The garbage collector is off during the timing.

    Args:
        contestants: Name -> one step of it, called many times.
        baselines: Names that the others are compared with.
        timed: Name -> the callable to time once the contestant is warm, such as a step on batches that it has not seen.
            By default the same.
        around: Name -> makes the context of its calls, which is not timed. By default none.
        pairs: Number of rounds.
        calls: Calls per sample. Use a whole cycle if steps differ, and several calls for very short steps.
        warmup: The rule by which a contestant counts as warm.
        clock: By default the wall clock. Pass ``Clock.of(device)`` for a GPU.
        progress: Called for every contestant that is warmed up and every round.

    Raises:
        ValueError: There are no contestants, a baseline is unknown, or ``pairs`` or ``calls`` is below 1. Nothing is
            called.
    """
    if not contestants:
        raise ValueError("found no contestants; give at least one.")
    unknown = [name for name in baselines if name not in contestants]
    if unknown:
        raise ValueError(f"baselines: found {unknown}; allowed are the contestants {list(contestants)}.")
    if pairs < 1 or calls < 1:
        raise ValueError(f"found pairs={pairs}, calls={calls}; both must be at least 1.")
    clock = clock if clock is not None else Clock()
    tell = progress if progress is not None else lambda *_: None
    warm, unsettled = {}, []
    for done, (name, call) in enumerate(contestants.items()):
        tell("warm-up", done, len(contestants), name)
        with (around or {}).get(name, nullcontext)():
            warm[name], settled = _warm_up(call, warmup if warmup is not None else Warmup(), clock)
        if not settled:
            unsettled.append(name)
    tell("warm-up", len(contestants), len(contestants))
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    gc.collect()
    with collector_off():
        shuffler, order = random.Random(0), list(contestants)
        for done in range(pairs):
            if done % 2:
                order.reverse()
            else:
                shuffler.shuffle(order)
            tell("timing", done, pairs)
            gc.collect(0)
            for name in order:
                with (around or {}).get(name, nullcontext)():
                    samples[name].append(seconds_of((timed or contestants)[name], clock, calls))
    tell("timing", pairs, pairs)
    return Comparison(samples=samples, warmup_seconds=warm, baselines=tuple(baselines), unsettled=tuple(unsettled))


def environment(device: torch.device | str = "cpu") -> Environment:
    """Describe the machine and the versions of a result.

    ``commit`` names the checkout that contains this package, with ``+changes`` if files differ from it. In a copy
    without git it is read from a file ``COMMIT`` next to ``src``. It is empty for an installed package.
    """
    device = torch.device(device)
    return Environment(
        torchboost=package_version(),
        torch=torch.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        processor=processor_name(),
        instructions=instructions(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        device=device_name(device),
        commit=_commit(Path(__file__).resolve().parents[3]),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def package_version(name: str = "torchboost") -> str:
    """Return the version of a package, or that it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def processor_name() -> str:
    """Return the name of the processor as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def instructions() -> str:
    """Return the vector instructions that torch computes with, such as ``AVX512, avx512_bf16``."""
    widest = torch.backends.cpu.get_cpu_capability()
    capabilities = cpu_capabilities()
    further = (name for name in ("avx512_bf16", "amx_bf16") if capabilities.get(name) and widest.startswith("AVX512"))
    return ", ".join((widest, *further))


def device_name(device: torch.device | str) -> str:
    """Return the name of a GPU, or the type of any other device."""
    device = torch.device(device)
    module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else device.type


def _warm_up(call: Callable[[], object], rule: Warmup, clock: Clock) -> tuple[float, bool]:
    """Return the seconds of the warm-up and whether the time settled."""
    times: list[float] = []
    graphs: list[int] = []
    while len(times) < rule.limit and (len(times) < rule.least or sum(times) < rule.seconds):
        times.append(seconds_of(call, clock))
        graphs.append(compiled_graphs())
        if len(times) >= max(rule.least, 2 * rule.window) and len(set(graphs[-rule.window - 1 :])) == 1:
            last, before = median(times[-rule.window :]), median(times[-2 * rule.window : -rule.window])
            if abs(last - before) <= rule.tolerance * before:
                return sum(times), True
    return sum(times), rule.limit == 0


def seconds_of(call: Callable[[], object], clock: Clock, calls: int = 1) -> float:
    """Return the seconds of a call, on average over several."""
    start = clock()
    for _ in range(calls):
        call()
    return (clock() - start) / calls


def pair_of(first: Callable[[], float], second: Callable[[], float], *, turned: bool) -> tuple[float, float]:
    """Return two measurements. If ``turned``, the second one is made before the first."""
    if turned:
        later = second()
        return first(), later
    return first(), second()


@contextmanager
def collector_off() -> Iterator[None]:
    """Switch the garbage collector off. It is on again at the end if it was on before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Repeat a Ctrl-C that came in a callback of the garbage collector. There Python prints it and continues.

    One that comes at any moment of ``gc.collect()`` is raised in the next callback of a weak reference.
    """
    before = sys.unraisablehook

    def repeat(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # At once, it would be dropped in here too.
            threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()
        else:
            before(unraisable)

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = before


def _commit(root: Path) -> str:
    def git(*words: str) -> str:
        try:
            command = ["git", "-C", str(root), *words]
            return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""

    head = git("rev-parse", "HEAD") if (root / ".git").exists() else ""
    if not head and (root / "COMMIT").is_file():
        return (root / "COMMIT").read_text(encoding="utf-8").strip()
    return f"{head}+changes" if head and git("status", "--porcelain", "--untracked-files=no") else head
