"""A snapshot restores what a pass changes, as far as Python reaches it."""

from __future__ import annotations

import array
import collections
import copy
import functools
import random
import threading
import types
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support.portraits import changes, portrait
from torchboost.algorithms import Autocast, to_channels_last
from torchboost.calibration.snapshot import Damage, Snapshot, plain
from torchboost.core.algorithm import Target

TABLE, TALLY = {"calls": 0}, [0]
GENERATOR, NUMPY, BUFFER = torch.Generator(), np.random.default_rng(0), torch.zeros(2)


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        TABLE["calls"] += 1
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        TABLE["calls"] += 100
        return grad


def tally() -> None:
    TALLY[0] += 1


@functools.lru_cache
def table_of(size: int) -> Tensor:
    return torch.rand(size)


class Changing(nn.Module):
    """Changes something of every kind in its forward pass."""

    table: dict[int, int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.steps, self.seen, self.queue = 0, [], collections.deque([1, 2], maxlen=2)
        self.nested, self.order = {"deep": [{"set": {1}}]}, collections.OrderedDict.fromkeys("abc")
        self.raw, self.numbers = bytearray(1), array.array("i", [0])
        self.memory, self.array, self.objects = torch.zeros(3), np.zeros(3), np.array([[0], None], dtype=object)
        self.objects[0] = [0]
        near = types.SimpleNamespace(near=types.SimpleNamespace(calls=0))
        self.far = types.SimpleNamespace(one=types.SimpleNamespace(two=types.SimpleNamespace(near=near)))
        self.near = near
        self.generator, self.python, self.numpy = torch.Generator(), random.Random(1), np.random.default_rng(1)
        self.register_buffer("swapped", torch.ones(3))
        self.register_buffer("shorter", torch.arange(6.0))
        held = {"calls": 0}
        calls = 0

        def count() -> None:
            nonlocal calls
            calls += 1
            held["calls"] += 1

        self.count, self.read = count, lambda: (calls, held["calls"])
        self.lock = threading.Lock()

    def forward(self, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        self.steps += 1
        self.table[self.steps] = 1
        seen.append(1)
        self.seen.append(x)
        self.queue.append(self.steps)
        self.nested["deep"][0]["set"].add(self.steps)
        self.order.move_to_end("a")
        self.raw[0] += 1
        self.numbers[0] += 1
        self.objects[0][0] += 1
        self.near.near.calls += 1
        self.memory.add_(1)
        self.array += 1
        self.last = x
        BUFFER.add_(1)
        tally()
        table_of(self.steps)
        self.shifted(self.steps)
        for generator in (self.generator, GENERATOR):
            torch.rand(1, generator=generator)
        for draw in (self.python, self.numpy, NUMPY):
            draw.random()
        self.count()
        self.swapped.data = self.swapped.data * 2
        self.shorter.resize_(self.shorter.numel() - 1)
        self.layer.weight.data.mul_(0.5)
        return self.norm(Counts.apply(self.layer(x)))

    @functools.lru_cache  # noqa: B019
    def shifted(self, by: int) -> Tensor:
        return torch.arange(by)


def private(model: Changing) -> list[Any]:
    """Return what a portrait of the model does not show."""
    drawn = [model.python.getstate(), *(each.bit_generator.state for each in (model.numpy, NUMPY))]
    drawn += [each.get_state().tolist() for each in (model.generator, GENERATOR)]
    held = [list(model.queue), str(model.nested), list(model.order), bytes(model.raw), model.numbers.tolist()]
    held += [model.array.tolist(), model.objects.tolist(), model.near.near.calls, dict(model.table)]
    outside = [TALLY, TABLE, BUFFER.tolist(), table_of.cache_info().currsize, Changing.shifted.cache_info().currsize]
    return copy.deepcopy([*drawn, *held, *outside, model.read(), type(model).forward.__defaults__])


def test_everything_that_a_pass_changes_is_restored():
    model, x = Changing(), torch.randn(4, 3)
    before, rest = portrait(model), private(model)
    snapshot = Snapshot(model, ((x,), {}))
    for restore in (snapshot.restore, snapshot.after_a_pass, snapshot.restore):
        model(x).sum().backward()
        assert private(model) != rest
        for parameter in model.parameters():
            parameter.grad = None
        restore()
        assert changes(before, portrait(model)) == {}
        assert private(model) == rest
    assert not snapshot.restore()


def test_after_the_first_pass_only_what_moves_is_written():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    snapshot = Snapshot(model)
    before = portrait(model)
    for _ in range(3):
        model(torch.randn(4, 3))
        snapshot.after_a_pass()
        assert changes(before, portrait(model)) == {}
    assert len(snapshot._moving or []) == 3  # the statistics


def test_levers_that_are_attached_stay_attached():
    model = Changing()
    snapshot, rest = Snapshot(model), private(model)
    model(torch.randn(4, 3))
    snapshot.after_a_pass()
    with Autocast().attach(Target(model, torch.optim.SGD(model.parameters()))):
        seen = model.forward
        for _ in range(2):
            model(torch.randn(4, 3))
            snapshot.after_a_pass()
            assert private(model) == rest
            assert model.forward == seen
            assert model.steps == 0
            assert "last" not in vars(model)


def test_gradients_flags_and_memory_are_restored():
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    gradient, address = model.weight.grad, model.weight.data_ptr()
    snapshot = Snapshot(model)
    model.weight.grad = None
    model.weight.data = torch.zeros(3, 3)
    model.bias.requires_grad_(False)
    assert snapshot.restore() is Damage.UNDONE
    assert model.weight.grad is gradient
    assert model.weight.data_ptr() == address
    assert model.bias.requires_grad
    model.weight.grad.add_(1)
    assert snapshot.restore() is Damage.LASTING  # a gradient is not copied, so this cannot be undone


def test_large_plain_tensors_are_watched_and_not_copied():
    model = nn.Linear(3, 3)
    model.bank = torch.zeros(2**25)
    snapshot = Snapshot(model)
    assert snapshot._copied_bytes == 0
    assert not snapshot.restore()
    model.bank[0] = 1
    assert snapshot.restore() is Damage.LASTING


def test_what_can_be_read_only_once_is_noticed():
    for held in (iter([1]), (each for each in "ab"), map(str, [1])):
        assert Snapshot(nn.Linear(1, 1), ((held,), {})).has_iterator
        model = nn.Linear(1, 1)
        model.held = held
        assert Snapshot(model).has_iterator
    assert not Snapshot(nn.Linear(1, 1), (([1], {"a": (2,)}), {})).has_iterator


def test_an_autograd_function_in_a_closure_is_followed():
    table = {"calls": 0}

    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            table["calls"] += 1
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            table["calls"] += 100
            return grad

    class Network(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Local.apply(super().forward(x))

    model = Network(2, 2)
    snapshot = Snapshot(model)
    torch.autograd.grad(model(torch.ones(2)).sum(), model.bias)
    assert table == {"calls": 101}
    assert snapshot.restore() is Damage.UNDONE
    assert table == {"calls": 0}


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
    assert not Snapshot(model).restore()


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

    extend = __iter__ = __delitem__ = clear


def test_objects_that_raise_are_no_obstacle():
    model = nn.Linear(3, 3)
    model.odd = [NoClass(), NoAttributes(), Refuses()]
    assert not Snapshot(model).restore()


class FrozenSet(set):
    def clear(self) -> None:
        raise RuntimeError("frozen")

    __iter__ = clear


def test_containers_are_written_back_whatever_their_class_allows():
    model = nn.Linear(3, 3)
    model.rows = [
        *([1, 2], Refuses([1, 2]), collections.deque([1, 2], 2), bytearray([1, 2]), array.array("i", [1, 2])),
        *(FrozenSet([1, 2]), {1: None, 2: None}, collections.OrderedDict.fromkeys([1, 2])),
    ]
    before = [repr(row) for row in model.rows if type(row) is not FrozenSet]
    snapshot = Snapshot(model)
    for row in model.rows[:5]:
        row[0] = 3
        row.append(4)
    model.rows[5].add(3)
    model.rows[6][3] = model.rows[6].pop(1)
    model.rows[7].move_to_end(1)
    assert snapshot.restore() is Damage.UNDONE
    assert [repr(row) for row in model.rows if type(row) is not FrozenSet] == before
    assert set.__len__(model.rows[5]) == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_depth_and_kinds_of_tensors_are_no_obstacle():
    model = nn.Linear(3, 3)
    model.deep = functools.reduce(lambda inner, _: [inner], range(3000), [])
    model.nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    model.eight = torch.ones(2).to(torch.float8_e4m3fn)
    assert not Snapshot(model).restore()


class Averages(nn.Module):
    """Moves an average of its weights in each pass, which is equal to them before the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 2)
        self.average = copy.deepcopy(self.layer).requires_grad_(False)
        self.interrupted = False

    @torch.no_grad()
    def forward(self) -> None:
        for mean, weight in zip(self.average.parameters(), self.layer.parameters(), strict=True):
            mean.mul_(0.5)
            if self.interrupted:
                raise KeyboardInterrupt
            mean.add_(weight, alpha=0.5)


def test_what_only_an_interrupted_pass_changes_is_restored():
    model = Averages()
    before = portrait(model)
    snapshot = Snapshot(model)
    model()
    snapshot.after_a_pass()
    model.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        model()
    snapshot.after_a_pass()
    with snapshot.changed(lambda tensor: tensor.mul_(2)):
        pass
    snapshot.restore()
    assert changes(before, portrait(model)) == {}


def test_an_interrupted_first_pass_does_not_say_what_moves():
    model = Averages()
    before = portrait(model)
    snapshot = Snapshot(model)
    snapshot.after_a_pass(complete=False)
    with torch.no_grad():
        model.layer.weight.add_(1)
    model()
    snapshot.after_a_pass()
    assert changes(before, portrait(model)) == {}


def test_kernels_that_a_lever_has_moved_are_restored_where_they_are():
    model = Averages()
    with torch.no_grad():
        model.layer.weight.add_(1)
    weight, average = (each.weight.detach().clone() for each in (model.layer, model.average))
    snapshot = Snapshot(model)
    model()
    snapshot.after_a_pass()
    with to_channels_last(model):
        model()
        snapshot.after_a_pass()
        assert torch.equal(model.average.weight, average)
    with snapshot.changed(lambda tensor: tensor.mul_(2)):
        assert torch.equal(model.layer.weight, 2 * weight)
    assert not snapshot.restore()


def test_what_is_not_trained_is_changed_in_other_memory(tmp_path):
    path = tmp_path / "table"
    np.ones(3, dtype="f4").tofile(path)
    model = nn.Linear(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that cannot be written
        model.register_buffer("table", torch.from_numpy(np.memmap(path, dtype="f4", mode="r")))
    before = portrait(model)
    snapshot = Snapshot(model)
    snapshot.after_a_pass()
    with snapshot.changed(lambda tensor: tensor.mul_(2)):
        assert model.table.tolist() == [2, 2, 2]
        assert set(changes(before, portrait(model)))
    assert changes(before, portrait(model)) == {}
    assert not snapshot.restore()
