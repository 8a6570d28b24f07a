"""What a pass may change, kept, so that a trial can run the user's own model and leave it as it was."""

from __future__ import annotations

import array
import functools
import itertools
import random
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, MutableSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.calibration.held import (
    CACHED,
    SEQUENCES,
    dict_items,
    read_cached,
    read_cell,
    read_class,
    read_names,
    read_sequence,
    read_set,
    read_slots,
    stored_globals,
    write_array,
    write_cached,
    write_cell,
    write_class,
    write_dict,
    write_names,
    write_sequence,
    write_set,
    write_slots,
)
from torchboost.core.covering import uncovered
from torchboost.core.torch_private import (
    global_step_post_hooks,
    global_step_pre_hooks,
    gradient_hooks,
    is_of_interceptor,
    local_shard,
    module_hooks,
    overrides_dispatch,
    version,
)
from torchboost.graph.copies import accelerators, generator_states, set_generator_states

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
    swapped: bool = False

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
        if self._elsewhere():
            self.tensor.data = self.memory
            self.swapped = True
        if self.numbers is None:
            changed = version(self.tensor) != self.version
            self.version = version(self.tensor)
            return "" if changed else moved
        if not _equal(self.memory, self.numbers):
            self.memory.copy_(self.numbers)
            moved = moved if moved == "" else "numbers"
        return moved

    def put_back(self) -> None:
        """Write the numbers back without a comparison. What got other memory in the first pass gets its own back."""
        if self.swapped and self._elsewhere():
            self.tensor.data = self.memory
        if self.numbers is not None:
            self.memory.copy_(self.numbers)

    def _elsewhere(self) -> bool:
        """Whether the tensor has other memory than it had, or is another view of it."""
        now, before = self.tensor, self.memory
        return (now.data_ptr(), now.shape, now.stride()) != (before.data_ptr(), before.shape, before.stride())


def _restored(tensor: _Tensor) -> str | None:
    try:
        return tensor.restore()
    except Exception:  # of a kind that torch cannot compare or write
        return ""


