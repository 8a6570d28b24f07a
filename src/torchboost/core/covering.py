"""Wrap the ``forward`` of one module instance, and unwrap it again. Copies and pickles of the module are plain.

A file written by ``torch.save(model)`` then loads without this package, also with ``weights_only=True``, which allows
no class that it does not know.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchboost.core.algorithm import Attachment, Removable
from torchboost.core.torch_private import MAKES_REPLICAS, make_replica, module_hooks, state_without_hooks

__all__ = ["Around", "cover_forward", "is_cover", "is_our_hook", "own_forward", "plain_hook", "uncovered"]

Forward = Callable[..., Any]
"""Takes the module as its first argument, like a function in a class."""
Around = Callable[[Forward, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""``around(forward, module, args, kwargs)`` calls ``forward(module, *args, **kwargs)``, or something else instead."""
_COVER = "torchboost_cover"
"""Entry of a covering function's ``__dict__`` that holds its :class:`_Cover`."""
_STATE = "__getstate__"
"""Attribute of a module that is covered or hooked. ``copy`` and ``pickle`` ask the instance before its class."""


@dataclass(slots=True, eq=False)
class _Cover:
    """The neighbours of a covering function.

    Args:
        under: One entry, the function that it calls. A list, because closures share it and compiled graphs guard on it.
        beneath: The covering function under it, or None.
        own: The user's ``forward`` of the instance, under the lowest cover; None if the class's ``forward`` is there.
    """

    under: list[Forward]
    beneath: Any
    own: Any


def cover_forward(model: nn.Module, around: Around, *, innermost: bool = False) -> Attachment:
    """Call ``around`` whenever ``model.forward`` is called, for this one instance.

    Hooks, wrappers and ``torch.compile`` before or after still work. Copies and pickles of the model are not covered.
    The replicas of ``DataParallel`` are, and compute with their own weights.

    Args:
        model: Gets an instance attribute ``forward``, one that makes its replicas, and one that makes its copies.
        around: Called instead of ``forward``.
        innermost: Insert the cover under all existing covers, next to the class's forward.

    Returns:
        An attachment whose ``remove()`` restores ``forward``, even if the model was covered again in the meantime.
        Afterwards the removed cover only calls what is under it.
    """
    # Code that wrapped this forward still calls it after remove(). Then it only calls what is under it.
    live = [True]
    under: list[Forward] = []

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not live:
            return under[0](self, *args, **kwargs)
        return around(under[0], self, args, kwargs)

    # Tools read the signature of forward, for example to choose the columns of a data set.
    covering: Any = functools.update_wrapper(forward, type(model).forward)
    top = _top(model)
    if innermost and top is not None:
        above = _lowest(top)
        under.append(above.under[0])
        vars(covering)[_COVER] = _Cover(under, None, above.own)
        above.under[0], above.beneath, above.own = covering, covering, None
    else:
        own = vars(model).get("forward") if top is None else None
        under.append(top or _unbound(model, own))
        vars(covering)[_COVER] = _Cover(under, top, own)
        model.forward = types.MethodType(covering, model)
        setattr(model, MAKES_REPLICAS, types.MethodType(_replicate_for_data_parallel, model))
        _mark(model)

    def uncover() -> None:
        live.clear()
        _take_out(model, covering)
        if _top(model) is None:
            vars(model).pop(MAKES_REPLICAS, None)
        _unmark(model)

    return Attachment(undo=uncover)


def plain_hook(module: nn.Module, handle: Removable) -> Attachment:
    """Leave a hook of this package out of the copies and pickles of its module.

    Args:
        module: Gets an instance attribute that makes its copies.
        handle: Of the hook.

    Returns:
        An attachment whose ``remove()`` removes the hook.
    """
    _mark(module)
    return Attachment(handle, undo=functools.partial(_unmark, module))


