"""What a pass may change, kept, so that a trial can run the user's own model and leave it as it was."""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.core.covering import uncovered
from torchboost.core.torch_private import gradient_hooks, module_hooks, overrides_dispatch, version

__all__ = ["Snapshot", "Streams", "belongs_to_torch", "plain", "streams_kept"]

_HOPS = 3
"""Objects that are not modules are followed so far: an attribute of an attribute of a module's attribute."""
_MOST_OBJECTS = 200_000
_MOST_BYTES = 64 * 2**20
"""Of tensors and arrays that are neither parameters nor buffers. Larger ones are not copied, but watched."""
_LONGEST = 10_000
"""Entries of a container up to which they are followed."""


@dataclass(slots=True, eq=False)
class _Tensor:
    """A tensor as it was: its memory and, if it was copied, its numbers."""

    tensor: Tensor
    memory: Tensor
    version: int
    numbers: Tensor | None
    requires_grad: bool
    grad: Tensor | None
    grad_version: int

    @classmethod
    def of(cls, tensor: Tensor, *, copied: bool) -> _Tensor:
        memory, grad = tensor.detach(), tensor.grad if tensor.is_leaf else None
        numbers = memory.clone(memory_format=torch.preserve_format) if copied else None
        seen = 0 if grad is None else version(grad)
        return cls(tensor, tensor.data, version(tensor), numbers, tensor.requires_grad, grad, seen)

    def restore(self) -> str | None:
        """Make the tensor what it was. Return what was different; empty if it could not be undone."""
        moved: str | None = None
        if self.tensor.is_leaf and self.tensor.grad is not self.grad:
            self.tensor.grad, moved = self.grad, "a gradient"
        elif self.grad is not None and version(self.grad) != self.grad_version:
            self.grad_version, moved = version(self.grad), ""
        if self.tensor.is_leaf and self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)
            moved = moved or "requires_grad"
        if self.tensor.data_ptr() != self.memory.data_ptr() or self.tensor.stride() != self.memory.stride():
            self.tensor.data = self.memory
        if self.numbers is None:
            changed = version(self.tensor) != self.version
            self.version = version(self.tensor)
            return "" if changed else moved
        if not _equal(self.memory, self.numbers):
            self.memory.copy_(self.numbers)
            moved = moved if moved == "" else "numbers"
        return moved

    def put_back(self) -> None:
        """Write the numbers back without a comparison."""
        if self.numbers is not None:
            self.memory.copy_(self.numbers)


@dataclass(slots=True, eq=False)
class _Held:
    """Something that Python code may change: how to read it, and how to write what was read."""

    owner: Any
    entries: Any
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]

    def restore(self) -> bool:
        """Write the entries back if they differ. Return whether they did."""
        if _same(self.read(self.owner), self.entries):
            return False
        self.write(self.owner, self.entries)
        return True


@dataclass(slots=True)
class _Found:
    tensors: dict[int, _Tensor] = field(default_factory=dict)
    held: list[_Held] = field(default_factory=list)
    generators: list[_Held] = field(default_factory=list)
    seen: dict[int, Any] = field(default_factory=dict)
    copied_bytes: int = 0
    history: bool = False
    iterator: bool = False