@dataclass(slots=True, eq=False)
class _Held:
    """Something that Python code may change: how to read it, and how to write what was read."""

    owner: Any
    entries: Any
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]

    def restore(self) -> str | None:
        """Write the entries back if they differ. Return what was different; empty if it could not be undone."""
        try:
            if _same(self.read(self.owner), self.entries):
                return None
            self.write(self.owner, self.entries)
            return "attributes"
        except Exception:  # objects of the user may raise anything
            return ""


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
    containers, variables of closures and of the classes of modules, default arguments, and generators of random
    numbers; what methods name in their Python module: containers, tensors, modules, and objects, functions and classes
    of the same package; of the inputs, what is not a tensor. What other functions and objects keep, iterators in
    objects, files and other processes cannot be restored. Objects that raise when they are looked at are left alone.

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
        self._waiting: list[deque[Any]] = [deque() for _ in range(_HOPS + 1)]
        for tensor in tensors:
            self._own.add(id(tensor))
            self._add_tensor(tensor)
        self._waiting[0] += (model, others)
        while any(self._waiting):  # what is near comes first, because it is followed further
            hops = next(hops for hops, waiting in enumerate(self._waiting) if waiting)
            with suppress(Exception):  # objects of the user may raise anything when they are looked at
                self._look(self._waiting[hops].popleft(), hops)
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
        moved = [_restored(one) for one in self._found.tensors.values()]
        python = [held.restore() for held in self._found.held]
        if self._moving is None:
            self._moving = [
                t for t, m in zip(self._found.tensors.values(), moved, strict=True) if m is not None or t.swapped
            ]
            self._python_moves = any(text is not None for text in python)
        said = [text for text in [*moved, *python] if text is not None]
        return "" if "" in said else next(iter(said), None)

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

    @contextmanager
    def changed(self, change: Callable[[Tensor], None]) -> Iterator[None]:
        """Run the block with the numbers of the model changed.

        What is neither trained nor written by passes gets other memory, because its own may be read-only.

        Args:
            change: Changes a tensor in place.
        """
        rows = [one for key, one in self._found.tensors.items() if key in self._own and one.tensor.is_floating_point()]
        copied = [(one, one.numbers) for one in rows if one.numbers is not None]
        written = {id(one) for one in self._moving or ()}
        try:
            for one, numbers in copied:
                if one.requires_grad or id(one) in written or numbers.device != one.memory.device:
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

    def _follow(self, value: Any, hops: int) -> None:
        if type(value) not in _PLAIN and value is not None and id(value) not in self._found.seen:
            self._waiting[hops].append(value)

    def _look(self, value: Any, hops: int) -> None:
        found = self._found
        if value is None or isinstance(value, _PLAIN) or id(value) in found.seen:
            return
        if type(value) in weakref.ProxyTypes or len(found.seen) > _MOST_OBJECTS:
            return
        found.seen[id(value)] = value
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif type(value) in _CODE:
            if not is_of_interceptor(value):
                self._follow_code(value, hops)
        elif isinstance(value, weakref.ref):
            self._follow(value(), hops)
        elif (state := _generator_state(value)) is not None:
            found.generators.append(_Held(value, state[0](value), *state))
        elif isinstance(value, nn.Module):
            self._follow_attributes(value, 0)
            self._follow_classes(type(value))
        elif not type(value).__module__.startswith("torch.distributed"):  # FSDP2 ends a pass where it began
            found.iterator |= hops == 0 and isinstance(value, Iterator)  # objects may hold the loop itself
            self._follow_entries(value, hops)
            if hops < _HOPS:
                self._follow_attributes(value, hops + 1)

    def _follow_classes(self, kind: type) -> None:
        """Follow what the methods of a module use besides their arguments, and the variables of its own classes."""
        for each in kind.__mro__:
            if id(each) in self._found.seen:
                continue
            self._found.seen[id(each)] = each
            for entry in list(vars(each).values()):
                entry = entry.__func__ if isinstance(entry, (staticmethod, classmethod)) else entry
                if isinstance(entry, _FUNCTIONS):
                    self._follow(entry, 0)
            if _home(each) not in _NOT_OF_USERS:
                self._hold(each, read_class, write_class)
                for entry in read_class(each).values():
                    self._follow(entry, 0)

    def _follow_attributes(self, value: Any, hops: int) -> None:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self._follow_entries(attributes, hops)
        kinds = [kind for kind in type(value).__mro__ if "__slots__" in vars(kind)]
        slots = [each for kind in kinds for each in vars(kind).values() if type(each) is types.MemberDescriptorType]
        if slots:
            self._hold(value, functools.partial(read_slots, slots=slots), functools.partial(write_slots, slots=slots))
            for entry in read_slots(value, slots).values():
                self._follow(entry, hops)

    def _follow_entries(self, value: Any, hops: int) -> None:
        entries: Iterable[Any]
        if isinstance(value, SEQUENCES):
            self._hold(value, read_sequence, write_sequence)
            entries = () if isinstance(value, (bytearray, array.array)) else read_sequence(value)
        elif isinstance(value, dict):
            self._hold(value, dict_items, write_dict)
            entries = dict.values(value)
        elif isinstance(value, (set, MutableSet)):
            self._hold(value, read_set, write_set)
            entries = ()
        elif isinstance(value, tuple):
            entries = tuple.__iter__(value)
        elif isinstance(value, frozenset):
            entries = frozenset.__iter__(value)
        elif _is_array(value):
            self._hold_array(value)
            entries = value.ravel().tolist() if value.dtype.hasobject else ()
        else:
            return
        for entry in list(itertools.islice(entries, _LONGEST)):
            self._follow(entry, hops)

    def _follow_code(self, value: Any, hops: int) -> None:
        if isinstance(value, types.MethodType):
            self._follow(value.__func__, hops)
            self._follow(value.__self__, hops)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._follow(part, hops)
        elif isinstance(value, CACHED):
            self._hold(value, read_cached, write_cached)
            self._follow(value.__wrapped__, hops)
        else:
            self._follow_entries(vars(value), hops)
            for defaults in (value.__defaults__, value.__kwdefaults__):
                self._follow(defaults, hops)
            for cell in value.__closure__ or ():
                self._hold(cell, read_cell, write_cell)
                self._follow(read_cell(cell), hops)
            self._follow_globals(value.__code__, value.__globals__, hops)

    def _follow_globals(self, code: types.CodeType, held: dict[str, Any], hops: int) -> None:
        """Follow what code names in its Python module, and the variables that it declares global."""
        stored = stored_globals(code)
        if stored:
            read = functools.partial(read_names, names=stored)
            self._hold(held, read, functools.partial(write_names, names=stored))
        for name in code.co_names:
            self._follow_global(held.get(name), str(held.get("__name__", "")).split(".")[0], hops)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._follow_globals(inner, held, hops)

    def _follow_global(self, value: Any, home: str, hops: int) -> None:
        """Follow containers, autograd functions and generators. Of the package of the user also functions and objects.

        Objects are followed one step only, because other threads may use what lies behind them.
        """
        if type(value) in _CONTAINERS or _generator_state(value) is not None:
            self._follow(value, hops)
        elif isinstance(value, type):
            if issubclass(value, torch.autograd.Function) or (home not in _NOT_OF_USERS and _home(value) == home):
                self._follow_classes(value)
        elif home in _NOT_OF_USERS or value is None or isinstance(value, _PLAIN):
            return
        elif isinstance(value, (Tensor, nn.Module)):
            self._follow(value, hops)
        elif isinstance(value, _FUNCTIONS):
            if _home(value) == home:
                self._follow(value, hops)
        elif _home(type(value)) == home:
            self._follow(value, max(hops, _HOPS - 1))

    def _hold(self, owner: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], None]) -> None:
        self._found.held.append(_Held(owner, read(owner), read, write))

    def _hold_array(self, held: Any) -> None:
        if held.flags.writeable and self._found.copied_bytes + held.nbytes <= _MOST_BYTES:
            self._found.copied_bytes += held.nbytes
            self._hold(held, lambda each: each.copy(), write_array)

    def _add_tensor(self, tensor: Tensor) -> None:
        if hasattr(tensor, "device_mesh"):
            shard = local_shard(tensor)
            self._own |= {id(shard)} if id(tensor) in self._own else set()
            tensor = shard
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
_FUNCTIONS = (types.FunctionType, CACHED)
_CODE = (*_FUNCTIONS, types.MethodType, functools.partial)
_CONTAINERS = (*SEQUENCES, dict, OrderedDict, defaultdict, Counter, set, tuple, frozenset)
_NOT_OF_USERS = frozenset({"torch", "torchboost", "builtins"})
"""Packages whose classes and functions keep nothing from one pass to the next that a pass could change."""


