from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchboost.optim.rules.staging import (
    SMALLEST_CHUNK,
    Job,
    Staging,
    Transfer,
    split,
)

SIZES = st.lists(
    st.tuples(st.integers(0, 20_000), st.sampled_from([(4, 4), (2, 2, 4), (8, 8), (4, 2), (2, 2)])), max_size=6
)


@given(sizes=SIZES, limit=st.integers(SMALLEST_CHUNK, 200_000))
def test_pieces_cover_every_number_once_and_do_not_overlap(sizes, limit):
    chunks = list(split(sizes, limit))
    covered = [0] * len(sizes)
    for chunk in chunks:
        assert chunk
        end = 0
        for piece in chunk:
            assert piece.offset == end
            assert piece.offset % 64 == 0
            assert piece.start == covered[piece.job]
            assert piece.start % 256 == 0
            covered[piece.job] += piece.length
            end = piece.end(sizes[piece.job][1])
        assert end <= limit
    assert covered == [count for count, _ in sizes]


def descend(options: Any, batch: Any) -> None:
    """A stand-in for a rule: counts, remembers the gradient, moves the weights."""
    for param, grad, state in zip(batch.params, batch.grads, batch.states, strict=True):
        state["step"].add_(1)
        state["m"].add_(grad, alpha=float(state["step"]))
        param.sub_(state["m"], alpha=options["lr"])


def jobs_of(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32, *, masters: bool = False
) -> list[Job]:
    generator = torch.Generator().manual_seed(3)
    jobs = []
    groups = ({"lr": 0.1}, {"lr": 0.3})
    for number, shape in enumerate(shapes):
        param, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        wide = torch.float32 if masters else dtype
        master = param.float() if masters else None
        moments = {"m": torch.zeros(shape, dtype=wide)}
        jobs.append(Job(groups[number * 2 // len(shapes)], param, grad, torch.zeros(()), moments, master))
    return jobs


SHAPES = [(40, 70), (5,), (), (3, 0), (9000,), (17, 3, 3, 3)]


def wanted(jobs: Sequence[Job]) -> list[Tensor]:
    results = []
    for job in jobs:
        weight = job.param.clone() if job.master is None else job.master.clone()
        weight.sub_(job.grad.to(weight.dtype), alpha=job.group["lr"])
        results.append(weight.to(job.param.dtype))
    return results


@pytest.mark.parametrize(
    ("dtype", "masters"),
    [(torch.float32, False), (torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)],
)
def test_a_pass_updates_everything_once(dtype, masters):
    jobs = jobs_of(SHAPES, dtype, masters=masters)
    results = wanted(jobs)
    staging = Staging(Transfer(), SMALLEST_CHUNK, pinned=False)
    staging.run(jobs, descend)
    for job, result in zip(jobs, results, strict=True):
        torch.testing.assert_close(job.param, result)
        assert job.step == 1
        assert job.master is None or torch.equal(job.param, job.master.to(dtype))
    assert 0 < staging.allocated <= 2 * SMALLEST_CHUNK


def test_gradients_of_another_precision():
    jobs = jobs_of(SHAPES)
    for job in jobs:
        job.grad = job.grad.bfloat16()
    results = wanted(jobs)
    Staging(Transfer(), 20_000, pinned=False).run(jobs, descend)
    for job, result in zip(jobs, results, strict=True):
        torch.testing.assert_close(job.param, result)


def test_weights_with_gaps_and_gradients_in_another_order():
    whole = torch.arange(48.0).reshape(4, 12)
    param = whole[:, ::2]
    turned = torch.arange(24.0).reshape(4, 6)
    conv = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    grad = torch.randn(4, 3, 2, 2)
    jobs = [
        Job({"lr": 1.0}, param, turned, torch.zeros(()), {"m": torch.zeros(4, 6)}),
        Job({"lr": 1.0}, conv, grad, torch.zeros(()), {"m": torch.zeros_like(conv)}),
    ]
    results = [param - turned, conv - grad]
    between = whole[:, 1::2].clone()
    Staging(Transfer(), SMALLEST_CHUNK, pinned=False).run(jobs, descend)
    assert torch.equal(param, results[0])
    assert torch.equal(whole[:, 1::2], between)
    assert torch.equal(conv, results[1])
    assert torch.equal(jobs[1].moments["m"], grad)


def test_complex_numbers_are_pairs():
    param = torch.randn(7, 3, dtype=torch.complex64)
    grad = torch.randn(7, 3, dtype=torch.complex64)
    job = Job({"lr": 0.5}, param, grad, torch.zeros(()), {"m": torch.zeros_like(param)})
    result = param - 0.5 * grad
    Staging(Transfer(), SMALLEST_CHUNK, pinned=False).run([job], descend)
    torch.testing.assert_close(param, result)


def test_nothing_to_do():
    staging = Staging(Transfer(), SMALLEST_CHUNK, pinned=False)
    staging.run([], descend)
    staging.run(jobs_of([(0,)]), descend)
    assert staging.allocated == 0


def test_buffers_are_kept_and_grow_to_the_limit_only():
    staging = Staging(Transfer(), 32_000, pinned=False)
    staging.run(jobs_of([(10,)]), descend)
    first = staging.allocated
    assert first < 500
    for _ in range(3):
        staging.run(jobs_of(SHAPES), descend)
        assert first < staging.allocated <= 64_000
    slots = [slot.data_ptr() for slot in staging._slots]
    staging.run(jobs_of([(10,)]), descend)
    assert [slot.data_ptr() for slot in staging._slots] == slots


def test_the_device_is_ordered_after_an_error_too():
    calls = []

    class Noted(Transfer):
        def end(self) -> None:
            calls.append("end")

    def broken(options: Any, batch: Any) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        Staging(Noted(), SMALLEST_CHUNK, pinned=False).run(jobs_of(SHAPES), broken)
    assert calls == ["end"]


# A device whose streams run when they like. Work is done late, or early, but always after what it waits for; a host
# that does not wait sees old numbers, as it would on a real one.


class FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self.device, self.work, self.done = device, [], 0
        device.streams.append(self)

    def ask(self, work: Callable[[], None] | tuple[FakeStream, int]) -> None:
        self.work.append(work)
        self.device.drift()

    def wait_event(self, event: FakeEvent) -> None:
        if event.stream is not None:
            self.ask((event.stream, event.mark))

    def ready(self) -> bool:
        if self.done == len(self.work):
            return False
        work = self.work[self.done]
        return callable(work) or work[0].done >= work[1]

    def one(self) -> None:
        work = self.work[self.done]
        if callable(work):
            work()
        else:
            work[0].reach(work[1])
        self.done += 1

    def reach(self, mark: int) -> None:
        while self.done < mark:
            self.one()


class FakeEvent:
    def __init__(self) -> None:
        self.stream: FakeStream | None = None
        self.mark = 0

    def record(self, stream: FakeStream) -> None:
        self.stream, self.mark = stream, len(stream.work)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.reach(self.mark)


class FakeDevice:
    """What ``torch.cuda`` is to :class:`Transfer`."""

    Event = FakeEvent

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.eager = self.random.choice([0.0, 0.3, 0.8])
        self.streams: list[FakeStream] = []
        self.current = FakeStream(self)

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def drift(self) -> None:
        while self.random.random() < self.eager:
            ready = [stream for stream in self.streams if stream.ready()]
            if not ready:
                return
            self.random.choice(ready).one()


class FakeTransfer(Transfer):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device, torch.device("cpu"))
        self.fake = device

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self.fake.current.ask(lambda target=target, source=source: target.copy_(source))


def run_on(transfer: FakeTransfer, *, masters: bool, steps: int = 3) -> bool:
    """Return whether what the device's own stream reads after each step is right."""
    dtype = torch.bfloat16 if masters else torch.float32
    shapes = [(3000,), (50, 7), (5000,), (11,)]
    jobs, plain = jobs_of(shapes, dtype, masters=masters), jobs_of(shapes, dtype, masters=masters)
    grads = [[torch.randn_like(job.grad) for job in jobs] for _ in range(steps)]
    staging = Staging(transfer, SMALLEST_CHUNK, pinned=False)
    own = transfer.fake.current
    seen: list[list[Tensor]] = []
    for step in range(steps):
        # The backward pass: the gradients are there when the stream gets to it.
        for job, grad in zip(jobs, grads[step], strict=True):
            own.ask(lambda job=job, grad=grad: job.grad.copy_(grad))
        staging.run(jobs, descend)
        # The next forward pass.
        own.ask(lambda: seen.append([job.param.clone() for job in jobs]))
    own.reach(len(own.work))
    direct = Staging(Transfer(), SMALLEST_CHUNK, pinned=False)
    for step, got in enumerate(seen):
        for job, grad in zip(plain, grads[step], strict=True):
            job.grad.copy_(grad)
        direct.run(plain, descend)
        if not all(torch.equal(job.param, param) for job, param in zip(plain, got, strict=True)):
            return False
    return len(seen) == steps


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), masters=st.booleans())
def test_any_timing_of_the_device_gives_the_same_weights(seed, masters):
    assert run_on(FakeTransfer(FakeDevice(seed)), masters=masters)


