"""A snapshot of the state that a pass may change, so that a trial can run the user's own model and restore it."""

from __future__ import annotations

import array
import functools
import itertools
import types
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionMeta

from torchboost.calibration.watch import uninterrupted
from torchboost.core.contents import CONTAINERS, GENERATORS, same_numbers, way_of, write_dict
from torchboost.core.forward import uncovered
from torchboost.core.torch_private import (
    global_step_post_hooks,
    global_step_pre_hooks,
    gradient_hooks,
    guards_of_hooks,
    is_of_interceptor,
    local_shard,
    module_hooks,
    overrides_dispatch,
    version,
)

_HOPS = 3
"""Objects that are not modules are followed so far: an attribute of an attribute of a module's attribute."""
_MOST_OBJECTS = 200_000
_MOST_BYTES = 64 * 2**20
"""Of tensors and arrays that are neither parameters nor buffers. Larger ones are not copied, but watched."""
_LONGEST = 10_000
"""Entries of a container up to which they are followed."""


class Damage(IntEnum):
    """The result of a restoration."""

    NONE = 0
    UNDONE = 1
    LASTING = 2


class _Tensor:
    """A tensor as it was: its memory and, if it was copied, its numbers."""

    def __init__(self, tensor: Tensor, *, copied: bool) -> None:
        self.tensor, self.memory, self.version = tensor, tensor.data, version(tensor)
        self.numbers = tensor.detach().clone(memory_format=torch.preserve_format) if copied else None
        self.requires_grad, self.grad = tensor.requires_grad, tensor.grad if tensor.is_leaf else None
        self.grad_version = 0 if self.grad is None else version(self.grad)
        self.swapped = False

    def restore(self) -> Damage:
        """Restore the tensor."""
        damage, is_leaf = Damage.NONE, self.tensor.is_leaf
        try:
            if is_leaf and self.tensor.grad is not self.grad:
                self.tensor.grad, damage = self.grad, Damage.UNDONE
            elif self.grad is not None and version(self.grad) != self.grad_version:
                damage = Damage.LASTING
            if is_leaf and self.tensor.requires_grad != self.requires_grad:
                self.tensor.requires_grad_(self.requires_grad)
                damage = max(damage, Damage.UNDONE)
            if self._is_elsewhere():
                self.tensor.data, self.swapped = self.memory, True
            if self.numbers is None and version(self.tensor) != self.version:
                damage = Damage.LASTING
            elif self.numbers is not None and not same_numbers(self.memory, self.numbers):
                self.memory.copy_(self.numbers)
                damage = max(damage, Damage.UNDONE)
            return damage
        except Exception:  # of a kind that torch cannot compare or write
            return Damage.LASTING

    def put_back(self) -> None:
        """Write the numbers back without a comparison. Restore memory that the first pass has replaced."""
        if self.swapped and self._is_elsewhere():
            self.tensor.data = self.memory
        if self.numbers is not None:
            self.memory.copy_(self.numbers)
            if self._is_elsewhere() and self.tensor.shape == self.numbers.shape:  # with the strides of a lever
                self.tensor.data.copy_(self.numbers)

    def _is_elsewhere(self) -> bool:
        """Whether the tensor has other memory than it had, or is another view of it."""
        now, before = self.tensor, self.memory
        return (now.data_ptr(), now.shape, now.stride()) != (before.data_ptr(), before.shape, before.stride())


_ABSENT = object()


class _Entries:
    """Something that Python code may change: how to read and how to write it.

    Attributes:
        moved: Names whose values the first pass has changed, if the entries are named. Later passes may run with levers
            that have set other names, which are not touched.
    """

    def __init__(self, owner: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], object]) -> None:
        self._owner, self._read, self._write, self.entries = owner, read, write, read(owner)
        self.moved: list[Any] | None = None
        self.swapped = False

    def restore(self) -> Damage:
        """Write the entries back if they differ."""
        try:
            now = self._read(self._owner)
            if _same(now, self.entries):
                return Damage.NONE
            if type(self.entries) is dict:
                names, before = now | self.entries, self.entries
                self.moved = [name for name in names if not _same(now.get(name, _ABSENT), before.get(name, _ABSENT))]
            self._write(self._owner, self.entries)
            return Damage.UNDONE
        except Exception:  # objects of the user may raise anything
            return Damage.LASTING

    def put_back(self) -> None:
        """Undo the changes of the first pass, without a comparison."""
        entries = self.entries
        with suppress(Exception):
            if self.moved is not None:
                entries = self._read(self._owner)
                for name in self.moved:
                    entries.pop(name, None)
                entries |= {name: self.entries[name] for name in self.moved if name in self.entries}
            self._write(self._owner, entries)