class Snapshot:
    """All that a forward and backward pass of a model may change, as far as it can be reached from the model.

    These are parameters, buffers, gradients, flags, plain attributes of modules and of objects that they hold, nested
    containers, variables of closures, containers that methods find in their Python module, and generators of random
    numbers; of the inputs, what is not a tensor. What other functions and other objects keep, files and other processes
    cannot be restored.

    Args:
        model: The model.
        others: Objects that are followed like attributes of the model, such as the inputs of a call.
        tensors: Parameters from outside the model, such as those of the optimizer.
        elsewhere: Keep the copies of parameters on the CPU, because their device has too little memory.

    Cost: memory for one copy of parameters and buffers.
    """

    def __init__(
        self, model: nn.Module, others: Any = (), tensors: Iterable[Tensor] = (), *, elsewhere: bool = False
    ) -> None:
        self._found, self._elsewhere = _Found(), elsewhere
        self._own = {id(t) for t in [*model.parameters(), *model.buffers()]}
        for tensor in tensors:
            self._own.add(id(tensor))
            self._add_tensor(tensor)
        self._follow(model, 0)
        self._follow(others, 0)
        self._moving: list[_Tensor] | None = None
        self._python_moves = True

    @property
    def has_history(self) -> bool:
        """Whether a graph of an earlier pass hangs at something that was found, so that it must not be freed."""
        return self._found.history

    @property
    def has_iterator(self) -> bool:
        """Whether there is something that can be read only once, such as a generator."""
        return self._found.iterator

    def restore(self) -> str | None:
        """Make everything what it was.

        Returns:
            What had changed in words, for a message; empty if something could not be undone; None if nothing had.
        """
        self._restore_generators()
        moved = [one.restore() for one in self._found.tensors.values()]
        python = [held.restore() for held in self._found.held]
        if self._moving is None:
            self._moving = [t for t, m in zip(self._found.tensors.values(), moved, strict=True) if m is not None]
            self._python_moves = any(python)
        said = [text for text in moved if text is not None]
        if "" in said:
            return ""
        return next(iter(said), "attributes" if any(python) else None)

    def after_a_pass(self, around: Snapshot | None) -> None:
        """Restore what passes were seen to change, quickly. Levers that are attached stay attached.

        The first pass must be one without levers, because everything is restored after it.

        Args:
            around: A snapshot from before the pass, if :attr:`needs_one_around`.
        """
        if self._moving is None:  # the first pass shows what passes change
            self.restore()
            return
        self._restore_generators()
        for one in self._moving:
            one.put_back()
        if around is not None:
            for held in around._found.held:
                held.restore()

    def _restore_generators(self) -> None:
        for one in self._found.generators:
            one.write(one.owner, one.entries)

    @property
    def needs_one_around(self) -> bool:
        """Whether passes change more than tensors."""
        return self._python_moves

    def parameters(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield each tensor of floating point of the model, its memory, and the copy of its numbers."""
        for key, one in self._found.tensors.items():
            if key in self._own and one.tensor.is_floating_point():
                yield one.tensor, one.memory, one.numbers

    def _follow(self, value: Any, hops: int) -> None:
        found = self._found
        if value is None or isinstance(value, _PLAIN) or id(value) in found.seen:
            return
        if type(value) in weakref.ProxyTypes or len(found.seen) > _MOST_OBJECTS:
            return
        found.seen[id(value)] = value
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif type(value) in _CODE:
            self._follow_code(value, hops)
        elif isinstance(value, weakref.ref):
            self._follow(value(), hops)
        elif (state := _generator_state(value)) is not None:
            found.generators.append(_Held(value, state[0](value), *state))
        elif isinstance(value, nn.Module):
            self._follow_attributes(value, 0)
            self._follow_classes(type(value))
        else:
            found.iterator |= hops == 0 and isinstance(value, Iterator)
            self._follow_entries(value, hops)
            if hops < _HOPS:
                self._follow_attributes(value, hops + 1)

    def _follow_classes(self, kind: type) -> None:
        """Follow what the methods of a module use besides their arguments."""
        for each in kind.__mro__:
            if id(each) not in self._found.seen:
                self._found.seen[id(each)] = each
                for entry in vars(each).values():
                    entry = entry.__func__ if isinstance(entry, (staticmethod, classmethod)) else entry
                    if isinstance(entry, types.FunctionType):
                        self._follow(entry, 0)

    def _follow_attributes(self, value: Any, hops: int) -> None:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self._follow_entries(attributes, hops)
        slots = {name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) if name[:2] != "__"}
        if slots and not isinstance(value, _CONTAINERS):
            self._hold(value, functools.partial(_read_slots, slots=sorted(slots)), _write_slots)
            for entry in _read_slots(value, sorted(slots)).values():
                self._follow(entry, hops)

    def _follow_entries(self, value: Any, hops: int) -> None:
        entries: Iterable[Any]
        if isinstance(value, (list, deque)):
            self._hold(value, list, _write_sequence)
            entries = value
        elif isinstance(value, dict):
            self._hold(value, _dict_items, _write_dict)
            entries = list(dict.values(value))
        elif isinstance(value, (set, MutableSet)):
            self._hold(value, set, _write_set)
            entries = ()
        elif isinstance(value, (tuple, frozenset)):
            entries = value
        elif _is_array(value):
            self._hold_array(value)
            entries = ()
        else:
            return
        for entry in list(entries)[:_LONGEST]:
            self._follow(entry, hops)

    def _follow_code(self, value: Any, hops: int) -> None:
        if isinstance(value, types.MethodType):
            self._follow(value.__func__, hops)
            self._follow(value.__self__, hops)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._follow(part, hops)
        else:
            self._follow_entries(vars(value), hops)
            for cell in value.__closure__ or ():
                self._hold(cell, _read_cell, _write_cell)
                self._follow(_read_cell(cell), hops)
            self._follow_globals(value.__code__, value.__globals__, hops)

    def _follow_globals(self, code: types.CodeType, held: dict[str, Any], hops: int) -> None:
        """Follow the containers and autograd functions that code names, and the variables that it declares global."""
        stored = _stored_globals(code)
        if stored:
            self._hold(held, functools.partial(_read_names, names=stored), _write_names)
        for name in code.co_names:
            value = held.get(name)
            if type(value) in _CONTAINERS:
                self._follow(value, hops)
            elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
                self._follow_classes(value)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._follow_globals(inner, held, hops)

    def _hold(self, owner: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], None]) -> None:
        self._found.held.append(_Held(owner, read(owner), read, write))

    def _hold_array(self, array: Any) -> None:
        if array.flags.writeable and self._found.copied_bytes + array.nbytes <= _MOST_BYTES:
            self._found.copied_bytes += array.nbytes
            self._hold(array, lambda a: a.copy(), _write_array)

    def _add_tensor(self, tensor: Tensor) -> None:
        if id(tensor) in self._found.tensors or not _is_plain(tensor):
            return
        self._found.history |= tensor.grad_fn is not None
        size = tensor.numel() * tensor.element_size()
        own = id(tensor) in self._own
        copied = (own or self._found.copied_bytes + size <= _MOST_BYTES) and not _overlaps(tensor)
        self._found.copied_bytes += 0 if own or not copied else size
        kept = _Tensor.of(tensor, copied=copied)
        if self._elsewhere and kept.numbers is not None:
            kept.numbers = kept.numbers.cpu()
        self._found.tensors[id(tensor)] = kept


_PLAIN = (str, bytes, int, float, complex, bool, type, types.ModuleType, torch.dtype, torch.device, torch.Size)
_CODE = (types.FunctionType, types.MethodType, functools.partial)
_CONTAINERS = (list, deque, dict, set, tuple, frozenset)


def _generator_state(value: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]] | None:
    """Return how the state of a generator of random numbers is read and written; None for other objects."""
    if isinstance(value, torch.Generator):
        return (lambda g: g.get_state()), (lambda g, state: g.set_state(state))
    if isinstance(value, random.Random):
        return (lambda g: g.getstate()), (lambda g, state: g.setstate(state))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return (lambda g: g.get_state()), (lambda g, state: g.set_state(state))
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return (lambda g: g.bit_generator.state), (lambda g, state: setattr(g.bit_generator, "state", state))
    return None


def _is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own kind that a pass could write to."""
    if overrides_dispatch(tensor) or tensor.is_inference():
        return False
    return tensor.layout is torch.strided and not tensor.is_meta


def _overlaps(tensor: Tensor) -> bool:
    """Whether several entries share memory, as in an expanded tensor, which cannot be written to."""
    return any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True))


