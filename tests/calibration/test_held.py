"""What is read from a container can be written back, whatever its class allows."""

from __future__ import annotations

import array
import collections

import pytest

from torchboost.calibration.held import dict_items, read_sequence, read_set, write_dict, write_sequence, write_set


class FrozenList(list):
    def clear(self) -> None:
        raise RuntimeError("frozen")

    extend = __iter__ = __delitem__ = clear


class FrozenSet(set):
    def clear(self) -> None:
        raise RuntimeError("frozen")

    __iter__ = clear


@pytest.mark.parametrize(
    "held", [[1, 2], FrozenList([1, 2]), collections.deque([1, 2], 2), bytearray([1, 2]), array.array("i", [1, 2])]
)
def test_sequences(held):
    entries = read_sequence(held)
    held[0] = 3
    held.append(4)
    write_sequence(held, entries)
    assert read_sequence(held) == [1, 2]


def test_sets():
    held = FrozenSet({1})
    entries = read_set(held)
    held.add(2)
    write_set(held, entries)
    assert read_set(held) == {1}


def test_the_order_of_a_dict():
    held = collections.OrderedDict.fromkeys("abc")
    entries = dict_items(held)
    held.move_to_end("a")
    assert list(dict_items(held)) == ["b", "c", "a"]
    write_dict(held, entries)
    assert list(held) == ["a", "b", "c"]
