"""Offloaded Adam: chunks, the order of its copies on any timing of a device, checkpoints, the plan, errors."""

from __future__ import annotations

import contextlib
import copy
import io
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.offload import (
    SMALL,
    Remote,
    assert_same_state,
    assert_same_weights,
    small_network,
    train,
    weights,
)
from torchboost.errors import IncompatibleError
from torchboost.optim import Adam, AdamOffload, Centralize, ClipNorm, Decay, GradientPipeline
from torchboost.optim.rules.offload import _Lane

KINDS = (AdamOffload, Remote)


@settings(max_examples=25)
@given(chunk=st.floats(SMALL, 0.2), masters=st.booleans(), nesterov=st.booleans())
def test_any_chunk_size_gives_the_same_weights(chunk, masters, nesterov):
    dtype = torch.bfloat16 if masters else torch.float32
    ours, whole = small_network(dtype), small_network(dtype)
    options: dict[str, Any] = {"weight_decay": 0.1, "nesterov": nesterov, "amsgrad": True}
    first = Remote(ours.parameters(), chunk_mebibytes=chunk, **options)
    second = AdamOffload(whole.parameters(), **options)
    train(ours, first, range(3))
    train(whole, second, range(3))
    assert_same_weights(ours, whole)
    assert_same_state(first, second)
    assert buffers(first) <= 2 * chunk * 2**20
    for param in ours.parameters():
        state = first.state[param]
        assert not masters or torch.equal(state["master"].bfloat16(), param)
        assert state["exp_avg"].dtype == torch.float32


def buffers(optimizer: AdamOffload) -> int:
    return sum(slot.numel() for slot in optimizer._lanes[torch.device("cpu")].slots)


def test_complex_parameters_and_those_with_gaps_are_refused():
    for start in (torch.ones(6, 10)[:, ::2], torch.ones(2, dtype=torch.complex64)):
        param = nn.Parameter(start)
        param.grad = torch.ones_like(start)
        for kind in KINDS:
            with pytest.raises(IncompatibleError, match="real parameters without gaps"):
                kind([param]).step()
    assert torch.equal(param, start)


def test_buffers_are_kept_and_grow_to_the_limit_only():
    params = [nn.Parameter(torch.randn(size)) for size in (0, 10, 9000)]
    optimizer = Remote(params, chunk_mebibytes=2 * SMALL)
    sizes, slots = [], []
    for active in (params[:1], params[:2], params, params, params[:2]):
        for param in params:
            param.grad = torch.ones_like(param) if any(param is one for one in active) else None
        optimizer.step()
        sizes.append(buffers(optimizer))
        slots.append([slot.data_ptr() for slot in optimizer._lanes[torch.device("cpu")].slots])
    assert sizes[0] == 0 < sizes[1] < 5000 < sizes[2] <= 4 * SMALL * 2**20
    assert slots[2] == slots[3] == slots[4]
    assert [float(optimizer.state[param]["step"]) for param in params] == [5, 4, 2]


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
    stream: FakeStream | None = None
    mark = 0

    def record(self, stream: FakeStream) -> None:
        self.stream, self.mark = stream, len(stream.work)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.reach(self.mark)


class FakeDevice:
    """Behaves like ``torch.cuda``."""

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

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.mul_(1)  # torch counts a write when it is asked for
        self.current.ask(lambda: target.data.copy_(source))


class FakeLane(_Lane):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__(torch.device("cpu"), device)

    def queue(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._module.copy(target, source)


class NoStart(FakeLane):
    def begin(self) -> None:
        pass


class NoWait(FakeLane):
    def wait(self, slot: int) -> None:
        pass


class NoEnd(FakeLane):
    def end(self) -> None:
        pass


class NoEmptied(FakeLane):
    """The next chunk overwrites weights that have not been copied up."""

    def copy(self, way: str, slot: int, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self._done["up", slot] = FakeEvent()
        super().copy(way, slot, targets, sources)


def right_on(lane: type[FakeLane], seed: int, *, masters: bool, steps: int = 3) -> bool:
    """Whether the device's own stream reads the right weights after each step."""
    device = FakeDevice(seed)

    class Fake(Remote):
        def _lane(self, _: torch.device) -> _Lane:
            return lane(device)

    generator = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if masters else torch.float32
    start = [torch.randn(shape, generator=generator).to(dtype) for shape in ((3000,), (50, 7), (5000,), (11,))]
    grads = [[torch.randn(one.shape, generator=generator).to(dtype) for one in start] for _ in range(steps)]
    params, plain = ([nn.Parameter(one.clone()) for one in start] for _ in range(2))
    for param in (*params, *plain):
        param.grad = torch.zeros_like(param)
    optimizer, reference = (
        Fake(params, lr=0.1, chunk_mebibytes=SMALL),
        Adam(plain, 0.1, fused=True, master_weights=True),
    )
    seen: list[list[Tensor]] = []
    for step in range(steps):
        for param, grad in zip(params, grads[step], strict=True):  # the backward pass
            device.copy(param.grad, grad)
        optimizer.step()
        device.current.ask(lambda: seen.append([param.detach().clone() for param in params]))  # the next forward pass
    device.current.reach(len(device.current.work))
    for step, values in enumerate(seen):
        for param, grad in zip(plain, grads[step], strict=True):
            param.grad.copy_(grad)
        reference.step()
        if not all(map(torch.equal, plain, values)):
            return False
    return len(seen) == steps


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), masters=st.booleans())
def test_any_timing_of_the_device_gives_the_same_weights(seed, masters):
    assert right_on(FakeLane, seed, masters=masters)