def _equal(left: Tensor, right: Tensor) -> bool:
    right = right.to(left.device)
    if torch.equal(left, right):
        return True
    return bool(((left == right) | ((left != left) & (right != right))).all())


def _same(left: Any, right: Any) -> bool:
    """Compare containers entry by entry: by identity, plain values by their value."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if _is_array(left):
        return left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            a is b and _same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, set):
        return left == right
    return isinstance(left, _PLAIN) and left == right


def _dict_items(owner: dict[Any, Any]) -> dict[Any, Any]:
    return dict(dict.items(owner))


def _write_dict(owner: dict[Any, Any], entries: dict[Any, Any]) -> None:
    kind: Any = OrderedDict if isinstance(owner, OrderedDict) else dict  # subclasses may refuse to be updated
    kind.clear(owner)
    for key, value in entries.items():
        kind.__setitem__(owner, key, value)


def _write_sequence(owner: Any, entries: list[Any]) -> None:
    owner.clear()
    owner.extend(entries)


def _write_set(owner: Any, entries: set[Any]) -> None:
    owner.clear()
    for entry in entries:
        owner.add(entry)


def _write_array(owner: Any, entries: Any) -> None:
    owner[...] = entries


_EMPTY = object()


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _write_cell(cell: types.CellType, value: Any) -> None:
    if value is not _EMPTY:
        cell.cell_contents = value


def _read_slots(owner: Any, slots: list[str]) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in slots if hasattr(owner, name)}


def _write_slots(owner: Any, entries: dict[str, Any]) -> None:
    for name, value in entries.items():
        object.__setattr__(owner, name, value)


_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


def _stored_globals(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that a function declares ``global`` and writes."""
    if _STORE_GLOBAL not in code.co_code[::2]:
        return ()
    return tuple({i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"})


def _read_names(owner: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: owner[name] for name in names if name in owner}


def _write_names(owner: MutableMapping[str, Any], entries: dict[str, Any]) -> None:
    owner.update(entries)


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Run the block with the model as its code has it: without hooks of users and without what this package attached.

    Hooks of torch that compute a part of the model, as those of the old ``weight_norm``, stay.
    """
    taken: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    try:
        for hooks in _hooks(model):
            kept = {key: hook for key, hook in hooks.items() if belongs_to_torch(hook)}
            if len(kept) < len(hooks):
                taken.append((hooks, dict(hooks)))
                _write_dict(hooks, kept)
        with uncovered(model):
            yield
    finally:
        for hooks, entries in taken:
            _write_dict(hooks, entries)


def _hooks(model: nn.Module) -> Iterator[dict[Any, Any]]:
    for module in model.modules():
        yield from module_hooks(module)
    for parameter in model.parameters():
        yield from gradient_hooks(parameter)


def belongs_to_torch(hook: Any) -> bool:
    """Whether a hook computes a part of the model, as those of the old ``weight_norm`` do."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.split(".")[0] == "torch"


class Streams:
    """The random generators of torch, Python and NumPy as they are now. Other threads must not draw meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        self._devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
        self._cpu = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(device) for device in self._devices]
        self._python, numpy = random.getstate(), sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        """Set them to what they were."""
        torch.set_rng_state(self._cpu)
        for device, state in zip(self._devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
        random.setstate(self._python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._numpy is not None:
            numpy.random.set_state(self._numpy)

    def drawn(self) -> bool:
        """Whether those of torch were used since."""
        now = [torch.cuda.get_rng_state(device) for device in self._devices]
        return not (torch.equal(torch.get_rng_state(), self._cpu) and all(map(torch.equal, now, self._cuda)))


@contextmanager
def streams_kept(model: nn.Module) -> Iterator[None]:
    """Restore the random generators of torch, Python and NumPy at the end. Other threads must not draw meanwhile."""
    streams = Streams(model)
    try:
        yield
    finally:
        streams.restore()
