"""Act on the ``forward`` of one module instance: cover it, uncover it, find or replace the tensors in its result.

Copies and pickles of the module are plain. A file written by ``torch.save(model)`` then loads without this package,
also with ``weights_only=True``, which allows no class that it does not know.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.core.algorithm import Attachment, Removable
from torchboost.core.torch_private import (
    MAKES_REPLICAS,
    Interceptor,
    interceptor_of,
    make_replica,
    module_hooks,
    set_compiled_call,
    state_without_hooks,
)
from torchboost.core.wrapping import parameters_of, unwrap
from torchboost.errors import warn_no_effect

Forward = Callable[..., Any]
"""Takes the module as its first argument, like a function in a class."""
Around = Callable[[Forward, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""``around(forward, module, args, kwargs)`` calls ``forward(module, *args, **kwargs)``, or something else instead."""
_COVER = "torchboost_cover"
"""Entry of a covering function's ``__dict__`` that holds its :class:`_Covers`."""
_STATE = "__getstate__"
"""Attribute of a module that is covered or hooked. ``copy`` and ``pickle`` ask the instance before its class."""


@dataclass(slots=True, eq=False)
class _Covers:
    """The covers of one module.

    Args:
        own: The ``forward`` that the user set on the instance. None if the ``forward`` of its class is covered.
        bare: The same as a function of the module.
        entry: The function that the module's ``forward`` is bound to. A wrapper of it may carry the same mark.
        layers: The innermost one first.
        outermost: The function that runs all layers, as the entry of a list, because compiled graphs guard on it.
    """

    own: Any
    bare: Forward
    entry: Any = None
    layers: list[Around] = field(default_factory=list)
    outermost: list[Forward] = field(default_factory=list)

    def put_together(self) -> None:
        """Call after a change of ``layers``."""
        self.outermost[:] = [functools.reduce(self._link, self.layers, self.bare)]

    def _link(self, under: Forward, around: Around) -> Forward:
        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return around(under, module, args, kwargs)

        vars(forward)[_COVER] = self
        return forward


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
        Code that wrapped the covered ``forward`` and still calls it then calls the function under the cover.
    """
    covers = _covers(model)
    if covers is None:
        covers = _cover_first(model)
    layers = covers.layers
    layers.insert(0 if innermost else len(layers), around)
    covers.put_together()

    def uncover() -> None:
        del layers[next(place for place, layer in enumerate(layers) if layer is around)]
        covers.put_together()
        if not layers and getattr(vars(model).get("forward"), "__func__", None) is covers.entry:
            _set_forward(model, covers.own)
        if not layers:
            _unmark(model)

    return Attachment(undo=uncover)


def _cover_first(model: nn.Module) -> _Covers:
    own = vars(model).get("forward")
    if own is None:
        bare = type(model).forward
    elif getattr(own, "__self__", None) is model:  # a replica computes with its own weights
        bare = own.__func__
    else:
        bare = functools.partial(_call_own, own)
    covers = _Covers(own, bare)
    outermost = covers.outermost

    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return outermost[0](self, *args, **kwargs)

    # Tools read the signature of forward, for example to choose the columns of a data set. torch.jit.script reads its
    # source, and looks its names up in the globals of the function that it finds.
    names = getattr(inspect.unwrap(type(model).forward), "__globals__", globals())
    covering = types.FunctionType(forward.__code__, names, closure=forward.__closure__)
    functools.update_wrapper(covering, type(model).forward)
    covers.entry = covering
    vars(covering)[_COVER] = covers
    model.forward = types.MethodType(covering, model)
    _mark_replicas(model)
    return covers


def _call_own(own: Any, model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs)


def _replicate_for_data_parallel(model: nn.Module) -> nn.Module:
    """Make a replica for ``DataParallel`` whose call and forward are its own, not the model's."""
    replica = make_replica(model)
    if interceptor_of(model) is not None:
        set_compiled_call(replica, None)  # not the call behind it, which is bound to the model
    if _covers(model) is not None:
        replica.forward = types.MethodType(vars(model)["forward"].__func__, replica)
    return replica


