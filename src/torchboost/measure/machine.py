"""How fast this machine multiplies in float32 and bfloat16, and how fast it copies: short measurements."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = [
    "PAYS",
    "PRIOR_SECONDS",
    "STAYS",
    "Kind",
    "Products",
    "Rung",
    "climb",
    "copy_bandwidth",
    "half_speed",
    "products",
]

Kind = Literal["matrix product", "convolution"]

Call = Callable[[], object]
Timer = Callable[[Call], float]

PRIOR_SECONDS = 0.1
"""Time limit of :func:`half_speed` for one kind on the CPU, so that both kinds take at most twice as long."""

PAIRS = 9
LEAST_PAIRS = 3
"""Pairs that a verdict needs."""
BUSY = 5.0
"""The pairs of the smallest size may take so many times the time limit, since without them nothing is known."""
PAYS = 1.25
"""Least ratio at which bfloat16 counts as fast. Far enough from 1 that the noise of a measurement does not decide."""
STAYS = 1.1
"""Least ratio at which it stays so if it counted as fast in an earlier measurement."""
FAR = 5.0
"""If one precision is that many times as fast as the other, larger sizes do not change which one is faster."""
FAR_SECONDS = 0.002
"""Least time of the slower call for that conclusion: a shorter one may be mostly the overhead of a call."""

MATRIX_SIZES = {"cpu": (128, 256, 512), "cuda": (512, 2048, 4096)}
IMAGES = {"cpu": ((2, 32), (8, 32), (8, 64)), "cuda": ((64, 64), (256, 64), (256, 128))}
"""(batch, channels) of the images, which have 16 x 16 pixels."""
SIDE = 16
COPIED = {"cpu": 128 * 2**20, "cuda": 1024 * 2**20}
"""Bytes of the copied tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """The speed of one kind of product, forward and backward together, in both precisions.

    Attributes:
        kind: What was multiplied.
        size: The size of the operands, in words; empty if nothing was measured.
        ratio: How many times as fast bfloat16 is as float32: the median over the pairs, or the ratio of the fastest
            times if that is less. On a machine that other programs use, one of the two alone is too high more often.
            None if a product raised an error.
        float32: Floating-point operations per second of the fastest float32 call.
        bfloat16: The same in bfloat16.
        pairs: Number of timed pairs.
        seconds: Time that the measurement took.
        in_time: Whether it ended within its time limit. If it did not, other programs use the machine, or it is slow.
        fault: First line of the error that a product raised; empty if there was none.
    """

    kind: Kind
    size: str = ""
    ratio: float | None = None
    float32: float = 0.0
    bfloat16: float = 0.0
    pairs: int = 0
    seconds: float = 0.0
    in_time: bool = True
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
        """Say in one clause what was measured."""
        if self.ratio is None:
            return f"a bfloat16 {self.kind} does not run here: {self.fault}"
        if not self.is_judged:
            return f"the machine is too slow or too busy to time a bfloat16 {self.kind} in {self.seconds:.1f} s"
        times = 1 / self.ratio
        told = f"{times:.1f}" if times >= 1.05 else f"{times:.2f}"
        return f"a bfloat16 {self.kind} takes {told} times the time of a float32 one here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One size of a product.

    Args:
        size: The size in words.
        work: Floating-point operations of one call.
        build: Returns the call for a precision.
    """

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


def products(kind: Kind, device: torch.device | str = "cpu", *, seconds: float = 1.0, pairs: int = PAIRS) -> Products:
    """Measure a product and the two products of its backward pass in float32 and bfloat16, in alternating order.

    A matrix product multiplies square matrices. A convolution is 3 x 3 on channels-last images of 16 x 16 pixels. The
    sizes grow as long as the next one fits in the time limit (see :func:`climb`). No random numbers are drawn and no
    graph is recorded. Autocast is off meanwhile. The CPU is timed with the wall clock, a CUDA device with events.

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
            timer = _timer(device)
            if device.type == "cuda":
                for dtype in (torch.float32, torch.bfloat16):
                    timer(rungs[0].build(dtype))
            return climb(kind, rungs, seconds=seconds, pairs=pairs, timer=timer)
    except (RuntimeError, AssertionError) as error:
        return Products(kind=kind, fault=str(error).partition("\n")[0])


