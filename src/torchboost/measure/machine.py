"""Measure this machine: the speed of its products and the peak memory of a piece of work."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchboost.measure.stopwatch import Clock, pair_of, seconds_of

__all__ = ["PAYS", "Kind", "PeakMemory", "Products", "half_speed", "products"]

Kind = Literal["matrix product", "convolution"]

Call = Callable[[], object]

PRIOR_SECONDS = 0.1
"""Time limit of :func:`half_speed` for one kind on the CPU, so that both kinds take at most twice as long."""

LEAST_PAIRS = 3
"""Pairs that a verdict needs."""
BUSY = 5.0
"""The pairs of the smallest size may take this multiple of the time limit, since without them nothing is known."""
PAYS = 1.25
"""Least ratio at which bfloat16 counts as fast. Far enough from 1 that the noise of a measurement does not decide."""

MATRIX_SIZES = {"cpu": (128, 256, 512), "cuda": (512, 2048, 4096)}
IMAGES = {"cpu": ((2, 32), (8, 32), (8, 64)), "cuda": ((64, 64), (256, 64), (256, 128))}
"""(batch, channels) of the images, which have 16 x 16 pixels."""
SIDE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """The speed of one kind of product, forward and backward together, in both precisions.

    Attributes:
        kind: The kind of product.
        size: The size of the operands, in words. Empty if nothing was measured.
        ratio: How many times as fast bfloat16 is as float32: the median over the pairs, or the ratio of the fastest
            times if that is less. On a machine that other programs use, one of the two alone is too high more often.
            None if a product raised an error.
        float32: Floating-point operations per second of the fastest float32 call.
        bfloat16: The same in bfloat16.
        pairs: Number of timed pairs.
        seconds: Time that the measurement took.
        fault: First line of the error that a product raised. Empty if there was none.
    """

    kind: Kind
    size: str = ""
    ratio: float | None = None
    float32: float = 0.0
    bfloat16: float = 0.0
    pairs: int = 0
    seconds: float = 0.0
    fault: str = ""

    @property
    def is_judged(self) -> bool:
        """Whether there are enough pairs for a verdict: three."""
        return self.ratio is not None and self.pairs >= LEAST_PAIRS

    @property
    def half_pays(self) -> bool:
        """Whether bfloat16 is at least 1.25 times as fast, in three pairs or more."""
        return self.ratio is not None and self.is_judged and self.ratio >= PAYS

    def __str__(self) -> str:
        """Return the measurement in one clause."""
        if self.ratio is None:
            return f"a bfloat16 {self.kind} does not run here: {self.fault}"
        if not self.is_judged:
            return f"the machine is too slow or too busy to time a bfloat16 {self.kind} in {self.seconds:.1f} s"
        times = 1 / self.ratio
        factor = f"{times:.1f}" if times >= 1.05 else f"{times:.2f}"
        return f"a bfloat16 {self.kind} takes {factor} times the time of a float32 one here"


class Rung(NamedTuple):
    """One size of a product: in words, the floating-point operations of a call, and what makes it for a precision."""

    size: str
    work: float
    build: Callable[[torch.dtype], Call]


def half_speed(kind: Kind, device: torch.device | str = "cpu") -> Products:
    """Return :func:`products` from a short measurement.

    Cost: at most 0.1 s on the CPU for each kind, 0.5 s if other programs use it, and a call that has begun is finished.

    Raises:
        ValueError: See :func:`products`.
    """
    return products(kind, device, seconds=PRIOR_SECONDS if torch.device(device).type == "cpu" else 1.0)


def products(kind: Kind, device: torch.device | str = "cpu", *, seconds: float = 1.0, pairs: int = 9) -> Products:
    """Measure a product and the two products of its backward pass in float32 and bfloat16, in alternating order.

    A matrix product multiplies square matrices. A convolution is 3 x 3 on channels-last images of 16 x 16 pixels. The
    sizes grow as long as the next one fits in the time limit (see :func:`climb`). No random numbers are drawn and no
    graph is recorded. Autocast is off meanwhile. The device is waited for after each call.

    Args:
        kind: ``"matrix product"`` or ``"convolution"``.
        device: A CPU or CUDA device.
        seconds: Time limit. On CUDA it begins after the first call, which loads the libraries.
        pairs: Maximum number of pairs of one size.

    Raises:
        ValueError: The kind or the type of the device is unknown.
    """
    device = torch.device(device)
    if kind not in get_args(Kind):
        raise ValueError(f"kind: found {kind!r}; allowed are {', '.join(map(repr, get_args(Kind)))}.")
    if device.type not in MATRIX_SIZES:
        raise ValueError(f"device: found {str(device)!r}; only {' and '.join(MATRIX_SIZES)} devices are measured.")
    rungs = _matrices(device) if kind == "matrix product" else _convolutions(device)
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            if device.type == "cuda":
                for dtype in (torch.float32, torch.bfloat16):
                    rungs[0].build(dtype)()
            return climb(kind, rungs, seconds=seconds, pairs=pairs, clock=Clock.of(device))
    except (RuntimeError, AssertionError) as error:
        return Products(kind=kind, fault=str(error).partition("\n")[0])


def climb(kind: Kind, rungs: Sequence[Rung], *, seconds: float, pairs: int = 9, clock: Clock) -> Products:
    """Time growing products in both precisions until the time is used up.

    A next size is tried if its warm-up and three pairs are expected to fit, judged by the last size and the number of
    operations. The result is the last size with at least three pairs. If no size has three, it is the first one,
    whose pairs may take up to five times the limit, on a machine that other programs use. A call that has
    begun is finished.

    Args:
        kind: For the result.
        rungs: The sizes, in growing order.
        seconds: Time limit.
        pairs: Maximum number of pairs of the largest size.
        clock: The clock of the device.
    """
    start, result, cost = clock(), None, 0.0
    for position, rung in enumerate(rungs):
        if position and clock() - start + (1 + LEAST_PAIRS) * cost * rung.work / rungs[position - 1].work > seconds:
            break
        calls = [rung.build(dtype) for dtype in (torch.float32, torch.bfloat16)]
        for call in calls:
            call()
        timed = [functools.partial(seconds_of, call, clock) for call in calls]
        times: list[tuple[float, float]] = []
        while len(times) < (LEAST_PAIRS if position < len(rungs) - 1 else pairs):
            limit = seconds * (BUSY if len(times) < LEAST_PAIRS and position == 0 else 1.0)
            if times and clock() - start + sum(times[-1]) > limit:
                break
            times.append(pair_of(*timed, turned=len(times) % 2 == 1))
        if result is None or len(times) >= LEAST_PAIRS:
            full, half = (max(min(column), 1e-12) for column in zip(*times, strict=True))
            result = Products(
                kind=kind,
                size=rung.size,
                ratio=min(median(a / max(b, 1e-12) for a, b in times), full / half),
                float32=rung.work / full,
                bfloat16=rung.work / half,
                pairs=len(times),
                seconds=clock() - start,
            )
        cost = sum(map(median, zip(*times, strict=True)))
    assert result is not None
    return result


def _filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values between -1 and 1 that are exact in both precisions, without random numbers."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count, device=device) % 13 - 6) / 8).to(dtype).view(shape)


def _matrices(device: torch.device) -> list[Rung]:
    def built(size: int, dtype: torch.dtype) -> Call:
        inputs, weight, gradient = (_filled((size, size), dtype, device) for _ in range(3))

        def call() -> None:
            torch.mm(inputs, weight)
            torch.mm(gradient, weight.t())
            torch.mm(inputs.t(), gradient)

        return call

    return [Rung(f"{n} x {n} x {n}", 6.0 * n**3, functools.partial(built, n)) for n in MATRIX_SIZES[device.type]]


def _convolutions(device: torch.device) -> list[Rung]:
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def built(batch: int, channels: int, dtype: torch.dtype) -> Call:
        shapes = ((batch, channels, SIDE, SIDE), (channels, channels, 3, 3), (batch, channels, SIDE, SIDE))
        inputs, weight, gradient = (
            _filled(shape, dtype, device).contiguous(memory_format=torch.channels_last) for shape in shapes
        )

        def call() -> None:
            torch.convolution(inputs, weight, None, *settings)
            # The operator itself: autograd would record a graph, and torch.nn.grad makes copies.
            torch.ops.aten.convolution_backward(gradient, inputs, weight, None, *settings, [True, True, False])

        return call

    rungs: list[Rung] = []
    for batch, channels in IMAGES[device.type]:
        work = 6.0 * batch * SIDE**2 * 9 * channels**2
        size = f"{batch} x {channels} channels x {SIDE} x {SIDE}"
        rungs.append(Rung(size, work, functools.partial(built, batch, channels)))
    return rungs


class PeakMemory:
    """Measures how far the memory of a ``with`` block rises above the memory held before it.

    On CUDA and XPU it is the memory that torch allocates on the device. On CPUs under Linux it is the resident memory
    of the whole process, libraries and threads included, whose record of the peak is reset. ``bytes`` is None
    elsewhere.

    Cost: a garbage collection.

    Args:
        device: Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
        self._device = device
        self._counts: Any = module if hasattr(module, "max_memory_allocated") else None
        self._before: int | None = None
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self._counts is not None:
            self._counts.reset_peak_memory_stats(self._device)
            self._before = self._counts.memory_allocated(self._device)
        elif self._device.type == "cpu":
            with contextlib.suppress(OSError, AttributeError):  # freed memory would hide a later use of it
                ctypes.CDLL(None).malloc_trim(0)
            self._before = _resident("VmRSS") if _reset() else None
        return self

    def __exit__(self, *_: object) -> None:
        counts = self._counts
        if self._before is not None:
            peak = _resident("VmHWM") if counts is None else counts.max_memory_allocated(self._device)
            self.bytes = None if peak is None else max(0, peak - self._before)


def _reset() -> bool:
    """Reset the peak of the resident memory, and return whether that is possible here."""
    with contextlib.suppress(OSError):
        return bool(Path("/proc/self/clear_refs").write_text("5", encoding="ascii"))
    return False


def _resident(name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return 1024 * int(line.split()[1])
    return None
