"""What a model and its forward hooks write to outside of modules, as far as it can be reached."""

from __future__ import annotations

import functools
import types
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from torchboost.core.contents import CONTAINERS, Way
from torchboost.core.forward import is_our_hook
from torchboost.core.torch_private import module_hooks

OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
WAYS: dict[type, Way] = {
    **CONTAINERS,
    **dict.fromkeys((defaultdict, Counter), CONTAINERS[dict]),
    types.CellType: (lambda cell: cell.cell_contents, lambda cell, new: setattr(cell, "cell_contents", new)),
}
"""How containers, and variables of enclosing functions, are read and written back."""
_CODE = (types.FunctionType, types.MethodType, functools.partial)
_OPAQUE = (*_CODE, types.BuiltinFunctionType, types.ModuleType, type, Tensor)
_LONGEST = 1000
"""A container with more entries is not searched for others."""


def reached_by_hooks(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the variables, objects and containers that forward hooks of users name.

    Names of a Python module count if they are not of functions. What the functions that a hook calls name does not,
    unless these are variables of it.
    """
    registries = [registry for module in modules for registry in module_hooks(module)[:2] if registry]
    waiting = [hook for registry in registries for hook in registry.values() if not is_our_hook(hook)]
    found: dict[int, Any] = {}
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found[id(one)] = one
            waiting += _named_by(one)
    return [*found.values()]


def attributes_of(one: Any) -> dict[str, Any]:
    """Return the attributes of an object, without those that every module has. None of tensors, classes and code."""
    attributes = None if isinstance(one, _OPAQUE) else getattr(one, "__dict__", None)
    if type(attributes) is not dict:
        return {}
    return {name: value for name, value in attributes.items() if name not in OF_MODULES}


def with_inner(things: Iterable[Any]) -> list[Any]:
    """Return things and, of containers among them, the containers that these hold."""
    found: dict[int, Any] = {}
    waiting = [*things]
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found[id(one)] = one
            if type(one) in WAYS and type(one) is not types.CellType and len(one) <= _LONGEST:
                waiting += [entry for entry in (one.values() if isinstance(one, dict) else one) if type(entry) in WAYS]
    return [*found.values()]


def _named_by(code: Any) -> Iterator[Any]:
    if isinstance(code, functools.partial):
        yield from (code.func, *code.args, *code.keywords.values())
    elif isinstance(code, types.MethodType):
        yield from (code.__func__, code.__self__)
    elif isinstance(code, types.CellType):
        yield code.cell_contents
    elif isinstance(code, types.FunctionType):
        yield from filter(_is_filled, code.__closure__ or ())
        yield from (*(code.__defaults__ or ()), *(code.__kwdefaults__ or {}).values())
        named = (code.__globals__.get(name) for name in code.__code__.co_names)
        yield from (value for value in named if not isinstance(value, _OPAQUE))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
