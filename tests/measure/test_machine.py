"""The measurement of the machine: bounded in work, right about planted machines, and without a trace."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchboost.errors import IncompatibleError
from torchboost.measure import machine
from torchboost.measure.machine import (
    LOADING,
    PRIOR_SECONDS,
    Kind,
    PeakMemory,
    Products,
    Rung,
    StepParts,
    climb,
    copy_bandwidth,
    products,
    time_step_parts,
)
from torchboost.measure.stopwatch import Clock

SIZES = (128, 256, 512)


class Machine:
    """A machine whose clock moves only when it works.

    Args:
        full: Operations per second in float32.
        half: The same in bfloat16.
        overhead: Seconds of each call.
        first: Seconds that the first call of each kernel takes in addition.
        stalls: Share of the calls that are held up.
        stall: For how many seconds.
    """

    def __init__(
        self,
        full: float,
        half: float,
        overhead: float = 1e-5,
        *,
        half_overhead: float | None = None,
        first: float = 0.002,
        stalls: float = 0.0,
        stall: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        self.calls: list[tuple[int, torch.dtype]] = []
        self._speed = {torch.float32: full, torch.bfloat16: half}
        self._overhead = {torch.float32: overhead, torch.bfloat16: half_overhead or overhead}
        self._first, self._stalls, self._stall = first, stalls, stall
        self._random = random.Random(seed)

    def rungs(self) -> list[Rung]:
        def build(size: int) -> Callable[[torch.dtype], Callable[[], object]]:
            return lambda dtype: lambda: self._work(size, dtype)

        return [Rung(size=str(size), work=6.0 * size**3, build=build(size)) for size in SIZES]

    def _work(self, size: int, dtype: torch.dtype) -> None:
        self.now += self._overhead[dtype] + 6.0 * size**3 / self._speed[dtype]
        self.now += self._first * ((size, dtype) not in self.calls)
        self.now += self._stall * (self._random.random() < self._stalls)
        self.calls.append((size, dtype))

    def timer(self, call: Callable[[], object]) -> float:
        start = self.now
        call()
        return self.now - start

    def climbed(self, seconds: float = PRIOR_SECONDS) -> Products:
        return climb("matrix product", self.rungs(), seconds=seconds, timer=self.timer, clock=lambda: self.now)


def test_the_time_limit_is_kept_on_every_machine():
    amx, plain = Machine(2e11, 8e11, half_overhead=8e-5), Machine(2.5e11, 1.5e11, half_overhead=8e-5)
    emulated, slow = Machine(2e11, 4e9, half_overhead=4e-4), Machine(2e9, 1.5e9)
    for here, pays, size in ((amx, True, "512"), (plain, False, "512"), (emulated, False, "128"), (slow, False, "128")):
        found = here.climbed()
        assert found.half_pays is pays
        assert found.size == size
        longest = max(6.0 * int(found.size) ** 3 / min(found.float32, found.bfloat16), 0.002)
        assert here.now <= PRIOR_SECONDS + longest
        assert found.seconds == pytest.approx(here.now)
        assert found.pairs >= 3


def test_overhead_of_short_calls_is_no_verdict():
    """Half precision is five times as slow at the smallest size, and faster at the largest."""
    here = Machine(2e11, 8e11, overhead=1e-5, half_overhead=5e-4)
    assert here.climbed().half_pays
    assert (SIZES[-1], torch.bfloat16) in here.calls


def test_the_order_alternates():
    here = Machine(2e11, 2e11)
    here.climbed()
    first = [dtype for size, dtype in here.calls if size == SIZES[0]][2:8]
    f, b = torch.float32, torch.bfloat16
    assert first == [f, b, b, f, f, b]


def test_equal_speeds_on_a_busy_machine_rarely_count_as_a_gain():
    busy = [Machine(2e11, 2e11, stalls=0.3, stall=0.02, seed=seed).climbed() for seed in range(200)]
    assert sum(found.half_pays for found in busy) <= 12


def test_a_machine_that_stands_still_for_a_moment_is_judged_nevertheless():
    """Another program takes the core during the warm-up, for longer than the time limit."""
    here = Machine(2e11, 8e11, first=0.06)
    found = here.climbed()
    assert found.pairs == 3
    assert found.half_pays
    assert here.now <= 5 * PRIOR_SECONDS


def test_a_machine_that_is_too_slow_to_be_timed_promises_nothing():
    here = Machine(1e7, 2e7)
    found = here.climbed()
    assert found.pairs == 1
    assert found.ratio == pytest.approx(2.0, rel=0.01)
    assert not found.half_pays
    assert "too slow or too busy to time a bfloat16 matrix product" in str(found)
    assert len(here.calls) == 4


def test_real_products():
    for kind in ["matrix product", "convolution"]:
        found = products(kind, seconds=60.0, pairs=3)
        assert found.pairs == 3
        assert not found.fault
        assert found.ratio is not None
        assert found.ratio > 0
        assert min(found.float32, found.bfloat16) > 1e6
        assert found.ratio <= found.bfloat16 / found.float32 * (1 + 1e-9)
        assert f"a bfloat16 {kind} takes" in str(found)


def test_the_work_is_that_of_the_two_passes():
    """The rungs say how many operations a call has; torch counts them too."""
    for kind in ["matrix product", "convolution"]:
        from torch.utils.flop_counter import FlopCounterMode

        rungs = {"matrix product": machine._matrices, "convolution": machine._convolutions}[kind](torch.device("cpu"))
        assert [rung.work for rung in rungs] == sorted(rung.work for rung in rungs)
        call = rungs[0].build(torch.float32)
        with FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == rungs[0].work


@contextmanager
def unusual() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def test_nothing_of_torch_is_changed():
    for kind in ["matrix product", "convolution"]:
        drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        with unusual():
            assert not products(kind, seconds=0.01).fault
            assert torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16
            assert torch.get_default_dtype() is torch.float64
            assert torch.are_deterministic_algorithms_enabled()
        assert torch.equal(drawn[0], torch.get_rng_state())
        assert drawn[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_autocast_of_the_caller_does_not_reach_the_float32_product(monkeypatch):
    seen = set()
    real = torch.mm

    def noted(a, b):
        result = real(a, b)
        seen.add((a.dtype, result.dtype))
        return result

    monkeypatch.setattr(torch, "mm", noted)
    with torch.autocast("cpu", torch.bfloat16):
        products("matrix product", seconds=0.01)
    assert seen == {(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)}


def tensors() -> int:
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


def test_no_tensor_and_no_graph_is_left():
    products("convolution", seconds=0.01)
    gc.collect()
    before = tensors()
    for kind in ("matrix product", "convolution"):
        products(kind, seconds=0.01)
    gc.collect()
    assert tensors() <= before  # of other tests, more may be collected meanwhile


def test_importing_measures_nothing():
    code = "import torchboost.registry, torchboost.core.hardware as h;print(h._decision.cache_info().currsize)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"


def test_an_error_of_a_product_is_reported(monkeypatch):
    def refuse(*args):
        raise RuntimeError("could not create a primitive\nin two lines")

    monkeypatch.setattr(torch, "mm", refuse)
    found = products("matrix product")
    assert (found.ratio, found.half_pays) == (None, False)
    assert str(found) == "a bfloat16 matrix product does not run here: could not create a primitive"


def test_unknown_kinds_and_devices_are_refused():
    with pytest.raises(ValueError, match="kind: found 'sum'; allowed are 'matrix product', 'convolution'"):
        products("sum")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="device: found 'meta'; only cpu and cuda devices are measured"):
        products("convolution", "meta")
    with pytest.raises(ValueError, match="found 'mps'"):
        copy_bandwidth("mps")
    assert torch.cuda.is_available() or products("matrix product", "cuda").fault


def test_copy_bandwidth_counts_read_and_written_bytes(monkeypatch):
    monkeypatch.setitem(machine.COPIED, "cpu", 4096)
    times = iter([9.0, 0.5, 0.25, 0.5])
    copied = []

    def timer(call):
        copied.append(call())
        return next(times)

    monkeypatch.setattr(machine, "_timer", lambda device: timer)
    assert copy_bandwidth(copies=3) == 2 * 4096 / 0.25
    assert [tensor.numel() for tensor in copied] == [1024] * 4
    assert all(bool((tensor == 1).all()) for tensor in copied)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["matrix product", "convolution"])
def test_products_of_a_gpu(kind: Kind):
    found = products(kind, "cuda")
    assert not found.fault
    assert found.pairs >= 3
    assert copy_bandwidth("cuda") > 1e9


CPU = torch.device("cpu")
MEBIBYTE = 2**20

readable = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not tell the peak of a process"
)


@readable
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


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_torch_allocates():
    with PeakMemory(torch.device("cuda")) as peak:
        held = torch.ones(10 * MEBIBYTE, device="cuda")
        del held
    assert peak.bytes == 40 * MEBIBYTE


class Planted:
    """A training whose parts move a clock by given seconds."""

    def __init__(self, loading: float, forward: float, backward: float, update: float) -> None:
        self.now = 0.0
        self.updates = 0
        self.begun = 0
        self._loading, self._forward, self._backward, self._update = loading, forward, backward, update
        self._weight = nn.Parameter(torch.ones(1))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def __iter__(self) -> Iterator[Tensor]:
        self.begun += 1
        for _ in range(4):
            self.pass_time(self._loading)
            yield torch.ones(1)

    def forward(self, batch: Tensor) -> Tensor:
        self.pass_time(self._forward)
        loss = (self._weight * batch).sum()
        loss.register_hook(lambda gradient: self.pass_time(self._backward))
        return loss

    def update(self) -> None:
        self.updates += 1
        self.pass_time(self._update)

    def timed(self, batches: Any = None, **options: Any) -> StepParts:
        return time_step_parts(
            self if batches is None else batches,
            load=lambda batch: batch,
            forward=self.forward,
            update=self.update,
            clock=Clock(read=lambda: self.now),
            **options,
        )


def test_every_part_has_its_own_time():
    here = Planted(0.5, 0.125, 0.25, 0.125)
    found = here.timed(steps=6)
    assert found.seconds == {
        LOADING: [0.5] * 6,
        "forward": [0.125] * 6,
        "backward": [0.25] * 6,
        "optimizer": [0.125] * 6,
    }
    assert (found.steps, found.share(LOADING), found.median("backward")) == (6, 0.5, 0.25)
    assert sum(map(found.share, found.seconds)) == 1.0


def test_the_epoch_is_begun_again_the_warm_up_is_not_measured_and_progress_counts_every_step():
    here, seen = Planted(1.0, 0.0, 0.0, 0.0), []
    found = here.timed(
        steps=7, warmup=2, progress=lambda phase, done, total, note="": seen.append((phase, done, total))
    )
    assert (found.steps, here.updates, here.begun) == (7, 9, 3)
    assert seen == [("steps", done, 9) for done in range(1, 10)]


def test_batches_that_can_be_read_once_end_the_steps():
    here = Planted(0.0, 1.0, 0.0, 0.0)
    assert here.timed(iter([torch.ones(1)] * 5), steps=20, warmup=3).steps == 2


def test_shares_compare_totals():
    """Workers deliver four batches at once, then the loop waits."""
    timed = StepParts({LOADING: [0.0, 0.0, 0.0, 6.0], "forward": [0.5] * 4})
    assert timed.median(LOADING) == 0.0
    assert timed.share(LOADING) == 0.75
    assert StepParts({LOADING: [0.0], "forward": [0.0]}).share(LOADING) == 0.0


def test_moving_a_batch_counts_as_loading():
    here = Planted(0.0, 0.0, 0.0, 0.0)

    def load(batch: Tensor) -> Tensor:
        here.pass_time(2.0)
        return batch

    clock = Clock(read=lambda: here.now)
    found = time_step_parts(here, load=load, forward=here.forward, update=here.update, steps=3, clock=clock)
    assert found.seconds[LOADING] == [2.0] * 3


def test_too_few_batches_and_wrong_numbers_are_refused():
    for batches in ([], iter([torch.ones(1)] * 3)):
        with pytest.raises(IncompatibleError, match="needed: more than 3 of them"):
            Planted(0.0, 0.0, 0.0, 0.0).timed(batches, steps=1)
    here = Planted(0.0, 0.0, 0.0, 0.0)
    for wrong in ({"steps": 0}, {"warmup": -1}):
        with pytest.raises(ValueError, match="needed: steps >= 1, warmup >= 0"):
            here.timed(**wrong)
    assert here.updates == here.begun == 0
