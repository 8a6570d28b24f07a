"""Tensors that answer functions of torch from a part of their positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from torchboost.core.forward import with_tensors
from torchboost.core.torch_private import Untraced, functions_of_subclasses_off
from torchboost.tokens.history import (
    KEPT,
    WRITTEN,
    check_history,
    derived,
    from_sources,
    has_passed_autograd,
    rows_in,
    written,
)
from torchboost.tokens.rows import MissingRows, Rows

Answer = Callable[..., Any]
"""Takes the function of torch, and its arguments as it does."""


class PaddedRows(Rows):
    """Rows that functions of torch accept instead of the padded tensor.

    Functions that treat every position by itself compute on the rows. So do attention whose mask excludes the padding,
    and a loss that ignores it. Functions without an answer get the whole tensor: from ``fill``, or from ``source``. If
    there is neither, they raise :class:`MissingRows`.

    Attributes:
        answers: Function of torch -> its answer for such tensors.
        precedence: Among several classes in a call, the class with the highest number answers.
    """

    answers: ClassVar[Mapping[Any, Answer]] = {}
    precedence: ClassVar[int] = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a call of a function of torch."""
        return _answered(cls, func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer calls below the functions of torch, such as by a function of autograd or a collective."""
        owners = [one.positions.owner for one in rows_in((*args, *(kwargs or {}).values())) if one.source is None]
        if owners:
            raise _missing(f"{func} is called below the functions of torch", owners)
        return func(*from_sources(args), **from_sources(kwargs or {}))


@Untraced
def _answered(cls: type[PaddedRows], func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with functions_of_subclasses_off():
        if func in _METADATA:
            return func(*args, **kwargs)
        rows = [*rows_in((*args, *kwargs.values()))]
        sources = [one.source for one in rows]
        if None not in sources and rows:
            if any(one.memory.copy_written for one in rows):
                raise RuntimeError(WRITTEN)
            if func in _PLACES and not any(one.memory.outdated for one in rows):
                return None if func is _GRADIENT else func(*args, **kwargs)
            check_history(func, args, rows)
            target = _target(func, args, kwargs)
            if target is not None:
                return written(func, args, kwargs, target)
        passed = [*filter(has_passed_autograd, rows)] if torch.is_grad_enabled() else []
        owners = [one.positions.owner for one in passed if one.source is None]
        if owners:
            raise _missing(f"{_name(func)}: a function of autograd has made its argument", owners)
        if passed and func not in _WITHOUT_GRADIENT:
            return func(*from_sources(args), **from_sources(kwargs))
        try:
            for one in rows:
                one.check()
            if None in sources and not torch.is_grad_enabled() and any(one.needs_grad for one in rows):
                raise MissingRows("it computes without gradients")
            result = _answer(_answering(cls, types).answers, func, args, kwargs, rows)
        except MissingRows as reason:
            if None in sources:
                owners = [one.positions.owner for one in rows if one.source is None]
                raise _missing(f"{_name(func)}: {reason}", owners) from None
            return func(*from_sources(args), **from_sources(kwargs))
        if None not in sources:
            parts = result if isinstance(result, (tuple, list)) else (result,)
            for place, one in enumerate(parts):
                if isinstance(one, Rows) and one.source is None:
                    derived(one, (func, args, kwargs), place if parts is result else None)
        return result


def _missing(reason: str, owners: list[object]) -> BaseException:
    """Return what a call has to see, or the error for the loop if the call is over."""
    over = any(getattr(owner, "over", False) for owner in owners)
    return RuntimeError(KEPT) if over else MissingRows(reason, owners)


def _answering(kind: type[PaddedRows], types: Any) -> type[PaddedRows]:
    """Return the class that answers a call."""
    if len(types) > 1:
        return max((one for one in types if issubclass(one, PaddedRows)), key=lambda one: one.precedence)
    return kind


def _whole(tensor: Tensor) -> Tensor:
    return tensor.whole() if isinstance(tensor, Rows) else tensor


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def _answer(
    answers: Mapping[Any, Answer], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: list[Rows]
) -> Any:
    if kwargs and kwargs.get("out") is not None:
        raise MissingRows("it writes to a tensor")
    answer = answers.get(func)
    if answer is not None:
        try:
            result = answer(func, *args, **{name: value for name, value in kwargs.items() if name != "inplace"})
            return args[0].replace(result) if kwargs.get("inplace") else result
        except (ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            # Unusual arguments. If they are wrong, the call with whole tensors says so.
            raise MissingRows(f"it raised {type(error).__name__}") from error
        except MissingRows:
            if all(one.filled() is None and not one.positions.complete for one in rows):
                raise
    if args and isinstance(args[0], Rows) and _writes(func, kwargs):
        raise MissingRows("it writes to its argument")  # a whole tensor would be another one
    if func is torch.autograd.grad and [*rows_in(args[1:2])]:
        raise MissingRows("it asks for a gradient")  # the graph does not know the whole tensor
    args, kwargs = with_tensors(args, _whole), with_tensors(kwargs, _whole)
    result = func(*args, **kwargs)
    for part in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(part, Tensor) and any(_in_one_memory(part, arg) for arg in args):
            for one in rows:
                one.memory.copied(part)
    return result


def _in_one_memory(one: Tensor, two: Any) -> bool:
    return isinstance(two, Tensor) and one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    name = _name(func)
    if kwargs.get("inplace") or name in _WRITING:
        return True
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def _target(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows | None:
    """Return the rows that a function writes to, if any."""
    writes = _writes(func, kwargs) or _name(func) == "requires_grad_"
    target = args[0] if args and writes else kwargs.get("out")
    return target if isinstance(target, Rows) else None


def functions(*names: str) -> list[Any]:
    """Return the functions of torch and ``torch.nn.functional``, and the methods of tensors, with these names."""
    return [getattr(home, name) for name in names for home in (torch, F, Tensor) if hasattr(home, name)]


def getter(name: str) -> Any:
    """Return the function that is called if an attribute of a tensor is read."""
    return getattr(Tensor, name).__get__


def table(names: Mapping[Answer, str]) -> dict[Any, Answer]:
    """Return the answers of functions with these names, and of their forms that write to their first argument."""
    answers: dict[Any, Answer] = {getter("requires_grad"): lambda func, x: x.needs_grad}
    for answer, listed in names.items():
        for name in listed.split():
            plain = functions(name)
            writing = functions(f"__i{name[2:]}" if name.startswith("__") else f"{name}_")
            answers |= dict.fromkeys(plain, answer) | dict.fromkeys(writing, partial(_in_place, answer, plain[-1]))
    return answers


def of_arguments(answer: Callable[..., Any]) -> Answer:
    """Return the answer of a function that takes the arguments alone."""
    return lambda func, *args, **kwargs: answer(*args, **kwargs)


def _in_place(answer: Answer, plain: Any, func: Any, x: Rows, *args: Any, **kwargs: Any) -> Rows:
    return x.replace(answer(plain, x, *args, **kwargs))


_GETTERS = "shape dtype device ndim layout is_cpu is_cuda is_nested is_sparse is_meta is_quantized is_leaf is_xpu"
_METADATA = frozenset(
    [getter(name) for name in _GETTERS.split()]
    + functions("size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "get_device", "nelement")
    + [Tensor.__len__, Tensor.__hash__]
)
_GRADIENT = getter("grad")
_PLACES = frozenset({getter("grad_fn"), getter("requires_grad"), _GRADIENT})
"""The place of a tensor in the graph of autograd. It is known once the tensor has left the model."""
_WITHOUT_GRADIENT = frozenset(functions("argmax", "argmin", "eq", "ne", "__eq__", "__ne__", "detach"))
_WRITING = frozenset({"__setitem__", "__set__", "__delete__", "backward", "retain_grad", "register_hook"}) | {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift")
}
"""Methods that change their tensor without a name that ends in ``_``."""
