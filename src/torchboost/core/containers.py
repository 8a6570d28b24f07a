"""Find or replace the tensors inside the output of a forward pass, whatever containers hold them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["tensors_in", "with_tensors"]


def with_tensors(value: Any, change: Callable[[Tensor], Tensor], strange: Callable[[Any], None] | None = None) -> Any:
    """Return ``value`` with ``change`` applied to all tensors in it.

    Nested mappings, sequences, named tuples, torch's return types and dataclasses are searched. They are copied, not
    constructed: constructors and ``__post_init__`` do not run, and attributes are kept. If nothing changes, the object
    itself is returned. Objects of other types and objects that cannot be copied are returned unchanged.

    Args:
        value: A tensor, or anything else.
        change: Returns the new tensor, or the same one if it has nothing to change.
        strange: Called with objects of other types and objects that cannot be copied. It may raise a ``RuntimeError``.
    """
    if issubclass(type(value), Tensor):  # isinstance() asks a proxy for its class, which may raise
        return change(value)
    inner = partial(with_tensors, change=change, strange=strange)
    try:
        if isinstance(value, tuple):
            return _tuple(value, inner)
        # The compiler of torch 2.9 cannot trace the question whether None is one.
        if value is not None and dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _record(value, inner)
        if isinstance(value, MutableMapping):
            return _filled(value, value.items(), inner)
        if isinstance(value, MutableSequence):
            return _filled(value, enumerate(value), inner)
    except (TypeError, ValueError, AttributeError):  # a class with special rules
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
    copied = tuple.__new__(kind, items)
    vars(copied).update(vars(value))
    return copied


def _record(value: Any, inner: Callable[[Any], Any]) -> Any:
    fields = {
        field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)
    }
    if not torch.compiler.is_compiling():
        fields |= _attributes(value)
    changed = {name: inner(entry) for name, entry in fields.items()}
    changed = {name: entry for name, entry in changed.items() if entry is not fields[name]}
    if not changed:
        return value
    if torch.compiler.is_compiling():  # the compiler can trace this, but not copy.copy of any class
        return dataclasses.replace(value, **changed)
    copied = copy.copy(value)
    for name, entry in changed.items():
        try:
            setattr(copied, name, entry)
        except dataclasses.FrozenInstanceError:
            object.__setattr__(copied, name, entry)
    return copied


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a dataclass that are not fields, such as those set by ``__post_init__``."""
    return {} if isinstance(value, MutableMapping) else getattr(value, "__dict__", {})


def _filled(value: Any, items: Iterable[tuple[Any, Any]], inner: Callable[[Any], Any]) -> Any:
    pairs = [(key, entry, inner(entry)) for key, entry in items]
    changed = [(key, new) for key, old, new in pairs if new is not old]
    if not changed:
        return value
    copied = copy.copy(value)
    for key, entry in changed:
        copied[key] = entry
    return copied


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, in order. A container inside itself counts once."""
    tensors: list[Tensor] = []
    around: set[int] = set()
    waiting: list[tuple[bool, Any]] = [(True, value)]
    while waiting:
        enters, entry = waiting.pop()
        if issubclass(type(entry), Tensor):  # isinstance() asks a proxy for its class, which may raise
            tensors.append(entry)
        elif not enters:
            around.discard(id(entry))
        elif id(entry) not in around and (parts := _parts(entry)):
            around.add(id(entry))
            waiting.append((False, entry))
            waiting += [(True, part) for part in reversed(parts) if type(part) not in _PLAIN]
    return tensors


_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
"""Entries of a long list that are passed over quickly, because each call of a model is looked at."""


def _parts(value: Any) -> list[Any]:
    try:
        if isinstance(value, Mapping):
            return list(value.values())
        if isinstance(value, (tuple, list)):
            return list(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return [getattr(value, field.name) for field in dataclasses.fields(value)]
    except Exception:  # a container of the user may raise anything when it is read
        pass
    return []
