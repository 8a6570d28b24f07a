"""How the contents of containers and the states of random generators are read and written, to restore them later."""

from __future__ import annotations

import array
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

Way = tuple[Callable[[Any], Any], Callable[[Any, Any], object]]
"""How something is read, and how what was read is written back."""


def write_dict(owner: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """Replace the entries of a dictionary."""
    kind: Any = OrderedDict if isinstance(owner, OrderedDict) else dict  # subclasses may refuse to be updated
    kind.clear(owner)
    for key, value in entries.items():
        kind.__setitem__(owner, key, value)


def way_of(value: Any, ways: Mapping[type, Way]) -> Way | None:
    """Return the way of the first class of which a value is an instance. None if there is none."""
    return next((way for kind, way in ways.items() if isinstance(value, kind)), None)


def same_numbers(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same numbers. NaN counts as one."""
    return torch.equal(left, right) or bool(((left == right) | ((left != left) & (right != right))).all())


def _sliced(kind: Any) -> Way:
    return lambda owner: kind.__getitem__(owner, slice(None)), lambda o, new: kind.__setitem__(o, slice(None), new)


CONTAINERS: dict[type, Way] = {
    OrderedDict: (  # its order is its own
        lambda owner: [(key, dict.__getitem__(owner, key)) for key in OrderedDict.__iter__(owner)],
        lambda owner, entries: write_dict(owner, dict(entries)),
    ),
    dict: (lambda owner: dict(dict.items(owner)), write_dict),
    set: (lambda owner: set(set.__iter__(owner)), lambda o, new: (set.clear(o), set.update(o, new))),
    deque: (lambda owner: list(deque.__iter__(owner)), lambda o, new: (deque.clear(o), deque.extend(o, new))),
    **{kind: _sliced(kind) for kind in (list, bytearray, array.array)},
}
"""Past the overrides of subclasses."""
GENERATORS: dict[type, Way] = {
    torch.Generator: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    random.Random: (lambda g: g.getstate(), lambda g, state: g.setstate(state)),
    np.random.RandomState: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    np.random.Generator: (lambda g: g.bit_generator.state, lambda g, state: setattr(g.bit_generator, "state", state)),
}
