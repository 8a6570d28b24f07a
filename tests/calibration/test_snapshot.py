"""A snapshot restores what a pass changes, as far as Python reaches it."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import functools
import random
import threading
import types
import warnings
import weakref
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support.portraits import changes, portrait
from torchboost.algorithms import Autocast
from torchboost.calibration.snapshot import Snapshot, Streams, plain, streams_kept
from torchboost.core.algorithm import Target

TABLE = {"calls": 0}
COUNT = 0


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        TABLE["calls"] += 1
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        TABLE["calls"] += 100
        return grad


@dataclasses.dataclass(slots=True)
class Slotted:
    count: int = 0


class Changing(nn.Module):
    """Changes something of every kind in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.steps, self.seen, self.queue = 0, [], collections.deque([1, 2], maxlen=2)
        self.nested = {"deep": [{"set": {1}}]}
        self.other, self.slots = types.SimpleNamespace(count=0), Slotted()
        self.memory, self.array = torch.zeros(3), np.zeros(3)
        self.generator, self.python, self.numpy = torch.Generator(), random.Random(1), np.random.default_rng(1)
        held = {"calls": 0}
        calls = 0

        def count() -> None:
            nonlocal calls
            calls += 1
            held["calls"] += 1

        self.count, self.read = count, lambda: (calls, held["calls"])
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        self.steps += 1
        self.seen.append(x)
        self.queue.append(self.steps)
        self.nested["deep"][0]["set"].add(self.steps)
        self.other.count += 1
        self.slots.count += 1
        self.memory.add_(1)
        self.array += 1
        self.last = x
        torch.rand(1, generator=self.generator)
        self.python.random()
        self.numpy.random()
        self.count()
        self.layer.weight.data.mul_(0.5)
        self.layer.bias.requires_grad_(False)
        return self.norm(Counts.apply(self.layer(x)))


def private(model: Changing) -> list[Any]:
    """Return what a portrait of the model does not show."""
    streams = [model.generator.get_state().tolist(), model.python.getstate(), model.numpy.bit_generator.state]
    held = [model.other.count, model.slots.count, list(model.queue), str(model.nested), model.array.tolist()]
    return [*streams, *held, model.read(), dict(TABLE), COUNT]


def test_everything_that_a_pass_changes_is_restored():
    model, x = Changing(), torch.randn(4, 3)
    before, rest = portrait(model), private(model)
    snapshot = Snapshot(model, ((x,), {}))
    for _ in range(2):
        model(x).sum().backward()
        assert private(model) != rest
        for parameter in model.parameters():
            parameter.grad = None
        assert snapshot.restore() is not None
        assert changes(before, portrait(model)) == {}
        assert private(model) == rest
    assert snapshot.restore() is None


def test_after_the_first_pass_only_what_moves_is_written():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    snapshot = Snapshot(model)
    before = portrait(model)
    for _ in range(3):
        model(torch.randn(4, 3))
        snapshot.after_a_pass(None)
        assert changes(before, portrait(model)) == {}
    assert not snapshot.needs_one_around
    assert len(snapshot._moving or []) == 3  # the statistics


def test_levers_that_are_attached_stay_attached():
    model = Changing()
    snapshot = Snapshot(model)
    model(torch.randn(4, 3))
    snapshot.after_a_pass(None)
    assert snapshot.needs_one_around
    with Autocast().attach(Target(model, torch.optim.SGD(model.parameters()))):
        around, rest, seen = Snapshot(model), private(model), model.forward
        model(torch.randn(4, 3))
        snapshot.after_a_pass(around)
        assert private(model) == rest
        assert model.forward == seen
        assert model.steps == 0


def test_gradients_flags_and_memory_are_restored():
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    gradient, address = model.weight.grad, model.weight.data_ptr()
    snapshot = Snapshot(model)
    model.weight.grad = None
    model.weight.data = torch.zeros(3, 3)
    model.bias.requires_grad_(False)
    assert snapshot.restore() is not None
    assert model.weight.grad is gradient
    assert model.weight.data_ptr() == address
    assert model.bias.requires_grad
    model.weight.grad.add_(1)
    assert snapshot.restore() == ""  # a gradient is not copied, so this cannot be undone


