"""The place of padded tensors in the graph of autograd, for code that sees this graph and no functions of torch.

Examples are DDP, which looks for parameters without a gradient, and subclasses of ``torch.autograd.Function``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from torchboost.core.forward import tensors_in, with_tensors
from torchboost.core.torch_private import functions_of_subclasses_off
from torchboost.tokens.rows import Memory, MissingRows, Rows, in_this_precision

Result = TypeVar("Result")

_ONLY = (
    "This works from the first training call on, which sees it, but not if it begins later: then leave them out, with "
    'config={"extra": {"unpad": False, "sparse_head": False}}'
)
_UNKNOWN = (
    "an output of a model with unpad or sparse_head got a gradient below the functions of torch, such as from a "
    f"torch.autograd.Function, or from DDP with find_unused_parameters or static_graph. {_ONLY}"
)
_ASKED = f"a gradient or a hook is asked for at an output of a model with unpad or sparse_head. {_ONLY}"
WRITTEN = (
    "an output of the model was written to in place after it was read; write to a copy, such as outputs.logits.clone()"
)
KEPT = (
    "a tensor from inside of a model with unpad or sparse_head was kept, such as by a hook, and is read at padding "
    f"after the call. {_ONLY}"
)
_OF_THE_GRAPH = frozenset({"__set__", "__delete__", "backward", "retain_grad", "register_hook", "requires_grad_"})
_ASKS = frozenset({Tensor.register_hook, Tensor.retain_grad})


def in_the_graph(rows: Rows) -> None:
    """Give rows that leave the model a place in the graph. A gradient that arrives there counts as a reading."""
    like = rows.empty() if rows.known is None else rows.known
    if rows.node is not None or not (like.requires_grad and torch.is_grad_enabled()):
        return
    memory, first, known = rows.memory, rows.source, rows.known is not None
    itself = weakref.ref(rows)  # the graph belongs to the rows

    def gradient(of_padded: Tensor) -> Tensor:
        source = getattr(itself(), "source", None) or first
        if not known or memory.outdated or source is None:
            raise RuntimeError(_UNKNOWN)
        source()
        return of_padded

    with functions_of_subclasses_off():
        _Place.apply(like, [rows], gradient)
        rows.node = rows.grad_fn


def derived(rows: Rows, call: tuple[Any, tuple[Any, ...], dict[str, Any]], place: int | None) -> None:
    """Let rows that a function of torch made of rows outside of the model lead to the whole tensor.

    ``place`` is the place of the tensor in the result of the call. None if it is the result.
    """
    func, args, kwargs = call

    def part(result: Any) -> Tensor:
        return result if place is None else result[place]

    whole = as_now(lambda: part(func(*from_sources(args), **from_sources(kwargs))), rows.device.type)
    rows.source = functools.cache(whole)  # always the same tensor
    known = with_tensors((args, kwargs), _known)
    if not any(isinstance(one, Rows) for one in tensors_in(known)):
        rows.known = part(func(*known[0], **known[1]))
    for parent in rows_in((*args, *kwargs.values())):
        if parent.memory is not rows.memory:
            parent.memory.made.append(weakref.ref(rows))
    in_the_graph(rows)


def _known(tensor: Tensor) -> Tensor:
    return tensor.known if isinstance(tensor, Rows) and tensor.known is not None else tensor


def has_passed_autograd(rows: Rows) -> bool:
    """Whether a function of autograd has made this tensor, so that its gradient belongs there."""
    with functions_of_subclasses_off():
        return rows.grad_fn is not rows.node


def from_sources(values: Any) -> Any:
    """Return arguments with whole tensors instead of rows that left the model."""
    return with_tensors(values, _from_source)


def _from_source(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Rows):
        return tensor
    if tensor.source is None:
        raise MissingRows("it needs the padding")
    if torch.is_grad_enabled() and has_passed_autograd(tensor):
        with functions_of_subclasses_off():
            whole, tensor.node = _Whole.apply(tensor, tensor.source), tensor.grad_fn
        tensor.source, tensor.memory = lambda: whole, Memory()
        tensor.memory.outdated = True
    return tensor.source()


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Rows) -> Any:
    """Call a function that writes to a padded tensor outside of the model, which counts as whole from then on."""
    if target.memory.copies:
        raise RuntimeError(WRITTEN)
    if getattr(func, "__name__", "") in _OF_THE_GRAPH:  # such as one that sets requires_grad: it writes to no memory
        target.memory = Memory()
    for made in [*(reference() for reference in target.memory.made), target]:
        if made is not None:  # earlier results of it do not change
            whole = _from_source(made)
            made.source = lambda whole=whole: whole
    target.memory.made.clear()
    result = func(*from_sources(args), **from_sources(kwargs))
    target.memory.outdated = True
    return target if result is _from_source(target) else result


def check_history(func: Any, args: Sequence[Any], rows: Sequence[Rows]) -> None:
    """Raise a ``RuntimeError`` if a function asks for a gradient at a padded tensor that has no place in the graph."""
    asked = [args[1]] if func is torch.autograd.grad and len(args) > 1 else [args[0]] if func in _ASKS else []
    ids = {id(one) for one in rows_in(asked)}
    if any(id(one) in ids and one.known is None and one.needs_grad and not one.memory.outdated for one in rows):
        raise RuntimeError(_ASKED)


def rows_in(values: Any) -> Iterator[Rows]:
    """Yield the rows among arguments."""
    for value in values:
        if isinstance(value, Rows):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from rows_in(value)


def as_now(compute: Callable[[], Result], kind: str) -> Callable[[], Result]:
    """Return a function that computes with the present gradient mode and mixed precision of a kind of device."""
    gradients, in_precision = torch.is_grad_enabled(), in_this_precision(kind, compute)

    def computed() -> Result:
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            return in_precision()

    return computed


class _Place(Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor, rows: list[Rows], gradient: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)
        return rows[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None if grads[0] is None else ctx.gradient(grads[0]), None, None


class _Whole(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Callable[[], Tensor]) -> Tensor:
        return source().detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
