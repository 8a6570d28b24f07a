"""Objects are found by their real class, and no code of theirs runs."""

from __future__ import annotations

from typing import Any

from torchboost.core.wrapping import living


class Base:
    def __init__(self) -> None:
        self.held: list[Any] = []  # the collector knows objects that hold others


class Derived(Base):
    pass


class Pretends:
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")


def test_objects_of_a_class_and_of_its_subclasses_are_found() -> None:
    assert living(Base) == []
    first, second, other = Base(), Derived(), Pretends()
    assert {id(found) for found in living(Base)} == {id(first), id(second)}
    assert living(Derived) == [second]
    del second
    assert living(Derived) == []
    assert other is not None