def intercept(model: nn.Module, interceptor: Interceptor) -> Attachment:
    """Let an interceptor, in place of another one, answer the calls of a model, but not of its copies and replicas.

    The attachment puts back the call behind the interceptor, unless something else has replaced the interceptor.
    """

    def stop() -> None:
        if interceptor_of(model) is interceptor:
            set_compiled_call(model, interceptor.compiled)
        _unmark(model)

    set_compiled_call(model, interceptor)
    _mark_replicas(model)
    return Attachment(undo=stop)


def _set_forward(model: nn.Module, own: Any) -> None:
    """Let the user's ``forward`` of the instance count, or the ``forward`` of its class."""
    vars(model).pop("forward", None)
    if own is not None:
        model.forward = own


def _covers(model: nn.Module) -> _Covers | None:
    return _covers_of(vars(model).get("forward"))


def _covers_of(method: Any) -> _Covers | None:
    function = getattr(method, "__func__", None)
    covered = isinstance(function, types.FunctionType) and _COVER in vars(function)
    return vars(function)[_COVER] if covered else None


def own_forward(model: nn.Module) -> Any:
    """Return the ``forward`` that the user set on this instance, under all covers, or None without one."""
    covers = _covers(model)
    return vars(model).get("forward") if covers is None else covers.own


@contextmanager
def uncovered(model: nn.Module) -> Iterator[None]:
    """Run the block with every module of a model uncovered. Covers that the block adds must be gone at its end."""
    covered = [(module, vars(module)["forward"]) for module in model.modules() if _covers(module) is not None]
    try:
        for module, _ in covered:
            _set_forward(module, own_forward(module))
        yield
    finally:
        for module, forward in covered:
            module.forward = forward


def plain_hook(module: nn.Module, handle: Removable) -> Attachment:
    """Exclude a hook of this package from the copies and pickles of its module. The attachment removes the hook."""
    _mark(module)
    return Attachment(handle, undo=functools.partial(_unmark, module))


