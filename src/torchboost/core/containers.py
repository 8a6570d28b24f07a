"""Exchange the tensors inside what a forward pass returns; what holds them stays what it is."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["with_tensors"]


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with ``change`` applied to the tensors in it, however nested.

    Mappings, sequences, named tuples, the tuples that torch returns and dataclasses are looked into. They are copied
    and not built again: constructors and ``__post_init__`` do not run, attributes stay. Where nothing changes, the
    object itself is returned, and so is one that is of another kind or cannot be copied.

    Args:
        value: A tensor, or anything else.
        change: Returns the tensor itself where it has nothing to change.
    """
    if isinstance(value, Tensor):
        return change(value)
    try:
        if isinstance(value, tuple):
            return _tuple(value, change)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _record(value, change)
        if isinstance(value, MutableMapping):
            return _filled(value, value.items(), change)
        if isinstance(value, MutableSequence):
            return _filled(value, enumerate(value), change)
    except (TypeError, ValueError, AttributeError):  # a class with rules of its own
        pass
    return value


def _tuple(value: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    items = [with_tensors(item, change) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    kind: Any = type(value)
    if kind is tuple:
        return tuple(items)
    if hasattr(kind, "_make"):
        return kind._make(items)
    if kind.__module__ == "torch.return_types":  # tuple.__new__ refuses them
        return kind(items)
    made = tuple.__new__(kind, items)
    vars(made).update(vars(value))
    return made


def _record(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}
    changed = {name: with_tensors(entry, change) for name, entry in held.items()}
    changed = {name: entry for name, entry in changed.items() if entry is not held[name]}
    if not changed:
        return value
    if torch.compiler.is_compiling():  # the compiler follows this, not the copy of any class
        return dataclasses.replace(value, **changed)
    made = copy.copy(value)
    for name, entry in changed.items():
        try:
            setattr(made, name, entry)
        except dataclasses.FrozenInstanceError:
            object.__setattr__(made, name, entry)
    return made


def _filled(value: Any, items: Iterable[tuple[Any, Any]], change: Callable[[Tensor], Tensor]) -> Any:
    pairs = [(key, entry, with_tensors(entry, change)) for key, entry in items]
    changed = [(key, new) for key, old, new in pairs if new is not old]
    if not changed:
        return value
    made = copy.copy(value)
    for key, entry in changed:
        made[key] = entry
    return made