def climb(
    kind: Kind,
    rungs: Sequence[Rung],
    *,
    seconds: float,
    pairs: int = PAIRS,
    timer: Timer,
    clock: Callable[[], float] = time.perf_counter,
) -> Products:
    """Time growing products in both precisions until the answer is clear or the time is used up.

    A next size is tried if its warm-up and three pairs are expected to fit, judged by the last size and the number of
    operations. It is not tried if one precision is already five times as fast as the other and the slower call takes
    2 ms or more. The result is that of the last size with at least three pairs. If no size has three, it is that of the
    first one, whose pairs may take up to five times the limit, on a machine that other programs use. A call that has
    begun is finished.

    Args:
        kind: For the result.
        rungs: The sizes, in growing order.
        seconds: Time limit.
        pairs: Maximum number of pairs of one size.
        timer: Runs a call and returns its seconds.
        clock: Seconds, monotonically, for the time limit.
    """
    start = clock()
    found: Products | None = None
    cost, far = 0.0, False
    for position, rung in enumerate(rungs):
        last = position == len(rungs) - 1
        if found is not None:
            expected = cost * rung.work / rungs[position - 1].work
            if far or clock() - start + (1 + LEAST_PAIRS) * expected > seconds:
                break
        calls = {dtype: rung.build(dtype) for dtype in (torch.float32, torch.bfloat16)}
        for call in calls.values():
            timer(call)
        times: list[tuple[float, float]] = []
        while len(times) < (pairs if last else LEAST_PAIRS):
            limit = seconds * (BUSY if len(times) < LEAST_PAIRS and position == 0 else 1.0)
            if times and clock() - start + sum(times[-1]) > limit:
                break
            order = list(calls) if len(times) % 2 == 0 else list(reversed(calls))
            taken = {dtype: timer(calls[dtype]) for dtype in order}
            times.append((taken[torch.float32], taken[torch.bfloat16]))
        if found is None or len(times) >= LEAST_PAIRS:
            found = _summary(kind, rung, times, clock() - start)
        far = _are_far(times)
        cost = sum(map(median, zip(*times, strict=True)))
    assert found is not None
    return replace(found, in_time=clock() - start <= seconds)


def copy_bandwidth(device: torch.device | str = "cpu", *, copies: int = 7) -> float:
    """Return the bytes per second of a large copy within the memory of ``device``, read and written bytes together.

    The copied tensor has 128 MiB on the CPU and 1 GiB on CUDA, and the memory for two of them is needed. The fastest
    of the copies counts.

    Raises:
        ValueError: The type of the device is unknown.
    """
    device = torch.device(device)
    if device.type not in COPIED:
        raise ValueError(f"device: found {str(device)!r}; only {' and '.join(COPIED)} devices are measured.")
    source = torch.ones(COPIED[device.type] // 4, dtype=torch.float32, device=device)
    copied = torch.zeros_like(source)
    timer = _timer(device)
    with torch.no_grad():
        fastest = min(timer(lambda: copied.copy_(source)) for _ in range(1 + copies))
    return 2 * COPIED[device.type] / fastest


def _are_far(times: Sequence[tuple[float, float]]) -> bool:
    ratios = _ratios(times)
    slower = max(map(min, zip(*times, strict=True)))
    return (min(ratios) >= FAR or max(ratios) <= 1 / FAR) and slower >= FAR_SECONDS


def _ratios(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return how many times as fast bfloat16 is: the median over the pairs, and the ratio of the fastest times."""
    full, half = map(min, zip(*times, strict=True))
    return median(a / max(b, 1e-12) for a, b in times), full / max(half, 1e-12)


def _summary(kind: Kind, rung: Rung, times: Sequence[tuple[float, float]], seconds: float) -> Products:
    full, half = (max(min(column), 1e-12) for column in zip(*times, strict=True))
    return Products(
        kind=kind,
        size=rung.size,
        ratio=min(_ratios(times)),
        float32=rung.work / full,
        bfloat16=rung.work / half,
        pairs=len(times),
        seconds=seconds,
    )


def _timer(device: torch.device) -> Timer:
    if device.type != "cuda":

        def by_clock(call: Call) -> float:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        return by_clock

    def by_events(call: Call) -> float:
        with torch.cuda.device(device):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1000

    return by_events


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

    return [
        Rung(size=f"{n} x {n} x {n}", work=6.0 * n**3, build=functools.partial(built, n))
        for n in MATRIX_SIZES[device.type]
    ]


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

    return [
        Rung(
            size=f"{batch} x {channels} channels x {SIDE} x {SIDE}",
            work=6.0 * batch * SIDE**2 * 9 * channels**2,
            build=functools.partial(built, batch, channels),
        )
        for batch, channels in IMAGES[device.type]
    ]
