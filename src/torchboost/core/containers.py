"""Exchange the tensors inside what a forward pass returns; what holds them stays what it is."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["with_tensors"]


def with_tensors(value: Any, change: Callable[[Tensor], Tensor], strange: Callable[[Any], None] | None = None) -> Any:
    """Return ``value`` with ``change`` applied to the tensors in it, however nested.

    Mappings, sequences, named tuples, the tuples that torch returns and dataclasses are looked into. They are copied
    and not built again: constructors and ``__post_init__`` do not run, attributes stay. Where nothing changes, the
    object itself is returned, and so is one that is of another kind or cannot be copied.

    Args:
        value: A tensor, or anything else.
        change: Returns the tensor itself where it has nothing to change.
        strange: Called with what is of another kind or cannot be copied; it may raise a ``RuntimeError``.
    """
    if isinstance(value, Tensor):
        return change(value)
    inner = partial(with_tensors, change=change, strange=strange)
    try:
        if isinstance(value, tuple):
            return _tuple(value, inner)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _record(value, inner)
        if isinstance(value, MutableMapping):
            return _filled(value, value.items(), inner)
        if isinstance(value, MutableSequence):
            return _filled(value, enumerate(value), inner)
    except (TypeError, ValueError, AttributeError):  # a class with rules of its own
        pass
    if strange is not None:
        strange(value)
    return value


def _tuple(value: tuple[Any, ...], inner: Callable[[Any], Any]) -> tuple[Any, ...]:
    items = [inner(item) for item in value]
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


def _record(value: Any, inner: Callable[[Any], Any]) -> Any:
    held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}
    if not torch.compiler.is_compiling():
        held |= _attributes(value)
    changed = {name: inner(entry) for name, entry in held.items()}
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


def _attributes(value: Any) -> dict[str, Any]:
    """Return what a dataclass holds besides its fields, such as what ``__post_init__`` has made of them."""
    return {} if isinstance(value, MutableMapping) else getattr(value, "__dict__", {})


def _filled(value: Any, items: Iterable[tuple[Any, Any]], inner: Callable[[Any], Any]) -> Any:
    pairs = [(key, entry, inner(entry)) for key, entry in items]
    changed = [(key, new) for key, old, new in pairs if new is not old]
    if not changed:
        return value
    made = copy.copy(value)
    for key, entry in changed:
        made[key] = entry
    return made
