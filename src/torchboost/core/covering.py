"""Cover the ``forward`` of one module instance by a function of ours, and give it back."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchboost.core.algorithm import Attachment

__all__ = ["Around", "cover_forward", "own_forward", "uncover_copy"]

Forward = Callable[..., Any]
"""Takes the module first, like a function in a class."""
Around = Callable[[Forward, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""``around(forward, module, args, kwargs)`` calls ``forward(module, *args, **kwargs)``, or something in its place."""
_COVER = "torchboost_cover"
"""Entry of a covering function's own dictionary that holds its :class:`_Cover`."""
_OWN = "_forward_under_torchboost"
"""Attribute of a covered module: the forwards that somebody else set on it, by their ``id`` at that time. A copy of the
module has copies: a method of another object is one of the copy of that object, as if nothing were covered."""
_REPLICATE = "_replicate_for_data_parallel"
"""The method of modules that ``DataParallel`` calls for a replica: a copy of the attributes, ``forward`` among them."""


@dataclass(slots=True, eq=False)
class _Cover:
    """How a covering function stands between its neighbours.

    Args:
        under: One entry, what it calls. A list, because closures share it and compiled graphs guard on it.
        beneath: The covering function under it, or None.
        own: The user's own ``forward`` of the instance under the lowest cover; None where that of the class is.
    """

    under: list[Forward]
    beneath: Any
    own: Any


def cover_forward(model: nn.Module, around: Around, *, innermost: bool = False) -> Attachment:
    """Let ``around`` stand between the callers of ``model.forward`` and the forward of this one instance.

    Hooks, wrappers, ``torch.compile`` before or after, copies and pickles go on as before. A deep copy of the model
    is covered too, by the same function, and calls it with itself as the module; :func:`uncover_copy` frees it. The
    replicas of ``DataParallel`` compute with their own weights.

    Args:
        model: Gets an instance attribute ``forward``, and one that makes its replicas.
        around: Called in place of ``forward``.
        innermost: Slide beneath the covers that are there already, next to the forward of the class.

    Returns:
        Its ``remove()`` gives the covered ``forward`` back, also after the model was covered again: whoever holds on
        to the cover, calls through it from then on.
    """
    # Whoever covers this forward in turn keeps calling it after remove(): from then on it only passes through.
    live = [True]
    under: list[Forward] = []

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not live:
            return under[0](self, *args, **kwargs)
        return around(under[0], self, args, kwargs)

    # Tools read the signature of forward, for instance to choose the columns of a data set.
    covering: Any = functools.update_wrapper(forward, type(model).forward)
    top = _top(model)
    if innermost and top is not None:
        above = _lowest(top)
        under.append(above.under[0])
        vars(covering)[_COVER] = _Cover(under, None, above.own)
        above.under[0], above.beneath, above.own = covering, covering, None
    else:
        own = vars(model).get("forward") if top is None else None
        if own is not None:
            vars(model).setdefault(_OWN, {})[id(own)] = own
        under.append(top or (type(model).forward if own is None else functools.partial(_call_own, own)))
        vars(covering)[_COVER] = _Cover(under, top, own)
        model.forward = types.MethodType(covering, model)
        setattr(model, _REPLICATE, types.MethodType(_replicate_for_data_parallel, model))

    def uncover() -> None:
        live.clear()
        _take_out(model, covering)
        if _top(model) is None:
            vars(model).pop(_REPLICATE, None)

    return Attachment(undo=uncover)


def own_forward(model: nn.Module) -> Any:
    """Return the ``forward`` that somebody else set on this instance, under all covers; None without one."""
    function = _top(model)
    if function is None:
        return vars(model).get("forward")
    return _own(model, _lowest(function).own)


def uncover_copy(model: nn.Module) -> None:
    """Give every module in a deep copy of a covered model the forward that was covered.

    The attachments belong to the model that was copied; their ``remove()`` does not reach the copy.
    """
    for module in model.modules():
        function = _top(module)
        if function is not None:
            _put_back(module, _lowest(function).own)
            vars(module).pop(_REPLICATE, None)


def _replicate_for_data_parallel(model: nn.Module) -> nn.Module:
    """Make a replica, as ``DataParallel`` does for each device, whose forward is its own and not that of the model.

    A pickle refers to the method of a module by its name, which is why this function has the same.
    """
    replica = type(model)._replicate_for_data_parallel(model)
    function = _top(model)
    if function is not None:
        replica.forward = types.MethodType(function, replica)
    if _OWN in vars(model):
        vars(replica)[_OWN] = {key: _rebound(own, model, replica) for key, own in vars(model)[_OWN].items()}
    return replica


def _rebound(own: Any, model: nn.Module, replica: nn.Module) -> Any:
    return types.MethodType(own.__func__, replica) if getattr(own, "__self__", None) is model else own


def _cover(function: Any) -> _Cover:
    return vars(function)[_COVER]


def _top(model: nn.Module) -> Any:
    """The function that covers the model last, if it is one of ours."""
    function = getattr(vars(model).get("forward"), "__func__", None)
    return function if isinstance(function, types.FunctionType) and _COVER in vars(function) else None


def _lowest(function: Any) -> _Cover:
    while (beneath := _cover(function).beneath) is not None:
        function = beneath
    return _cover(function)


def _own(model: nn.Module, own: Any) -> Any:
    """What the user's ``forward`` of a covered instance is in a copy of it; itself in that instance."""
    return vars(model).get(_OWN, {}).get(id(own), own)


def _call_own(own: Any, model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return _own(model, own)(*args, **kwargs)


def _put_back(model: nn.Module, own: Any) -> None:
    """Give the instance its own ``forward``, or that of its class, in place of the covers."""
    del model.forward
    if own is not None:
        model.forward = _own(model, own)
        kept = vars(model).get(_OWN, {})
        kept.pop(id(own), None)
        if not kept:
            vars(model).pop(_OWN, None)


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