def is_our_hook(hook: Any) -> bool:
    """Whether a hook was set by this package."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.split(".")[0] == __name__.split(".")[0]


def _mark(model: nn.Module) -> None:
    vars(model).setdefault(_STATE, functools.partial(_state, model))


def _mark_replicas(model: nn.Module) -> None:
    setattr(model, MAKES_REPLICAS, types.MethodType(_replicate_for_data_parallel, model))
    _mark(model)


def _unmark(model: nn.Module) -> None:
    if _covers(model) is not None or interceptor_of(model) is not None:
        return
    vars(model).pop(MAKES_REPLICAS, None)
    hooked = any(is_our_hook(hook) for hooks in module_hooks(model) for hook in hooks.values())
    if not hooked and getattr(vars(model).get(_STATE), "func", None) is _state:
        del vars(model)[_STATE]


def _state(model: nn.Module) -> Any:
    """Return the attributes of the model without covers and hooks of this package."""
    state = state_without_hooks(model, is_our_hook)
    if not isinstance(state, dict):  # the user's own
        return state
    for name in (_STATE, MAKES_REPLICAS):
        state.pop(name, None)
    for name, value in list(state.items()):  # Accelerate keeps a covered forward under another name
        covers = _covers_of(value)
        if covers is None:
            continue
        if covers.own is None and name == "forward":
            del state[name]
        else:
            state[name] = types.MethodType(type(model).forward, model) if covers.own is None else covers.own
    return state


class ForwardWatch(Attachment):
    """Warns after the first update if the model's forward was not called before it.

    A loop may call a part of the model instead, such as a ``training_step`` that calls ``self.net(x)``. An algorithm
    that acts in the model's own forward then has no effect. The function that covers it sets ``called``.
    """

    def __init__(self, name: str, model: nn.Module, optimizer: Optimizer) -> None:
        self.called = False
        bare = unwrap(model)
        kind, parts = type(bare).__name__, [part for part, _ in bare.named_children()]
        example = f" (here one of {', '.join(parts[:4])})" if parts else ""
        self._warning: str | None = (
            f"{name} had no effect: there was an update, but {kind} itself was not called before it. Pass "
            f"the module that the training step calls{example}, or call the {kind}."
        )
        super().__init__(optimizer.register_step_pre_hook(self._judge))

    def _judge(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._warning is None or torch.compiler.is_compiling() or not (self.called or _moves(optimizer)):
            return
        warning, self._warning = self._warning, None
        if not self.called:
            warn_no_effect(warning)


def _moves(optimizer: Optimizer) -> bool:
    """Whether a gradient is nonzero. torch's checkpoint functions step with zeros to create the optimizer's state."""
    grads = (param.grad for param in parameters_of(optimizer))
    return any(bool((grad.coalesce().values() if grad.is_sparse else grad).any()) for grad in grads if grad is not None)


def with_tensors(value: Any, change: Callable[[Tensor], Tensor], strange: Callable[[Any], None] | None = None) -> Any:
    """Return ``value`` with ``change`` applied to all tensors in it, or the object itself if nothing changes.

    Nested mappings, sequences, named tuples, torch's return types and dataclasses are searched. They are copied, not
    constructed: constructors and ``__post_init__`` do not run, and attributes are kept. Other objects, and objects that
    cannot be copied, are returned unchanged. ``strange`` is called with them, and may raise a ``RuntimeError``.
    """
    if issubclass(type(value), Tensor):  # isinstance() asks a proxy for its class, which may raise
        return change(value)
    inner = functools.partial(with_tensors, change=change, strange=strange)
    try:
        if isinstance(value, tuple):
            return _tuple(value, inner)
        # The compiler of torch 2.9 cannot trace the question whether None is one.
        if value is not None and dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _record(value, inner)
        if isinstance(value, MutableMapping):
            return _filled(value, value.items(), inner)
        if isinstance(value, MutableSequence):
            return _filled(value, enumerate(value), inner)
    except (TypeError, ValueError, AttributeError):  # a class with special rules
        pass
    if strange is not None:
        strange(value)
    return value


def _tuple(value: tuple[Any, ...], inner: Callable[[Any], Any]) -> tuple[Any, ...]:
    items = [inner(item) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    kind: Any = type(value)
    if kind is tuple:
        return tuple(items)
    if hasattr(kind, "_make"):
        return kind._make(items)
    if kind.__module__ == "torch.return_types":  # tuple.__new__ refuses them
        return kind(items)
    copied = tuple.__new__(kind, items)
    vars(copied).update(vars(value))
    return copied


def _record(value: Any, inner: Callable[[Any], Any]) -> Any:
    names = [field.name for field in dataclasses.fields(value)]
    fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
    is_mapping: bool = isinstance(value, MutableMapping)
    if not torch.compiler.is_compiling() and not is_mapping:
        fields |= getattr(value, "__dict__", {})  # attributes that are not fields, such as those of __post_init__
    changed = {name: inner(entry) for name, entry in fields.items()}
    changed = {name: entry for name, entry in changed.items() if entry is not fields[name]}
    if not changed:
        return value
    if torch.compiler.is_compiling():  # the compiler can trace this, but not copy.copy of any class
        return dataclasses.replace(value, **changed)
    copied = copy.copy(value)
    for name, entry in changed.items():
        try:
            setattr(copied, name, entry)
        except dataclasses.FrozenInstanceError:
            object.__setattr__(copied, name, entry)
    return copied


def _filled(value: Any, items: Iterable[tuple[Any, Any]], inner: Callable[[Any], Any]) -> Any:
    pairs = [(key, entry, inner(entry)) for key, entry in items]
    changed = [(key, new) for key, old, new in pairs if new is not old]
    if not changed:
        return value
    copied = copy.copy(value)
    for key, entry in changed:
        copied[key] = entry
    return copied


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, in order. A container inside itself counts once."""
    tensors: list[Tensor] = []
    around: set[int] = set()
    waiting: list[tuple[bool, Any]] = [(True, value)]
    while waiting:
        enters, entry = waiting.pop()
        if issubclass(type(entry), Tensor):  # isinstance() asks a proxy for its class, which may raise
            tensors.append(entry)
        elif not enters:
            around.discard(id(entry))
        elif id(entry) not in around and (parts := _parts(entry)):
            around.add(id(entry))
            waiting.append((False, entry))
            waiting += [(True, part) for part in reversed(parts) if type(part) not in _PLAIN]
    return tensors


_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
"""Entries of a long list that are skipped quickly, because each call of a model is searched."""


def _parts(value: Any) -> list[Any]:
    try:
        if isinstance(value, Mapping):
            return list(value.values())
        if isinstance(value, (tuple, list)):
            return list(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return [getattr(value, field.name) for field in dataclasses.fields(value)]
    except Exception:  # a container of the user may raise anything when it is read
        pass
    return []