def _home(thing: Any) -> str:
    """Return the package of a class or function."""
    return str(getattr(thing, "__module__", None)).split(".")[0]


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
    if overrides_dispatch(tensor) or tensor.is_inference() or tensor.is_nested:
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
        if left.dtype.hasobject:
            return left.shape == right.shape and all(a is b for a, b in zip(left.flat, right.flat, strict=True))
        return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            a is b and _same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, set):
        return left == right
    return isinstance(left, _PLAIN) and left == right


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Run the block with the model as its code has it: without hooks of users and without what this package attached.

    Hooks that users have set on all optimizers do not see the steps of copies either.
    Hooks of torch that compute a part of the model, as those of the old ``weight_norm``, stay.
    """
    taken: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    try:
        for hooks in _hooks(model):
            kept = {key: hook for key, hook in hooks.items() if belongs_to_torch(hook)}
            if len(kept) < len(hooks):
                taken.append((hooks, dict(hooks)))
                write_dict(hooks, kept)
        with uncovered(model):
            yield
    finally:
        for hooks, entries in taken:
            write_dict(hooks, entries)


def _hooks(model: nn.Module) -> Iterator[dict[Any, Any]]:
    for module in model.modules():
        yield from module_hooks(module)
    for parameter in model.parameters():
        yield from gradient_hooks(parameter)
    yield from (global_step_pre_hooks, global_step_post_hooks)


def belongs_to_torch(hook: Any) -> bool:
    """Whether a hook computes a part of the model, as those of the old ``weight_norm`` do."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.split(".")[0] == "torch"


class Streams:
    """The random generators of torch, Python and NumPy as they are now. Other threads must not draw meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        self._devices = accelerators(model.parameters())
        self._torch = generator_states(self._devices)
        self._python, numpy = random.getstate(), sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        """Set them to what they were."""
        set_generator_states(self._torch, self._devices)
        random.setstate(self._python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._numpy is not None:
            numpy.random.set_state(self._numpy)

    def drawn(self) -> bool:
        """Whether those of torch were used since."""
        return not all(map(torch.equal, generator_states(self._devices), self._torch))


@contextmanager
def streams_kept(model: nn.Module) -> Iterator[None]:
    """Restore the random generators of torch, Python and NumPy at the end. Other threads must not draw meanwhile."""
    streams = Streams(model)
    try:
        yield
    finally:
        streams.restore()