def is_our_hook(hook: Any) -> bool:
    """Whether a hook was set by this package."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.split(".")[0] == __name__.split(".")[0]


def is_cover(function: Any) -> bool:
    """Whether what :func:`cover_forward` found under a cover is another cover."""
    return isinstance(function, types.FunctionType) and _COVER in vars(function)


def own_forward(model: nn.Module) -> Any:
    """Return the ``forward`` that the user set on this instance, under all covers; None without one."""
    function = _top(model)
    return vars(model).get("forward") if function is None else _lowest(function).own


def _mark(model: nn.Module) -> None:
    vars(model).setdefault(_STATE, functools.partial(_state, model))


def _unmark(model: nn.Module) -> None:
    hooked = any(is_our_hook(hook) for hooks in module_hooks(model) for hook in hooks.values())
    if not hooked and _top(model) is None and getattr(vars(model).get(_STATE), "func", None) is _state:
        del vars(model)[_STATE]


def _state(model: nn.Module) -> Any:
    """Return the attributes of the model without covers and hooks of this package."""
    state = state_without_hooks(model, is_our_hook)
    if not isinstance(state, dict):  # the user's own
        return state
    for name in (_STATE, MAKES_REPLICAS):
        state.pop(name, None)
    for name, value in list(state.items()):  # Accelerate keeps a covered forward under another name
        function = _covering(value)
        if function is None:
            continue
        own = _lowest(function).own
        if own is not None:
            state[name] = own
        elif name == "forward":
            del state[name]
        else:
            state[name] = types.MethodType(type(model).forward, model)
    return state


@contextmanager
def uncovered(model: nn.Module) -> Iterator[None]:
    """Run the block with every module of a model uncovered. Covers that the block adds must be gone at its end."""
    covered = [(module, vars(module)["forward"], _top(module)) for module in model.modules() if _top(module)]
    try:
        for module, _, top in covered:
            own = _lowest(top).own
            if own is None:
                del module.forward
            else:
                module.forward = own
        yield
    finally:
        for module, forward, _ in covered:
            module.forward = forward


def _replicate_for_data_parallel(model: nn.Module) -> nn.Module:
    """Make a replica for ``DataParallel`` whose forward is bound to the replica, not to the model."""
    replica = make_replica(model)
    function = _top(model)
    if function is not None:
        replica.forward = types.MethodType(function, replica)
    return replica


def _cover(function: Any) -> _Cover:
    return vars(function)[_COVER]


def _top(model: nn.Module) -> Any:
    """Return the outermost covering function of the model; None without one."""
    return _covering(vars(model).get("forward"))


def _covering(method: Any) -> Any:
    function = getattr(method, "__func__", None)
    return function if isinstance(function, types.FunctionType) and _COVER in vars(function) else None


def _lowest(function: Any) -> _Cover:
    while (beneath := _cover(function).beneath) is not None:
        function = beneath
    return _cover(function)


def _unbound(model: nn.Module, own: Any) -> Forward:
    """Return the class's ``forward``, or the instance's own one, as a function of the module."""
    if own is None:
        return type(model).forward
    if getattr(own, "__self__", None) is model:  # a replica computes with its own weights
        return own.__func__
    return functools.partial(_call_own, own)


def _call_own(own: Any, model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs)


def _put_back(model: nn.Module, own: Any) -> None:
    """Replace the covers by the instance's own ``forward``, or by that of its class."""
    del model.forward
    if own is not None:
        model.forward = own


def _take_out(model: nn.Module, covering: Any) -> None:
    gone = _cover(covering)
    top = _top(model)
    if top is covering:
        if gone.beneath is not None:
            model.forward = types.MethodType(gone.beneath, model)
        else:
            _put_back(model, gone.own)
        return
    while top is not None:
        above = _cover(top)
        if above.beneath is covering:
            above.under[0], above.beneath, above.own = gone.under[0], gone.beneath, gone.own
            return
        top = above.beneath
