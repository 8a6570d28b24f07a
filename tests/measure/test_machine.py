"""The measurement of the machine: bounded in work, right about planted machines, and without a trace."""

from __future__ import annotations

import gc
import os
import random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from torchboost.measure import machine
from torchboost.measure.machine import (
    PRIOR_SECONDS,
    PeakMemory,
    Products,
    Rung,
    climb,
    products,
)
from torchboost.measure.stopwatch import Clock

SIZES = (128, 256, 512)
KINDS = ("matrix product", "convolution")
CPU = torch.device("cpu")
MEBIBYTE = 2**20


class Machine:
    """A machine whose clock moves only when it works.

    Args:
        full: Operations per second in float32.
        half: The same in bfloat16.
        overhead: Seconds of each call.
        first: Seconds that the first call of each kernel takes in addition.
        stalls: Share of the calls that are held up, for 0.02 seconds.
    """

    def __init__(
        self,
        full: float,
        half: float,
        *,
        half_overhead: float = 1e-5,
        first: float = 0.002,
        stalls: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        self.calls: list[tuple[int, torch.dtype]] = []
        self._speed = {torch.float32: full, torch.bfloat16: half}
        self._overhead = {torch.float32: 1e-5, torch.bfloat16: half_overhead}
        self._first, self._stalls = first, stalls
        self._random = random.Random(seed)

    def _work(self, size: int, dtype: torch.dtype) -> None:
        self.now += self._overhead[dtype] + 6.0 * size**3 / self._speed[dtype]
        self.now += self._first * ((size, dtype) not in self.calls)
        self.now += 0.02 * (self._random.random() < self._stalls)
        self.calls.append((size, dtype))

    def climbed(self) -> Products:
        rungs = [
            Rung(size=str(n), work=6.0 * n**3, build=lambda dtype, n=n: lambda: self._work(n, dtype)) for n in SIZES
        ]
        return climb("matrix product", rungs, seconds=PRIOR_SECONDS, clock=Clock(read=lambda: self.now))


def test_the_time_limit_is_kept_on_every_machine():
    amx, plain = Machine(2e11, 8e11, half_overhead=8e-5), Machine(2.5e11, 1.5e11, half_overhead=8e-5)
    emulated, slow = Machine(2e11, 4e9, half_overhead=4e-4), Machine(2e9, 1.5e9)
    for here, pays, size in ((amx, True, "512"), (plain, False, "512"), (emulated, False, "128"), (slow, False, "128")):
        found = here.climbed()
        assert (found.half_pays, found.size) == (pays, size)
        longest = max(6.0 * int(found.size) ** 3 / min(found.float32, found.bfloat16), 0.002)
        assert here.now <= PRIOR_SECONDS + longest
        assert found.seconds == pytest.approx(here.now)
        assert found.pairs >= 3


def test_overhead_of_short_calls_is_no_verdict_and_the_order_alternates():
    """Half precision is five times as slow at the smallest size, and faster at the largest."""
    here = Machine(2e11, 8e11, half_overhead=5e-4)
    assert here.climbed().half_pays
    assert (SIZES[-1], torch.bfloat16) in here.calls
    f, b = torch.float32, torch.bfloat16
    assert [dtype for size, dtype in here.calls if size == SIZES[0]][2:8] == [f, b, b, f, f, b]


def test_a_busy_machine_a_still_one_and_a_slow_one():
    busy = [Machine(2e11, 2e11, stalls=0.3, seed=seed).climbed() for seed in range(200)]
    assert sum(found.half_pays for found in busy) <= 12
    still = Machine(2e11, 8e11, first=0.06)  # another program takes the core during the warm-up, beyond the time limit
    found = still.climbed()
    assert (found.pairs, found.half_pays) == (3, True)
    assert still.now <= 5 * PRIOR_SECONDS
    slow = Machine(1e7, 2e7)
    found = slow.climbed()
    assert (found.pairs, found.half_pays, len(slow.calls)) == (1, False, 4)
    assert found.ratio == pytest.approx(2.0, rel=0.01)
    assert "too slow or too busy to time a bfloat16 matrix product" in str(found)


def test_real_products_do_the_work_of_the_two_passes():
    for kind, rungs in zip(KINDS, (machine._matrices(CPU), machine._convolutions(CPU)), strict=True):
        found = products(kind, seconds=60.0, pairs=3)
        assert (found.pairs, found.fault) == (3, "")
        assert found.ratio is not None
        assert 0 < found.ratio <= found.bfloat16 / found.float32 * (1 + 1e-9)
        assert min(found.float32, found.bfloat16) > 1e6
        assert f"a bfloat16 {kind} takes" in str(found)
        assert [rung.work for rung in rungs] == sorted(rung.work for rung in rungs)
        call = rungs[0].build(torch.float32)
        with FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == rungs[0].work


def test_nothing_of_torch_is_changed_and_nothing_is_left(monkeypatch):
    seen, multiply = set(), torch.mm

    def noted(a: Tensor, b: Tensor) -> Tensor:
        result = multiply(a, b)
        seen.add((a.dtype, result.dtype))
        return result

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())

    monkeypatch.setattr(torch, "mm", noted)
    products("convolution", seconds=0.01)
    drawn, before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()), tensors()
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            for kind in KINDS:
                assert not products(kind, seconds=0.01).fault
            assert torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16
            assert torch.get_default_dtype() is torch.float64
            assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert seen == {(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)}  # autocast does not reach them
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert drawn[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    del drawn
    assert tensors() <= before  # of other tests, more may be collected meanwhile


def test_what_cannot_be_measured_is_said(monkeypatch):
    def refuse(*args: object) -> None:
        raise RuntimeError("could not create a primitive\nin two lines")

    with pytest.raises(ValueError, match="kind: found 'sum'; allowed are 'matrix product', 'convolution'"):
        products("sum")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="device: found 'meta'; only cpu and cuda devices are measured"):
        products("convolution", "meta")
    assert torch.cuda.is_available() or products("matrix product", "cuda").fault
    monkeypatch.setattr(torch, "mm", refuse)
    found = products("matrix product")
    assert (found.ratio, found.half_pays) == (None, False)
    assert str(found) == "a bfloat16 matrix product does not run here: could not create a primitive"


