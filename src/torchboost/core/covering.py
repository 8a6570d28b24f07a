"""Wrap the ``forward`` of one module instance, and unwrap it again."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchboost.core.algorithm import Attachment
from torchboost.core.torch_private import MAKES_REPLICAS, make_replica

__all__ = ["Around", "cover_forward", "own_forward", "uncover_copy", "uncovered"]

Forward = Callable[..., Any]
"""Takes the module as its first argument, like a function in a class."""
Around = Callable[[Forward, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""``around(forward, module, args, kwargs)`` calls ``forward(module, *args, **kwargs)``, or something else instead."""
_COVER = "torchboost_cover"
"""Entry of a covering function's ``__dict__`` that holds its :class:`_Cover`."""
_OWN = "_forward_under_torchboost"
"""Attribute of a covered module: the forwards that the user set on it, by their ``id`` at that time. A deep copy of the
module copies them too, so that a method of another object becomes a method of the copy of that object."""


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

    Hooks, wrappers, ``torch.compile`` before or after, copies and pickles still work. A deep copy of the model is
    covered by the same function, which then receives the copy as the module; :func:`uncover_copy` uncovers the copy.
    The replicas of ``DataParallel`` compute with their own weights.

    Args:
        model: Gets an instance attribute ``forward``, and another one that makes its replicas.
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
        if own is not None:
            vars(model).setdefault(_OWN, {})[id(own)] = own
        under.append(top or (type(model).forward if own is None else functools.partial(_call_own, own)))
        vars(covering)[_COVER] = _Cover(under, top, own)
        model.forward = types.MethodType(covering, model)
        setattr(model, MAKES_REPLICAS, types.MethodType(_replicate_for_data_parallel, model))

    def uncover() -> None:
        live.clear()
        _take_out(model, covering)
        if _top(model) is None:
            vars(model).pop(MAKES_REPLICAS, None)

    return Attachment(undo=uncover)


def own_forward(model: nn.Module) -> Any:
    """Return the ``forward`` that the user set on this instance, under all covers; None without one."""
    function = _top(model)
    if function is None:
        return vars(model).get("forward")
    return _own(model, _lowest(function).own)


def uncover_copy(model: nn.Module) -> None:
    """Uncover every module in a deep copy of a covered model.

    The attachments belong to the original model. Their ``remove()`` does not change the copy.
    """
    for module in model.modules():
        function = _top(module)
        if function is not None:
            _put_back(module, _lowest(function).own)
            vars(module).pop(MAKES_REPLICAS, None)


@contextmanager
def uncovered(model: nn.Module) -> Iterator[None]:
    """Run the block with every module of a model uncovered. Covers that the block adds must be gone at its end."""
    covered = [(module, vars(module)["forward"], _top(module)) for module in model.modules() if _top(module)]
    try:
        for module, _, top in covered:
            own = _own(module, _lowest(top).own)
            if own is None:
                del module.forward
            else:
                module.forward = own
        yield
    finally:
        for module, forward, _ in covered:
            module.forward = forward


def _replicate_for_data_parallel(model: nn.Module) -> nn.Module:
    """Make a replica for ``DataParallel`` whose forward is bound to the replica, not to the model.

    A pickle refers to a module's method by name, so this function must have the same name.
    """
    replica = make_replica(model)
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
    """Return the outermost covering function of the model; None without one."""
    function = getattr(vars(model).get("forward"), "__func__", None)
    return function if isinstance(function, types.FunctionType) and _COVER in vars(function) else None


def _lowest(function: Any) -> _Cover:
    while (beneath := _cover(function).beneath) is not None:
        function = beneath
    return _cover(function)


def _own(model: nn.Module, own: Any) -> Any:
    """Return the user's ``forward`` of a covered instance, or its copy if ``model`` is a copy of that instance."""
    return vars(model).get(_OWN, {}).get(id(own), own)


def _call_own(own: Any, model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return _own(model, own)(*args, **kwargs)


def _put_back(model: nn.Module, own: Any) -> None:
    """Replace the covers by the instance's own ``forward``, or by that of its class."""
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
