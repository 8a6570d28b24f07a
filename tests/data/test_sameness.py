"""Equal means equal in type, structure and bits."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from torchboost.data.sameness import bytes_of, can_be_pinned, parts_of, same, shares_memory

Pair = namedtuple("Pair", "a b")


@dataclass
class Record:
    x: Any


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Stubborn:
    def __reduce__(self) -> str:
        raise RuntimeError


EQUAL = {
    "tensor": torch.tensor([1.0, math.nan]),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "complex": torch.ones(3, dtype=torch.complex64).conj(),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(1),
    "empty": torch.ones(0, 3),
    "strided": torch.ones(4, 4).t()[::2],
    "array": np.array([1.0, math.nan]),
    "objects": np.array(["a", None, 1.0], dtype=object),
    "numpy scalar": np.float32(math.nan),
    "nested": {"a": [1, "x", (2.0, None)], 3: OrderedDict(b=b"y")},
    "named": Pair(torch.ones(1), 2),
    "record": Record(torch.ones(2)),
    "slots": Slotted(torch.ones(2)),
    "nan": math.nan,
    "set": {1, 2},
}


@pytest.mark.parametrize("value", EQUAL.values(), ids=EQUAL)
def test_a_copy_is_equal(value):
    assert same(value, copy.deepcopy(value))


UNEQUAL = {
    "bits": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "one unit": (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])),
    "zero": (0.0, -0.0),
    "type": (1, True),
    "precision": (torch.ones(1), torch.ones(1, dtype=torch.float64)),
    "shape": (torch.ones(2, 1), torch.ones(1, 2)),
    "strides": (torch.ones(2, 2), torch.ones(2, 2).t()),
    "graph": (torch.ones(1), torch.ones(1, requires_grad=True)),
    "sparse": (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
    "list and tuple": ([1], (1,)),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "longer": ([1], [1, 1]),
    "record": (Record(1), Record(2)),
    "slots": (Slotted(1), Slotted(2)),
    "array order": (np.ones((2, 2)), np.asfortranarray(np.ones((2, 2)))),
    "objects": (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
    "numpy and tensor": (np.ones(1), torch.ones(1)),
    "raises": (Stubborn(), Stubborn()),
    "functions": (lambda: None, lambda: None),
}


@pytest.mark.parametrize(("one", "two"), UNEQUAL.values(), ids=UNEQUAL)
def test_a_difference_is_seen(one, two):
    assert not same(one, two)


def test_a_container_that_contains_itself_is_not_equal():
    one: list[Any] = []
    one.append(one)
    two: list[Any] = []
    two.append(two)
    assert not same(one, two)


class Tagged(list):
    """A list with attributes."""


def test_attributes_of_containers_and_tensors_count():
    one, two = Tagged([1]), Tagged([1])
    one.tag, two.tag = 1, 1
    assert same(one, two)
    two.tag = 2
    assert not same(one, two)
    one, two = torch.ones(1), torch.ones(1)
    one.tag = 1
    assert not same(one, two)


def test_pinned_memory_that_keeps_types():
    assert can_be_pinned({"a": [torch.ones(1), 1, 2.0, "x", None], "b": Pair(torch.ones(1), 2)})
    for other in ((torch.ones(1), 2), np.ones(1), Record(1), torch.ones(1, device="meta"), torch.eye(2).to_sparse()):
        assert not can_be_pinned([other])


def test_memory():
    data = torch.ones(4, 3)
    assert bytes_of({"a": data, "b": [np.ones(2)]}) == 64
    assert bytes_of(torch.eye(2).to_sparse()) == 0
    assert shares_memory([data[1]], {"x": data[2]})
    assert not shares_memory(data, data.clone())
    array = np.ones(3)
    assert shares_memory(array, torch.from_numpy(array))
    assert not shares_memory(torch.ones(0), torch.ones(0))
    assert parts_of(Record(Pair(data, {"x": {1, 2}})))[1] == [data]
    assert bytes_of(lambda: data) == 0
