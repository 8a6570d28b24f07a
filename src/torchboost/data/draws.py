"""Whether loading a batch draws random numbers, from generators of the process or of the data set."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch

__all__ = ["KINDS", "Draws", "generators_behind", "is_of_process", "is_own", "state_of"]

KINDS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
"""Types of generators that an object can hold."""

_MOST_FUNCTIONS = 500
_OWN = "a generator of its own"


class Draws:
    """Looks whether generators have moved: those of torch, NumPy and Python, and further ones.

    Args:
        held: Generators that a data set holds.

    Cost: about 30 microseconds per look.

    Example:
        >>> import torch
        >>> draws = Draws()
        >>> draws.moved()
        ''
        >>> _ = torch.rand(1)
        >>> draws.moved()
        "torch's generator"
    """

    def __init__(self, held: Sequence[Any] = ()) -> None:
        self._looks: list[tuple[str, Callable[[], Any]]] = [
            ("torch's generator", lambda: bytes(torch.get_rng_state().numpy())),
            ("NumPy's generator", _of_numpy),
            ("Python's generator", random.getstate),
            *((_OWN, partial(state_of, generator)) for generator in held),
        ]
        self._states = [look() for _, look in self._looks]

    def moved(self) -> str:
        """Return which generator has moved since the last look, an own one first; empty if none has."""
        before, self._states = self._states, [look() for _, look in self._looks]
        moved = [name for (name, _), old, new in zip(self._looks, before, self._states, strict=True) if old != new]
        return _OWN if _OWN in moved else (moved or [""])[0]


def generators_behind(objects: Iterable[Any]) -> list[Any]:
    """Return the generators that functions and methods reach by a global name, directly or through other functions.

    Args:
        objects: Functions and classes are searched, others are ignored. At most 500 functions are.
    """
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
    """Whether a generator is the one of the process, to which functions such as ``random.random`` belong."""
    shared: list[Any] = [torch.default_generator, random.random, np.random.rand]
    return any(generator is getattr(each, "__self__", each) for each in shared)


def is_own(moved: str) -> bool:
    """Whether it was a generator that the data set holds."""
    return moved == _OWN


def state_of(generator: Any) -> Any:
    """Return the state of a generator as a value that can be compared and printed.

    Args:
        generator: Of one of :data:`KINDS`.
    """
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy())
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain((generator.bit_generator if isinstance(generator, np.random.Generator) else generator).state)


def _of_numpy() -> Any:
    state: Any = np.random.get_state()
    return (state[1].tobytes(), *state[2:])


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return [(key, _plain(value)) for key, value in state.items()]
    return state.tobytes() if isinstance(state, np.ndarray) else state