def test_large_plain_tensors_are_watched_and_not_copied():
    model = nn.Linear(3, 3)
    model.bank = torch.zeros(2**25)
    snapshot = Snapshot(model)
    assert snapshot._found.copied_bytes == 0
    assert snapshot.restore() is None
    model.bank[0] = 1
    assert snapshot.restore() == ""


@pytest.mark.parametrize(
    "held", [iter([1]), (each for each in "ab"), map(str, [1])], ids=lambda held: type(held).__name__
)
def test_what_can_be_read_only_once_is_noticed(held):
    assert Snapshot(nn.Linear(1, 1), ((held,), {})).has_iterator
    model = nn.Linear(1, 1)
    model.held = held
    assert Snapshot(model).has_iterator
    assert not Snapshot(nn.Linear(1, 1), (([1], {"a": (2,)}), {})).has_iterator


def test_an_earlier_graph_is_noticed():
    model = nn.Linear(3, 3)
    assert not Snapshot(model, ((torch.ones(3),), {})).has_history
    assert Snapshot(model, ((types.SimpleNamespace(x=model(torch.ones(3))),), {})).has_history


def test_weak_references_and_odd_tensors_are_no_obstacle():
    model = nn.Linear(3, 3)
    model.back, model.gone = weakref.proxy(model), weakref.ref(nn.Linear(1, 1))
    model.wide, model.sparse = torch.zeros(1).expand(5), torch.eye(3).to_sparse()
    with torch.inference_mode():
        model.inferred = torch.ones(2)
    model.meta = torch.empty(3, device="meta")
    assert Snapshot(model).restore() is None


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
def test_a_plain_model_has_neither_hooks_of_users_nor_covers_of_ours():
    model, called = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)), nn.ReLU()), []
    model[0].register_forward_hook(lambda *_: called.append("forward"))
    model[0].bias.register_hook(lambda _: called.append("gradient"))
    model[0].bias.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    with Autocast().attach(Target(model, torch.optim.SGD(model.parameters()))):
        with plain(model):
            assert "forward" not in vars(model)
            out = model(torch.ones(2, 3))
            assert out.grad_fn is not None
            out.sum().backward()
            assert called == []
        assert model[0].weight_g.grad is not None  # the hook that computes the weight stayed
        model(torch.ones(2, 3)).sum().backward()
    assert called == ["forward", "gradient", "accumulated"]


def test_hooks_of_all_optimizers_do_not_see_steps_of_a_trial():
    called: list[str] = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    handle = register_optimizer_step_post_hook(lambda *_: called.append("stepped"))
    try:
        with plain(nn.Linear(1, 1)):
            optimizer.step()
        assert called == []
        optimizer.step()
        assert called == ["stepped"]
    finally:
        handle.remove()


class Remembers:
    """Has private slots, one of which is empty at first."""

    __slots__ = ("__calls", "last")

    def __init__(self) -> None:
        self.__calls = 0

    def call(self) -> int:
        self.__calls += 1
        self.last = self.__calls
        return self.__calls

    def state(self) -> Any:
        return self.__calls, hasattr(self, "last")


class Meter:
    def __init__(self) -> None:
        self.calls = 0


class Hidden(pydantic.BaseModel):
    _calls: int = pydantic.PrivateAttr(0)


class Tally:
    """Is never made: its class counts."""

    total = 0

    @classmethod
    def up(cls) -> None:
        cls.total += 1


METER, GENERATOR, NUMPY, BUFFER = Meter(), torch.Generator(), np.random.default_rng(0), torch.zeros(2)
TALLY = [0]


def tally() -> None:
    TALLY[0] += 1


@functools.lru_cache
def table_of(size: int) -> Tensor:
    return torch.rand(size)


