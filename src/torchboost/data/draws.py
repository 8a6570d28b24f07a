"""Whether loading a batch draws random numbers, from generators of the process or of the data set."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch

KINDS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
"""Types of generators that an object can hold."""

_OF_PROCESS = {
    "torch's generator": torch.default_generator,
    "NumPy's generator": getattr(np.random.rand, "__self__", None),
    "Python's generator": getattr(random.random, "__self__", None),
}
"""The generators to which functions such as ``random.random`` belong."""
_MOST_FUNCTIONS = 500
_OWN = "a generator of its own"


class Draws:
    """Looks whether the generators of torch, NumPy and Python, and those that a data set holds, have moved.

    Cost: about 30 microseconds per look.
    """

    def __init__(self, held: Sequence[Any] = ()) -> None:
        self._generators = [*_OF_PROCESS.items(), *((_OWN, generator) for generator in held)]
        self._states = self._look()

    def moved(self) -> str:
        """Return which generator has moved since the last look, an own one first, or an empty text."""
        before, self._states = self._states, self._look()
        moved = [name for (name, _), old, new in zip(self._generators, before, self._states, strict=True) if old != new]
        return _OWN if _OWN in moved else (moved or [""])[0]

    def _look(self) -> list[Any]:
        return [state_of(generator) for _, generator in self._generators]


def generators_behind(objects: Iterable[Any]) -> list[Any]:
    """Return the generators that functions and classes reach by a global name, also through up to 500 functions."""
    queue, seen, found = deque(objects), set[int](), []
    while queue and len(seen) < _MOST_FUNCTIONS:
        each = queue.popleft()
        if isinstance(each, type):
            queue.extend(value for kind in each.__mro__ for value in map(_function, vars(kind).values()) if value)
        elif isinstance(each, FunctionType) and id(each) not in seen:
            seen.add(id(each))
            values = [each.__globals__[name] for name in _names(each.__code__) if name in each.__globals__]
            found += [value for value in values if isinstance(value, KINDS) and not is_of_process(value)]
            queue.extend(value for value in values if isinstance(value, (type, FunctionType)))
    return list({id(each): each for each in found}.values())


def _function(member: Any) -> Any:
    member = getattr(member, "fget", None) or getattr(member, "__func__", member)
    return member if isinstance(member, FunctionType) else None


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def is_of_process(generator: Any) -> bool:
    """Whether a generator is the global one of the process, to which functions such as ``random.random`` belong."""
    return any(generator is each for each in _OF_PROCESS.values())


def is_own(moved: str) -> bool:
    """Whether it was a generator that the data set holds."""
    return moved == _OWN


def state_of(generator: Any) -> Any:
    """Return the state of a generator of one of :data:`KINDS` as a value that can be compared and printed."""
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy())
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain((generator.bit_generator if isinstance(generator, np.random.Generator) else generator).state)


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return [(key, _plain(value)) for key, value in state.items()]
    return state.tobytes() if isinstance(state, np.ndarray) else state