@pytest.mark.gpu
def test_a_gpu():
    for kind in KINDS:
        found = products(kind, "cuda")
        assert not found.fault
        assert found.pairs >= 3
    with PeakMemory(torch.device("cuda")) as peak:
        held = torch.ones(10 * MEBIBYTE, device="cuda")
        del held
    assert peak.bytes == 40 * MEBIBYTE


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not tell the peak")
def test_the_peak_is_that_of_the_work_and_not_of_what_was_before():
    large = torch.ones(30 * MEBIBYTE)
    del large
    held = torch.ones(20 * MEBIBYTE)
    with PeakMemory(CPU) as peak:
        held += 1
    assert peak.bytes is not None
    assert peak.bytes < 20 * MEBIBYTE
    with PeakMemory(CPU) as peak:
        freed = torch.ones(10 * MEBIBYTE)
        del freed
    assert peak.bytes is not None
    assert 39 * MEBIBYTE <= peak.bytes < 60 * MEBIBYTE


def test_elsewhere_the_allocator_of_the_device_counts_or_nothing(monkeypatch):
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        for name, value in {"memory_allocated": 5, "max_memory_allocated": 45, "reset_peak_memory_stats": None}.items():
            monkeypatch.setattr(module, name, lambda device, value=value: value)
        with PeakMemory(torch.device(kind)) as peak:
            pass
        assert peak.bytes == 40
    monkeypatch.setattr(machine, "_reset", lambda: False)
    for device in (torch.device("meta"), CPU):
        with PeakMemory(device) as peak:
            torch.ones(MEBIBYTE)
        assert peak.bytes is None
