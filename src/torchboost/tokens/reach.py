"""What a model and its forward hooks write to outside of modules, as far as it can be reached."""

from __future__ import annotations

import functools
import types
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchboost.core.contents import CONTAINERS, Way
from torchboost.core.forward import is_our_hook
from torchboost.core.torch_private import hooks_of_all_modules, module_hooks

OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
WAYS: dict[type, Way] = {
    **CONTAINERS,
    **dict.fromkeys((defaultdict, Counter), CONTAINERS[dict]),
    types.CellType: (lambda cell: cell.cell_contents, lambda cell, new: setattr(cell, "cell_contents", new)),
}
"""How containers, and variables of enclosing functions, are read and written back."""
_CODE = (types.FunctionType, types.MethodType, functools.partial)
_OPAQUE = (*_CODE, types.BuiltinFunctionType, type(functools.cache(len)), types.ModuleType, type, Tensor)
Place = tuple[Mapping[str, Any], str]
"""Where a class or a Python module has something, and under which name."""
_NOT_OF_USERS = frozenset(
    {"torch", "torchboost", "builtins", "logging", "queue", "threading", "asyncio", "concurrent", "multiprocessing"}
)
"""Packages whose classes keep nothing of a pass, or what other threads write to."""
_LONGEST = 1000
"""A container with more entries is not searched for others."""


def reached_by_hooks(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the variables, objects and containers that forward hooks of users name.

    Names of a Python module count if they are not of functions. What the functions that a hook calls name does not,
    unless these are variables of it.
    """
    registries = [registry for module in modules for registry in module_hooks(module)[:2] if registry]
    registries += hooks_of_all_modules
    waiting = [hook for registry in registries for hook in registry.values() if not is_our_hook(hook)]
    found: dict[int, Any] = {}
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found[id(one)] = one
            waiting += _named_by(one)
    return [*found.values()]


def places_of_classes(modules: Iterable[nn.Module]) -> list[Place]:
    """Return where the classes of modules, and Python modules that their methods name, have what a pass may write to.

    These are containers, objects and tensors. Functions of the same package that methods name are followed.
    """
    kinds = [kind for kind in dict.fromkeys(kind for m in modules for kind in type(m).__mro__) if not _is_foreign(kind)]
    places: dict[tuple[int, str], Place] = {
        (id(kind), name): (vars(kind), name) for kind in kinds for name in vars(kind)
    }
    waiting: list[Any] = [getattr(one, "__func__", one) for kind in kinds for one in vars(kind).values()]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        variables = function.__globals__
        named = [name for name in _names_in(function.__code__) if name in variables]
        places |= {(id(variables), name): (variables, name) for name in named}
        waiting += [variables[name] for name in named if _home(variables[name]) == _home(function)]
    return [(owner, name) for owner, name in places.values() if _may_change(owner[name])]


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)


def _may_change(value: Any) -> bool:
    return type(value) in WAYS or type(value) is Tensor or bool(attributes_of(value))


def _is_foreign(thing: Any) -> bool:
    return _home(thing) in _NOT_OF_USERS


def _home(thing: Any) -> str:
    return str(getattr(thing, "__module__", None)).split(".")[0]


def attributes_of(one: Any) -> dict[str, Any]:
    """Return the attributes of an object of users, without those that every module has."""
    attributes = None if isinstance(one, _OPAQUE) or _is_foreign(type(one)) else getattr(one, "__dict__", None)
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
