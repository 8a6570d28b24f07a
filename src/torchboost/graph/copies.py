"""Copies of a model that can be run without touching the model or the random number generators."""

from __future__ import annotations

import copy
import random
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.core.covering import is_our_hook
from torchboost.core.torch_private import (
    DispatchMode,
    beneath_compiled,
    buffer_slots,
    child_slots,
    module_hooks,
    parameter_slots,
    writes_to,
)

__all__ = [
    "ReachesOriginal",
    "accelerators",
    "copies_of",
    "full_precision",
    "generator_states",
    "generators_kept",
    "large_plain_tensors",
    "parameter_bytes",
    "set_generator_states",
    "twin",
    "undisturbed",
    "untouched",
]

_LARGE = 2**20
"""Above this many bytes, an array that a module keeps as a plain attribute is lent to a copy that is only run here."""


def twin(model: nn.Module, *, numbers: bool = True, lend: bool = False) -> nn.Module:
    """Return a deep copy in eval mode that computes what the forward of ``model`` itself computes.

    The copy is not compiled, and has neither the covers and hooks of this package nor Accelerate's mixed precision
    around ``forward``. Activations that the model keeps as attributes are detached from their graph.

    Args:
        model: A bare module; not changed.
        numbers: If False, the parameters of the copy are on the device ``meta`` and need no memory.
        lend: If True, the copy reads large arrays and tensors that are plain attributes (a memory bank, a data set)
            where the model has them. It cannot write to arrays; see :func:`large_plain_tensors` for tensors.

    Raises:
        TypeError: The model holds something that cannot be copied, or a part that is its own copy.
    """
    try:
        made = copy.deepcopy(model, _copied_otherwise(model, numbers, lend))
    except Exception as error:  # attributes of the user's modules may raise anything
        raise TypeError(
            f"this {type(model).__name__} cannot be copied ({type(error).__name__}: {error}); keep what cannot be "
            "copied outside the model."
        ) from error
    _check_parted(model, made)
    for hooks in _hooks(made):
        for key in [key for key, hook in hooks.items() if is_our_hook(hook)]:
            del hooks[key]
    for original, module in zip(model.modules(), made.modules(), strict=True):
        _uncast(module)
        _uncompile(module, original)
    return made.eval()


def _copied_otherwise(model: nn.Module, numbers: bool, lend: bool) -> dict[int, Any]:
    """Return what stands in the copy for objects of the original, by their ids."""
    kept = list(_kept(model))
    computed = [one for one in kept if isinstance(one, Tensor) and not one.is_leaf]
    memo: dict[int, Any] = {id(one): one.detach().clone() for one in computed}
    memo |= {id(hook): hook for hooks in _hooks(model) for hook in hooks.values() if is_our_hook(hook)}
    if lend:
        memo |= {id(tensor): tensor.detach() for tensor in large_plain_tensors(model, kept)}
        memo |= {id(one): _read_only(one) for one in kept if _is_large_array(one)}
    if not numbers:
        plain = [p for p in model.parameters() if type(p) is nn.Parameter]
        memo |= {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in plain}
    return memo


def large_plain_tensors(model: nn.Module, kept: Iterable[Any] | None = None) -> list[Tensor]:
    """Return the tensors that a copy with ``lend`` shares with the model.

    Args:
        model: The original.
        kept: What its modules keep as plain attributes, if known.
    """
    found = [one for one in (_kept(model) if kept is None else kept) if type(one) is Tensor and one.is_leaf]
    large = [one for one in found if not one.requires_grad and one.layout is torch.strided and one.nbytes > _LARGE]
    own = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())} if large else set()
    return [one for one in large if _memory(one) not in own]


