"""How what Python code may change is read and written back: containers, cells, slots, variables of classes."""

from __future__ import annotations

import array
import dis
import functools
import types
from collections import OrderedDict, deque
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

__all__ = [
    "CACHED",
    "SEQUENCES",
    "dict_items",
    "read_cached",
    "read_cell",
    "read_class",
    "read_names",
    "read_sequence",
    "read_set",
    "read_slots",
    "stored_globals",
    "write_array",
    "write_cached",
    "write_cell",
    "write_class",
    "write_dict",
    "write_names",
    "write_sequence",
    "write_set",
    "write_slots",
]

SEQUENCES = (list, deque, bytearray, array.array)


def dict_items(owner: dict[Any, Any]) -> dict[Any, Any]:
    """Return the entries of a dict in its order."""
    if isinstance(owner, OrderedDict):  # its order is its own
        return {key: dict.__getitem__(owner, key) for key in OrderedDict.__iter__(owner)}
    return dict(dict.items(owner))


def write_dict(owner: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """Give a dict these entries in this order."""
    kind: Any = OrderedDict if isinstance(owner, OrderedDict) else dict  # subclasses may refuse to be updated
    kind.clear(owner)
    for key, value in entries.items():
        kind.__setitem__(owner, key, value)


def _base(owner: Any, kinds: tuple[type, ...]) -> Any:
    """Return the class of Python that a container derives from, because subclasses may refuse or count."""
    return next((kind for kind in kinds if isinstance(owner, kind)), type(owner))


def read_sequence(owner: Any) -> list[Any]:
    """Return the entries of a sequence."""
    return list(_base(owner, SEQUENCES).__iter__(owner))


def write_sequence(owner: Any, entries: list[Any]) -> None:
    """Give a sequence these entries."""
    kind = _base(owner, SEQUENCES)
    if isinstance(owner, deque):
        kind.clear(owner)
    else:
        kind.__delitem__(owner, slice(None))
    kind.extend(owner, entries)


def read_set(owner: Any) -> set[Any]:
    """Return the entries of a set."""
    return set(_base(owner, (set,)).__iter__(owner))


def write_set(owner: Any, entries: set[Any]) -> None:
    """Give a set these entries."""
    kind = _base(owner, (set,))
    kind.clear(owner)
    for entry in entries:
        kind.add(owner, entry)


def write_array(owner: Any, entries: Any) -> None:
    """Give an array these numbers."""
    owner[...] = entries


CACHED = type(functools.lru_cache(len))
"""Functions that ``functools.cache`` or ``functools.lru_cache`` has made."""


def read_cached(owner: Any) -> int:
    """Return how many results a function has kept so far."""
    return owner.cache_info().misses


def write_cached(owner: Any, _: int) -> None:
    """Let a function forget its results, because those of a pass with levers may be of another format or precision."""
    owner.cache_clear()


_EMPTY = object()


def read_cell(cell: types.CellType) -> Any:
    """Return the variable of a closure."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def write_cell(cell: types.CellType, value: Any) -> None:
    """Set the variable of a closure, or unset it."""
    if value is _EMPTY:
        del cell.cell_contents
    else:
        cell.cell_contents = value


def read_slots(owner: Any, slots: list[types.MemberDescriptorType]) -> dict[Any, Any]:
    """Return slot -> value of those that are set."""
    found: dict[Any, Any] = {}
    for slot in slots:  # by the descriptor, since names may be mangled, and a property may have taken one
        with suppress(AttributeError):
            found[slot] = slot.__get__(owner, type(owner))
    return found


def write_slots(owner: Any, entries: dict[Any, Any], slots: list[types.MemberDescriptorType]) -> None:
    """Set the slots that have an entry, and unset the others."""
    for slot in slots:
        if slot in entries:
            slot.__set__(owner, entries[slot])
        else:
            with suppress(AttributeError):
                slot.__delete__(owner)


def read_class(owner: type) -> dict[str, Any]:
    """Return the variables of a class without its methods and what Python itself keeps there."""
    entries = vars(owner).items()
    return {name: value for name, value in entries if name[:2] != "__" and not hasattr(type(value), "__get__")}


def write_class(owner: type, entries: dict[str, Any]) -> None:
    """Give a class these variables."""
    for name in read_class(owner).keys() - entries.keys():
        type.__delattr__(owner, name)
    for name, value in entries.items():
        if vars(owner).get(name, _EMPTY) is not value:
            type.__setattr__(owner, name, value)


_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


def stored_globals(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that a function declares ``global`` and writes."""
    if _STORE_GLOBAL not in code.co_code[::2]:
        return ()
    return tuple({i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"})


def read_names(owner: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the variables of a Python module that exist."""
    return {name: owner[name] for name in names if name in owner}


def write_names(owner: MutableMapping[str, Any], entries: dict[str, Any], names: tuple[str, ...]) -> None:
    """Set the variables that have an entry, and remove the others."""
    for name in names:
        if name not in entries:
            owner.pop(name, None)
    owner.update(entries)