class Everywhere(nn.Linear):
    """Keeps what it changes in places that are no attributes of it."""

    calls = 0
    table: dict[int, int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.order = collections.OrderedDict.fromkeys("abc")
        self.slots, self.hidden, self.raw, self.numbers = Remembers(), Hidden(), bytearray(1), array.array("i", [0])
        self.objects = np.array([[0], None], dtype=object)
        self.objects[0] = [0]
        near = types.SimpleNamespace(near=types.SimpleNamespace(calls=0))
        self.far = types.SimpleNamespace(one=types.SimpleNamespace(two=types.SimpleNamespace(near=near)))
        self.near = near
        self.register_buffer("swapped", torch.ones(3))
        self.register_buffer("shorter", torch.arange(6.0))

    def forward(self, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        global ABSENT
        ABSENT = 1
        Everywhere.calls += 1
        self.table[self.calls] = 1
        seen.append(1)
        METER.calls += 1
        BUFFER.add_(1)
        tally()
        Tally.up()
        table_of(self.calls)
        self.shifted(self.calls)
        torch.rand(1, generator=GENERATOR)
        NUMPY.random()
        self.order.move_to_end("a")
        self.slots.call()
        self.hidden._calls += 1
        self.raw[0] += 1
        self.numbers[0] += 1
        self.objects[0][0] += 1
        self.near.near.calls += 1
        self.swapped.data = self.swapped.data * 2
        self.shorter.resize_(self.shorter.numel() - 1)
        return super().forward(x)

    @functools.lru_cache  # noqa: B019
    def shifted(self, by: int) -> Tensor:
        return torch.arange(by)

    def kept(self) -> list[Any]:
        held = [
            table_of.cache_info().currsize,
            Everywhere.shifted.cache_info().currsize,
            Everywhere.calls,
            dict(self.table),
            type(self).forward.__defaults__,
            METER.calls,
            Tally.total,
            TALLY,
            "ABSENT" in globals(),
        ]
        drawn = [GENERATOR.get_state().tolist(), NUMPY.bit_generator.state, list(self.order), self.slots.state()]
        raw = [self.hidden._calls, bytes(self.raw), self.numbers.tolist(), self.near.near.calls, self.objects.tolist()]
        tensors = [BUFFER.tolist(), self.swapped.tolist(), self.shorter.tolist()]
        return copy.deepcopy([held, drawn, raw, tensors])


def test_what_is_kept_outside_of_attributes_is_restored():
    model, x = Everywhere(), torch.ones(2, 3)
    before = model.kept()
    snapshot = Snapshot(model, ((x,), {}))
    model(x)
    snapshot.after_a_pass(None)
    assert model.kept() == before
    around = Snapshot(model, ((x,), {}))
    model(x)
    snapshot.after_a_pass(around)
    assert model.kept() == before
    model(x)
    assert snapshot.restore()
    assert model.kept() == before


class NoClass:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("unbound")


class NoAttributes:
    __slots__ = ("empty",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Refuses(list):
    def clear(self) -> None:
        raise RuntimeError("frozen")

    def __iter__(self) -> Any:
        raise RuntimeError("frozen")


@pytest.mark.parametrize("kind", [NoClass, NoAttributes, Refuses])
def test_objects_that_raise_are_no_obstacle(kind):
    model = nn.Linear(3, 3)
    model.odd = [kind()]
    snapshot = Snapshot(model)
    if kind is Refuses:
        model.odd[0].append(1)
    assert snapshot.restore() == ("attributes" if kind is Refuses else None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_depth_and_kinds_of_tensors_are_no_obstacle():
    model = nn.Linear(3, 3)
    model.deep = functools.reduce(lambda inner, _: [inner], range(3000), [])
    model.nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    model.eight = torch.ones(2).to(torch.float8_e4m3fn)
    assert Snapshot(model).restore() is None


def test_what_is_not_trained_is_changed_in_other_memory(tmp_path):
    path = tmp_path / "table"
    np.ones(3, dtype="f4").tofile(path)
    model = nn.Linear(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that cannot be written
        model.register_buffer("table", torch.from_numpy(np.memmap(path, dtype="f4", mode="r")))
    before = portrait(model)
    snapshot = Snapshot(model)
    snapshot.after_a_pass(None)
    with snapshot.changed(lambda tensor: tensor.mul_(2)):
        assert model.table.tolist() == [2, 2, 2]
        assert set(changes(before, portrait(model)))
    assert changes(before, portrait(model)) == {}
    assert snapshot.restore() is None


def test_streams_are_kept():
    model = nn.Dropout(0.5)
    with streams_kept(model):
        torch.rand(1)
    streams = Streams(model)
    assert not streams.drawn()
    wanted = torch.rand(2), random.random(), np.random.rand()
    assert streams.drawn()
    streams.restore()
    assert torch.equal(torch.rand(2), wanted[0])
    assert (random.random(), np.random.rand()) == wanted[1:]