def parameter_bytes(model: nn.Module) -> int:
    """Return the size of all parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _hooks(model: nn.Module) -> Iterator[dict[int, Any]]:
    for module in model.modules():
        yield from module_hooks(module)


def _kept(model: nn.Module) -> Iterator[Any]:
    """Yield what modules keep as plain attributes, also inside containers and objects."""
    waiting: list[Any] = [vars(module) for module in model.modules()]
    seen: dict[int, Any] = {}  # an id is only unique while its object lives
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (nn.Module, type, types.ModuleType)):
            continue
        if isinstance(value, (str, bytes, int, float, complex)):
            continue
        seen[id(value)] = value
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif type(value).__reduce_ex__ is object.__reduce_ex__ and not isinstance(value, Tensor):
            waiting += vars(value).values() if hasattr(value, "__dict__") else ()
        yield value


def _is_large_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    return value.nbytes > _LARGE and not value.dtype.hasobject


def _read_only(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view


def _check_parted(model: nn.Module, made: nn.Module) -> None:
    """Refuse a copy that holds modules, parameters or buffers of the original: it must be possible to change it."""
    parts = {*model.modules(), *model.parameters(), *model.buffers()}
    shared = next((part for part in (*made.modules(), *made.parameters(), *made.buffers()) if part in parts), None)
    if shared is not None:
        raise TypeError(
            f"this {type(model).__name__} cannot be copied: a {type(shared).__name__} in it is its own copy "
            "(__deepcopy__ returns it); keep it outside the model, or let __deepcopy__ return a copy."
        )


def _uncompile(module: nn.Module, original: nn.Module) -> None:
    """Undo ``original.forward = torch.compile(original.forward)`` in a copy, which would call the original's."""
    beneath = beneath_compiled(vars(module).get("forward"))
    if isinstance(beneath, types.MethodType) and beneath.__self__ is original:
        del module.forward
        if beneath.__func__ is not type(module).forward:
            module.forward = types.MethodType(beneath.__func__, module)


def _uncast(module: nn.Module) -> None:
    """Remove Accelerate's mixed precision from the forward of a module in a copy.

    Accelerate sets a ``forward`` on the instance that enters autocast and casts the outputs, and stores the original
    one. Its own function for the removal follows ``__wrapped__`` through all inner wrappers too.
    """
    operations = sys.modules.get("accelerate.utils.operations")
    forward = vars(module).get("forward")
    function = getattr(forward, "__func__", forward)
    casting = getattr(function, "__wrapped__", None)
    if operations is None or not isinstance(casting, operations.ConvertOutputsToFp32):
        return
    del module.forward
    beneath = vars(module).pop("_original_forward", None)
    if isinstance(beneath, types.MethodType) and beneath.__self__ is module:
        if beneath.__func__ is not type(module).forward:
            module.forward = beneath
    elif beneath is not None:
        module.forward = beneath


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


@contextmanager
def undisturbed(model: nn.Module, *, numbers: bool = True) -> Iterator[nn.Module]:
    """Yield a copy of a model in eval mode to run without gradients; see :func:`twin`.

    Default generators that it draws from are restored (:func:`generators_kept`). The copy
    reads large plain attributes in place. An operation on a tensor of the original is refused
    (:func:`untouched`).
    """
    copied = twin(model, numbers=numbers, lend=True)
    devices = accelerators(model.parameters())
    with torch.no_grad(), generators_kept(devices), untouched(model, lent=large_plain_tensors(model)):
        yield copied


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Disable autocast, and TF32 and bfloat16 inside float32 products, so that two passes can be compared."""
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    backends: list[Any] = [cudnn.conv, torch.backends.cuda.matmul, mkldnn.conv, mkldnn.matmul]
    before = [backend.fp32_precision for backend in backends]
    kind = next((p.device.type for p in model.parameters()), "cpu")
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(kind, enabled=False) if kind != "meta" else nullcontext():
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


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


def accelerators(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Return the devices of tensors that draw random numbers of their own: all but the CPU and ``meta``."""
    found = {tensor.device for tensor in tensors}
    return sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)


def generator_states(devices: Sequence[torch.device]) -> list[Tensor]:
    """Return the states of torch's default generators: of the CPU, and of each of these devices."""
    return [torch.get_rng_state(), *(torch.get_device_module(device).get_rng_state(device) for device in devices)]


def set_generator_states(states: Sequence[Tensor], devices: Sequence[torch.device]) -> None:
    """Set what :func:`generator_states` has returned for these devices."""
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def generators_kept(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restore the default generators of torch and of ``random`` at the end, if this thread has drawn from them.

    ``torch.random.fork_rng`` always restores them, so numbers that other threads draw meanwhile are drawn again. Here
    this can only happen after the first draw of this thread.

    Args:
        devices: Accelerators, in addition to the CPU.
    """
    python = random.getstate()
    with _Draws(devices) as draws:
        try:
            yield
        finally:
            draws.put_back()
            if random.getstate() != python:
                random.setstate(python)


class _Draws(DispatchMode):
    """Record the state of the default generators before the first draw of this thread."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self._devices = devices
        self._before: list[Tensor] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._before is None and torch.Tag.nondeterministic_seeded in func.tags:
            self._before = generator_states(self._devices)
        return func(*args, **(kwargs or {}))

    def put_back(self) -> None:
        if self._before is not None:
            set_generator_states(self._before, self._devices)
