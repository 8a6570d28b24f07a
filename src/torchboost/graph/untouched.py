"""Run copies of a model without touching the model: an operation of a copy on its tensors is refused before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from torchboost.core.torch_private import DispatchMode, buffer_slots, child_slots, parameter_slots, writes_to

__all__ = ["ReachesOriginal", "copies_of", "untouched"]

_ORIGINALS: ContextVar[tuple[nn.Module, ...]] = ContextVar("originals", default=())
"""In :func:`copies_of`: the models whose copies are run."""


class ReachesOriginal(TypeError):
    """The forward of a copy computes with a tensor of the model that was copied, or nothing is known about it."""


@contextmanager
def copies_of(*models: nn.Module) -> Iterator[None]:
    """Let every :func:`untouched` in this block protect these models too, as for copies of a copy of them."""
    token = _ORIGINALS.set((*_ORIGINALS.get(), *models))
    try:
        yield
    finally:
        _ORIGINALS.reset(token)


@contextmanager
def untouched(*models: nn.Module, lent: Iterable[Tensor] = ()) -> Iterator[None]:
    """Refuse operations of this thread on parameters and buffers of models, for a block that runs copies of them.

    A deep copy does not copy what a function holds: a wrapped ``forward``, a lambda that uses ``self``. Nor does it
    copy the target of a weak reference. Such a copy would compute with the weights of the original, write its
    statistics and add to its gradients. Here such an operation does not run. If the block fails, the attributes of the
    modules (``training`` among them) are as they were before it.

    Args:
        *models: The originals. Those of the surrounding :func:`copies_of` are added.
        lent: Other tensors, which may be read but not written.

    Raises:
        ReachesOriginal: An operation was refused, even if the forward caught the error.
    """
    modules = list(dict.fromkeys(module for model in (*_ORIGINALS.get(), *models) for module in model.modules()))
    before = [(module, [dict(slots) for slots in _slots(module)]) for module in modules]
    watch = _Watch(modules, lent)
    try:
        with watch:
            yield
        if watch.reached:
            raise ReachesOriginal(watch.reached)
    except BaseException as error:
        for module, values in before:
            _put_back(module, values)
        if watch.reached and not isinstance(error, ReachesOriginal) and isinstance(error, Exception):
            raise ReachesOriginal(watch.reached) from error
        raise


class _Watch(DispatchMode):
    """Refuse operations that read some memory, and operations that write to other memory."""

    def __init__(self, modules: Iterable[nn.Module], lent: Iterable[Tensor]) -> None:
        super().__init__()
        self.reached = ""
        self._owners = {
            _memory(tensor): f"{name} of a {type(module).__name__}"
            for module in modules
            for slots in (parameter_slots(module), buffer_slots(module))
            for name, tensor in slots.items()
            if tensor is not None
        }
        self._lent = {_memory(tensor) for tensor in lent}
        self._owners.pop(0, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((*args, *(kwargs or {}).values())):
            owner = self._owners.get(_memory(tensor))
            if owner is not None:
                self._refuse(f"computes with the {owner} of the original")
        if self._lent:
            for tensor in _tensors(writes_to(func, args, kwargs or {})):
                if _memory(tensor) in self._lent - {0}:
                    self._refuse("writes to a large tensor that the original keeps as an attribute")
        return func(*args, **(kwargs or {}))

    def _refuse(self, what: str) -> None:
        self.reached = (
            f"a copy of this model {what}; a function, such as a lambda or a replaced forward, or a weak reference "
            "leads there. Give the module a method instead, or use the model itself."
        )
        raise ReachesOriginal(self.reached)


def _slots(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return vars(module), parameter_slots(module), buffer_slots(module), child_slots(module)


def _put_back(module: nn.Module, values: list[dict[str, Any]]) -> None:
    for slots, before in zip(_slots(module), values, strict=True):
        if slots.keys() != before.keys() or any(slots[name] is not value for name, value in before.items()):
            slots.clear()
            slots.update(before)


def _tensors(value: Any) -> Iterator[Tensor]:
    for entry in value:
        if isinstance(entry, Tensor):
            yield entry
        elif isinstance(entry, (list, tuple)):
            yield from _tensors(entry)


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 without one."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, fake, wrapped by functorch
        return 0