@pytest.mark.parametrize("broken", [NoStart, NoWait, NoEnd, NoEmptied])
def test_every_wait_is_needed(broken):
    assert not all(right_on(broken, seed, masters=False) for seed in range(30))


@pytest.mark.parametrize("error", [False, True])
def test_the_next_chunk_is_asked_for_before_the_update_and_the_device_is_ordered_after_an_error_too(error):
    order: list[str] = []

    class Noted(_Lane):
        def copy(self, way: str, slot: int, targets: Any, sources: Any) -> None:
            super().copy(way, slot, targets, sources)
            order.append(way)

        def end(self) -> None:
            order.append("end")

    class Listed(Remote):
        def _lane(self, device: torch.device) -> _Lane:
            return Noted(device)

        def update(self, group: dict[str, Any], batch: Any) -> None:
            if error:
                raise RuntimeError("broken")
            super().update(group, batch)
            order.append("update")

    param = nn.Parameter(torch.zeros(2500))
    param.grad = torch.ones(2500)
    with pytest.raises(RuntimeError, match="broken") if error else contextlib.nullcontext():
        Listed([param], chunk_mebibytes=SMALL).step()
    whole = ["down", "down", "update", "up", "down", "update", "up", "update", "up", "end"]
    assert order == (["down", "down", "end"] if error else whole)


def test_resuming_is_bit_identical():
    through, model = small_network(torch.bfloat16), small_network(torch.bfloat16)
    options: dict[str, Any] = {"lr": [0.1, 0.05, 0.02, 0.01, 0.1], "chunk_mebibytes": SMALL, "amsgrad": True}
    train(through, Remote(through.parameters(), **options), range(5))
    optimizer = Remote(model.parameters(), **options)
    train(model, optimizer, range(3))
    buffer = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), buffer)
    buffer.seek(0)
    again = small_network(torch.bfloat16)
    resumed = Remote(again.parameters(), **options)
    saved, state = torch.load(buffer)
    resumed.load_state_dict(state)  # before the weights, which is as good
    again.load_state_dict(saved)
    train(again, resumed, range(3, 5))
    assert_same_weights(again, through)


def test_loading_never_makes_state_on_the_device():
    """Meta stands for a device without room: what is moved there is lost."""
    model = small_network()
    source = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, source, range(2))
    with torch.device("meta"):
        there = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 31))
    optimizer = AdamOffload(there.parameters())
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(type(state["state"][0]["exp_avg"])))
    optimizer.register_load_state_dict_post_hook(
        lambda loaded: seen.extend({value.device.type for s in loaded.state.values() for value in s.values()})
    )
    optimizer.load_state_dict(source.state_dict())
    assert seen == [Tensor, "cpu"]
    for ours, theirs in zip(optimizer.state.values(), source.state.values(), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) and ours[key] is not theirs[key] for key in theirs)
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


def test_masters_another_optimizer_did_not_know_are_made_anew():
    model = small_network(torch.bfloat16)
    first = AdamOffload(model.parameters(), lr=0.1)
    train(model, first, range(2))
    theirs = torch.optim.AdamW(model.parameters(), lr=0.1)
    theirs.load_state_dict(copy.deepcopy(first.state_dict()))
    train(model, theirs, range(2, 5))
    before = weights(model)
    for kind in KINDS:
        copied = copy.deepcopy(model)
        ours = kind(copied.parameters(), lr=0.0)
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        ours.param_groups[0]["lr"] = 0.0
        train(copied, ours, range(5, 6))
        for param, value in zip(copied.parameters(), before, strict=True):
            assert torch.equal(param, value)
            assert ours.state[param]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_transforms_run_where_the_gradients_are(kind):
    chain = (Decay(0.1), Centralize(), ClipNorm(0.5))
    for dtype, transforms in ((torch.float32, chain), (torch.bfloat16, chain[2:])):
        model, plain = small_network(dtype), small_network(dtype)
        train(model, kind(model.parameters(), transforms=transforms, chunk_mebibytes=SMALL), range(3))
        train(plain, Adam(plain.parameters(), fused=True, master_weights=True, transforms=transforms), range(3))
        assert_same_weights(model, plain)
    plain, attached = small_network(), small_network()
    train(plain, Adam(plain.parameters(), fused=True, transforms=chain), range(3))
    optimizer = kind(attached.parameters())
    GradientPipeline(*chain).attach(optimizer)
    train(attached, optimizer, range(3))
    assert_same_weights(attached, plain)


def test_options_and_choices_of_kernel_are_refused():
    optimizer = AdamOffload([nn.Parameter(torch.zeros(2))])
    for option, value in (("foreach", True), ("capturable", True), ("fused", False)):
        with pytest.raises(ValueError, match=option):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], option: value})
    assert len(optimizer.param_groups) == 1
    wrong: dict[str, Any]
    for wrong in ({"chunk_mebibytes": 0}, {"chunk_mebibytes": 1e-3}, {"chunk_mebibytes": "64"}):
        with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
            AdamOffload([nn.Parameter(torch.zeros(2))], **wrong)


def test_dtensors_on_a_device_are_refused():
    class Sharded(nn.Parameter):
        placements = ()

    param = Sharded(torch.zeros(2))
    param.grad = torch.ones(2)
    with pytest.raises(IncompatibleError, match="CPUOffloadPolicy"):
        Remote([param]).step()