class Snapshot:
    """All that a forward and backward pass of a model may change, as far as it can be reached from the model.

    These are parameters, buffers, gradients, flags, plain attributes of modules and of objects that they hold, nested
    containers, variables of closures, default arguments, caches of functions, and generators of random numbers.
    Further, containers, tensors, modules, and functions of the same package that methods name in their Python module,
    and the parts of the inputs that are not tensors. Rebound variables of classes and of Python modules, slots,
    iterators in objects, files and other processes are not restored. Objects that raise when they are looked at are
    skipped.

    Args:
        others: Objects that are followed like attributes of the model, such as the inputs of a call.
        tensors: Parameters from outside the model that the optimizer holds.

    Attributes:
        has_history: Whether a graph of an earlier pass hangs at something that was reached, so that it must not be
            freed.
        has_iterator: Whether there is something that can be read only once, such as a generator.

    Cost: memory for one copy of parameters and buffers.
    """

    def __init__(self, model: nn.Module, others: Any = (), tensors: Iterable[Tensor] = ()) -> None:
        self.has_history = self.has_iterator = False
        self._tensors: dict[int, _Tensor] = {}
        self._entries: list[_Entries] = []
        self._generators: list[_Entries] = []
        self._moving: list[_Tensor | _Entries] | None = None
        self._seen: dict[int, Any] = {}
        self._copied_bytes = 0
        self._own = {id(t) for t in [*model.parameters(), *model.buffers()]}
        for tensor in tensors:
            self._own.add(id(tensor))
            self._add_tensor(tensor)
        self._waiting: list[deque[Any]] = [deque() for _ in range(_HOPS + 1)]
        self._waiting[0] += (model, others)
        while any(self._waiting):  # near objects come first, because they are followed further
            hops = next(hops for hops, waiting in enumerate(self._waiting) if waiting)
            with suppress(Exception):  # objects of the user may raise anything when they are looked at
                self._look(self._waiting[hops].popleft(), hops)

    def restore(self) -> Damage:
        """Restore everything. Return the worst result."""
        for one in self._generators:
            one.put_back()
        rows: list[_Tensor | _Entries] = [*self._tensors.values(), *self._entries]
        damages = [one.restore() for one in rows]
        if self._moving is None:
            self._moving = [one for one, damage in zip(rows, damages, strict=True) if damage or one.swapped]
        return max(damages, default=Damage.NONE)

    def after_a_pass(self, *, complete: bool = True) -> None:
        """Quickly restore the changes that were seen in the first complete pass. Attached levers remain attached.

        That pass must be one without levers, because everything is restored after it. A later pass that is interrupted
        may change more. :meth:`restore` undoes this once no lever is attached.
        """
        if self._moving is None:
            self.restore()
            self._moving = self._moving if complete else None
            return
        for one in (*self._generators, *self._moving):
            one.put_back()

    @contextmanager
    def changed(self, change: Callable[[Tensor], None]) -> Iterator[None]:
        """Run the block with the numbers of the model changed, by a function that changes a tensor in place.

        Tensors that are neither trained nor written by passes get other memory, because their own may be read-only.
        """
        self.restore()  # the numbers that are exchanged with the snapshot must be restored
        rows = [one for key, one in self._tensors.items() if key in self._own and one.tensor.is_floating_point()]
        copied = [(one, one.numbers) for one in rows if one.numbers is not None]
        written = set(map(id, self._moving or ()))
        try:
            for one, numbers in copied:
                if one.requires_grad or id(one) in written:
                    change(one.memory)
                else:
                    change(numbers)
                    one.tensor.data = numbers
            yield
        finally:
            for one, numbers in copied:
                if one.tensor.data_ptr() == numbers.data_ptr():
                    one.tensor.data = one.memory
                    numbers.copy_(one.memory)
                else:
                    one.memory.copy_(numbers)

    def _follow(self, values: Iterable[Any], hops: int) -> None:
        for value in list(itertools.islice(values, _LONGEST)):
            if type(value) not in _PLAIN and value is not None and id(value) not in self._seen:
                self._waiting[hops].append(value)

    def _look(self, value: Any, hops: int) -> None:
        if isinstance(value, FunctionMeta):
            self._follow_classes(value)
        if value is None or isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        if type(value) in weakref.ProxyTypes or len(self._seen) > _MOST_OBJECTS:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif type(value) in _CODE:
            if not is_of_interceptor(value):
                self._follow_code(value, hops)
        elif (state := way_of(value, GENERATORS)) is not None:
            self._generators.append(_Entries(value, *state))
        elif isinstance(value, nn.Module):
            self._follow_attributes(value, 0)
            self._follow_classes(type(value))
        elif not type(value).__module__.startswith("torch.distributed"):  # FSDP2 ends a pass where it began
            self.has_iterator |= hops == 0 and isinstance(value, Iterator)  # objects may hold the loop itself
            self._follow_entries(value, hops)
            if hops < _HOPS:
                self._follow_attributes(value, hops + 1)

    def _follow_classes(self, kind: type) -> None:
        """Follow the objects that methods of a module use besides arguments, and the variables of its own classes."""
        for each in kind.__mro__:
            if id(each) in self._seen:
                continue
            self._seen[id(each)] = each
            entries = [e.__func__ if isinstance(e, (staticmethod, classmethod)) else e for e in vars(each).values()]
            containers = () if _home(each) in _NOT_OF_USERS else tuple(CONTAINERS)
            self._follow([entry for entry in entries if isinstance(entry, (*_FUNCTIONS, *containers))], 0)

    def _follow_attributes(self, value: Any, hops: int) -> None:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self._hold(attributes, dict, write_dict, hops)

    def _follow_entries(self, value: Any, hops: int) -> None:
        way = way_of(value, CONTAINERS)
        if way is not None:
            self._hold(value, *way, hops)
        elif isinstance(value, tuple):
            self._follow(tuple.__iter__(value), hops)
        elif isinstance(value, frozenset):
            self._follow(frozenset.__iter__(value), hops)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and self._copied_bytes + value.nbytes <= _MOST_BYTES:
                self._copied_bytes += value.nbytes
                self._hold(value, lambda each: each.copy(), lambda each, new: each.__setitem__(..., new))
            self._follow(value.ravel().tolist() if value.dtype.hasobject else (), hops)

    def _follow_code(self, value: Any, hops: int) -> None:
        if isinstance(value, types.MethodType):
            self._follow([value.__func__, value.__self__], hops)
        elif isinstance(value, functools.partial):
            self._follow([value.func, value.args, value.keywords], hops)
        elif isinstance(value, _CACHED):
            # The results of a pass with levers may be of another format or precision.
            self._hold(value, lambda cached: cached.cache_info().misses, lambda cached, _: cached.cache_clear())
            self._follow([value.__wrapped__], hops)
        else:
            self._follow([*vars(value).values(), value.__defaults__, value.__kwdefaults__], hops)
            for cell in value.__closure__ or ():
                self._hold(cell, _read_cell, _write_cell, hops)
            self._follow_globals(value.__code__, value.__globals__, hops)

    def _follow_globals(self, code: types.CodeType, variables: dict[str, Any], hops: int) -> None:
        """Follow the objects that code names in its Python module: containers, autograd functions and generators.

        Functions, modules and tensors are followed in the user's package only. Objects that other ones hold may be used
        by other threads.
        """
        home = str(variables.get("__name__", "")).split(".")[0]
        for value in (variables.get(name) for name in code.co_names):
            own = isinstance(value, (Tensor, nn.Module)) or (isinstance(value, _FUNCTIONS) and _home(value) == home)
            known = (
                isinstance(value, FunctionMeta) or type(value) in _CONTAINERS or isinstance(value, tuple(GENERATORS))
            )
            if known or (own and home not in _NOT_OF_USERS):
                self._follow([value], hops)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._follow_globals(inner, variables, hops)

    def _hold(
        self, owner: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], object], hops: int | None = None
    ) -> None:
        """Keep the entries of an owner, and follow them if ``hops`` says from how far away."""
        kept = _Entries(owner, read, write)
        self._entries.append(kept)
        if hops is not None and isinstance(kept.entries, (dict, list)):
            self._follow(kept.entries.values() if isinstance(kept.entries, dict) else kept.entries, hops)

    def _add_tensor(self, tensor: Tensor) -> None:
        if hasattr(tensor, "device_mesh"):
            shard = local_shard(tensor)
            self._own |= {id(shard)} if id(tensor) in self._own else set()
            tensor = shard
        if id(tensor) in self._tensors or not _has_memory(tensor):
            return
        self.has_history |= tensor.grad_fn is not None
        size = tensor.numel() * tensor.element_size()
        own = id(tensor) in self._own
        copied = (own or self._copied_bytes + size <= _MOST_BYTES) and not _overlaps(tensor)
        self._copied_bytes += 0 if own or not copied else size
        self._tensors[id(tensor)] = _Tensor(tensor, copied=copied)