class NoStart(FakeTransfer):
    def begin(self) -> None:
        pass


class NoWait(FakeTransfer):
    def wait(self, slot: int) -> None:
        pass


class NoEnd(FakeTransfer):
    def end(self) -> None:
        pass


class NoEmptied(FakeTransfer):
    """The next chunk overwrites weights that have not been copied up."""

    def to_host(self, slot: int, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        with self._module.stream(self._down):
            self.copy(targets, sources)
        self._filled[slot].record(self._down)


@pytest.mark.parametrize("broken", [NoStart, NoWait, NoEnd, NoEmptied])
def test_every_wait_is_needed(broken):
    assert not all(run_on(broken(FakeDevice(seed)), masters=False) for seed in range(30))


def test_copies_of_the_next_chunk_are_asked_for_before_the_update():
    order: list[str] = []
    numbers = itertools.count()

    class Noted(Transfer):
        def to_host(self, slot: int, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
            super().to_host(slot, targets, sources)
            order.append(f"down {next(numbers)}")

        def to_device(self, slot: int, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
            super().to_device(slot, targets, sources)
            order.append("up")

    def noted(options: Any, batch: Any) -> None:
        descend(options, batch)
        order.append("update")

    Staging(Noted(), SMALLEST_CHUNK, pinned=False).run(jobs_of([(2500,)]), noted)
    assert order == ["down 0", "down 1", "update", "up", "down 2", "update", "up", "update", "up"]
