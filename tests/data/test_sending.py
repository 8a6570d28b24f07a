"""What a worker builds again, what it gets by reference, and what is refused."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from torchboost.data import sending
from torchboost.data.sending import Unfit, pack


class Holder:
    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


def test_large_parts_are_held_by_reference():
    weight, names, array = torch.ones(3), [str(i) for i in range(5000)], np.ones(4)
    packed = pack(Holder(weight=weight, names=names, array=array, few=[1, 2], text=b"x" * 5000))
    again = packed.unpack()
    assert again.weight is weight
    assert again.names is names
    assert again.array is array
    assert again.few == [1, 2]
    assert len(packed.pickled) < 1000


def test_functions_and_local_classes():
    class Local:
        def __init__(self) -> None:
            self.function = lambda x: x + 1

    assert pack(Local()).unpack().function(1) == 2
    assert pack("x".upper).unpack()() == "X"
    assert pack(torch.nn.Linear(2, 2)).unpack().weight.shape == (2, 2)


def test_generators_are_listed():
    held = [random.Random(1), np.random.default_rng(1), torch.Generator(), np.random.RandomState(1)]
    assert pack(held).generators == held
    assert pack(held[0].random).generators == [held[0]]
    assert pack([random.random, np.random.rand, torch.default_generator]).generators == []


@pytest.mark.parametrize(
    "held",
    [
        threading.Lock(),
        torch.ones(1, device="meta"),
        (i for i in range(2)),
        (lambda lock: lambda: lock)(threading.Lock()),
        lambda lock=threading.Lock(): lock,  # noqa: B008
    ],
    ids=["lock", "device", "generator", "closure", "default"],
)
def test_refused(held):
    with pytest.raises(Unfit, match="the data set"):
        pack(Holder(held=held))


def test_a_structure_that_is_too_large(monkeypatch):
    monkeypatch.setattr(sending, "MOST_BYTES", 10_000)
    with pytest.raises(Unfit, match="takes more than"):
        pack([{"key": i} for i in range(10_000)])


def test_the_version_follows_every_value():
    generator = random.Random(1)
    data = Holder(weight=torch.ones(3), array=np.ones(3), names=["a"] * 2000, deep={"x": [1]}, generator=generator)
    versions = [pack(data).version, pack(data).version]
    assert versions[0] == versions[1] is not None
    changes = (
        lambda: data.weight.add_(1),
        lambda: data.array.__setitem__(0, 2),
        lambda: data.names.__setitem__(1000, "b"),
        lambda: data.deep["x"].append(2),
        generator.random,
        lambda: data.__dict__.update(more=1),
    )
    for change in changes:
        change()
        versions.append(pack(data).version)
    assert len(set(versions)) == 7


def test_the_version_of_a_closure():
    factor = [1]
    data = Holder(scale=lambda x: x * factor[0])
    before = pack(data).version
    factor[0] = 2
    assert pack(data).version != before


def test_no_version_of_much_data(monkeypatch):
    monkeypatch.setattr(sending, "MOST_HASHED", 100)
    assert pack(torch.ones(1000)).version is None
    assert pack(torch.eye(3).to_sparse()).version is None