def _read_cell(cell: types.CellType) -> list[Any]:
    with suppress(ValueError):
        return [cell.cell_contents]
    return []


def _write_cell(cell: types.CellType, entries: list[Any]) -> None:
    if entries:
        cell.cell_contents = entries[0]
    else:
        del cell.cell_contents


_CACHED = type(functools.lru_cache(len))
"""Functions that ``functools.cache`` or ``functools.lru_cache`` has made."""
_PLAIN = (str, bytes, int, float, complex, bool, type, types.ModuleType, torch.dtype, torch.device, torch.Size)
_FUNCTIONS = (types.FunctionType, _CACHED)
_CODE = (*_FUNCTIONS, types.MethodType, functools.partial)
_CONTAINERS = (*CONTAINERS, defaultdict, Counter, tuple, frozenset)
_NOT_OF_USERS = frozenset({"torch", "torchboost", "builtins"})
"""Packages whose classes and functions keep nothing that a pass could change."""


def _home(thing: Any) -> str:
    """Return the package of a class or function."""
    return str(getattr(thing, "__module__", None)).split(".")[0]


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own kind that a pass could write to."""
    odd = overrides_dispatch(tensor) or tensor.is_inference() or tensor.is_nested
    return not odd and tensor.layout is torch.strided and not tensor.is_meta


def _overlaps(tensor: Tensor) -> bool:
    """Whether several entries share memory, as in an expanded tensor, which cannot be written to."""
    return any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True))


def _same(left: Any, right: Any) -> bool:
    """Compare containers entry by entry: by identity, plain values by their value."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):  # of objects: by identity, too
        return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            a is b and _same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return isinstance(left, (*_PLAIN, set, bytearray, array.array)) and left == right


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Run the block with the model as its code has it: without hooks of users, also on all optimizers, and covers."""
    taken: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    registries = [hooks for module in model.modules() for hooks in module_hooks(module)]
    registries += [hooks for parameter in model.parameters() for hooks in gradient_hooks(parameter)]
    try:
        for hooks in (*registries, global_step_pre_hooks, global_step_post_hooks):
            # A hook of torch computes a part of the model, as the old weight_norm does.
            kept = {k: h for k, h in hooks.items() if _home(h) == "torch"}
            if len(kept) < len(hooks):
                taken.append((hooks, dict(hooks)))
                write_dict(hooks, kept)
        with uncovered(model), guards_of_hooks() if taken else nullcontext():
            yield
    finally:
        with uninterrupted():
            for hooks, entries in taken:
                write_dict(hooks, entries)
