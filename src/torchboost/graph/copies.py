"""Copies of a model that can be run without touching the model or the random number generators."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchboost.core.forward import is_our_hook, tensors_in
from torchboost.core.hardware import accelerators, device_of, streams_kept
from torchboost.core.torch_private import DispatchMode, beneath_compiled, buffer_slots, module_hooks, parameter_slots


def twin(model: nn.Module, *, numbers: bool = True) -> nn.Module:
    """Return a deep copy in eval mode that computes the same as the forward of ``model`` itself.

    The copy is not compiled, and has neither the covers and hooks of this package nor Accelerate's mixed precision
    around ``forward``. Activations that the model keeps as attributes are detached from their graph.

    Args:
        model: A bare module. It is not changed.
        numbers: If False, the parameters of the copy are on the device ``meta`` and need no memory.

    Raises:
        TypeError: The model holds something that cannot be copied, or a part that is its own copy.
    """
    hooks = [hook for module in model.modules() for slots in module_hooks(module) for hook in slots.values()]
    memo: dict[int, Any] = {id(hook): hook for hook in hooks if is_our_hook(hook)}
    if not numbers:
        plain = [p for p in model.parameters() if type(p) is nn.Parameter]
        memo |= {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in plain}
    try:
        with _Copying():
            copied = copy.deepcopy(model, memo)
    except Exception as error:  # attributes of the user's modules may raise anything
        raise TypeError(
            f"this {type(model).__name__} cannot be copied ({type(error).__name__}: {error}); keep what cannot be "
            "copied outside the model."
        ) from error
    parts = {*model.modules(), *model.parameters(), *model.buffers()}
    own = (*copied.modules(), *copied.parameters(), *copied.buffers())
    shared = next((part for part in own if part in parts), None)
    if shared is not None:
        raise TypeError(
            f"this {type(model).__name__} cannot be copied: a {type(shared).__name__} in it is its own copy "
            "(__deepcopy__ returns it); keep it outside the model, or let __deepcopy__ return a copy."
        )
    for original, module in zip(model.modules(), copied.modules(), strict=True):
        for slots in module_hooks(module):
            for key in [key for key, hook in slots.items() if is_our_hook(hook)]:
                del slots[key]
        _uncast(module)
        _uncompile(module, original)
    return copied.eval()


class _Copying(TorchFunctionMode):
    """Copies activations without their graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def is_large(model: nn.Module) -> bool:
    """Whether a model has more than 1 GiB of parameters, and is not copied with their values without being asked to."""
    return sum(parameter.nbytes for parameter in model.parameters()) > 2**30


def _uncompile(module: nn.Module, original: nn.Module) -> None:
    """Undo ``original.forward = torch.compile(original.forward)`` in a copy, which would call the original's."""
    beneath = beneath_compiled(vars(module).get("forward"))
    if isinstance(beneath, types.MethodType) and beneath.__self__ is original:
        _set_forward(module, types.MethodType(beneath.__func__, module))


def _uncast(module: nn.Module) -> None:
    """Remove Accelerate's mixed precision from the forward of a module in a copy.

    Accelerate sets a ``forward`` on the instance that enters autocast and casts the outputs, and stores the original
    one. Its own function for the removal follows ``__wrapped__`` through all inner wrappers too.
    """
    operations = sys.modules.get("accelerate.utils.operations")
    forward = vars(module).get("forward")
    casting = getattr(getattr(forward, "__func__", forward), "__wrapped__", None)
    if operations is not None and isinstance(casting, operations.ConvertOutputsToFp32):
        _set_forward(module, vars(module).pop("_original_forward", None))


def _set_forward(module: nn.Module, forward: Any) -> None:
    del module.forward
    if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
        module.forward = forward


_ORIGINALS: ContextVar[tuple[nn.Module, ...]] = ContextVar("originals", default=())
"""In :func:`copies_of`: the models whose copies are run."""


class ReachesOriginal(TypeError):
    """The forward of a copy computes with a tensor of the model that was copied, or nothing is known about it."""


@contextmanager
def copies_of(*models: nn.Module) -> Iterator[None]:
    """Let every :func:`undisturbed` in this block protect these models too, as for copies of a copy of them."""
    token = _ORIGINALS.set((*_ORIGINALS.get(), *models))
    try:
        yield
    finally:
        _ORIGINALS.reset(token)


@contextmanager
def undisturbed(model: nn.Module, *, numbers: bool = True) -> Iterator[nn.Module]:
    """Yield a :func:`twin` of a model to run without gradients. Random generators are restored.

    Operations of this thread on parameters and buffers of the original, and of the models of the surrounding
    :func:`copies_of`, are refused. A deep copy does not copy objects that a function holds (a wrapped ``forward``, a
    lambda that uses ``self``), nor the target of a weak reference. Such a copy would compute with the weights of the
    original, write its statistics and add to its gradients.

    Raises:
        TypeError: The model cannot be copied.
        ReachesOriginal: An operation was refused, even if the forward caught the error.
    """
    copied = twin(model, numbers=numbers)
    watch = _Watch((*_ORIGINALS.get(), model))
    try:
        with torch.no_grad(), streams_kept(accelerators(model.parameters())), watch:
            yield copied
    except Exception as error:
        if watch.reached and not isinstance(error, ReachesOriginal):
            raise ReachesOriginal(watch.reached) from error
        raise
    if watch.reached:
        raise ReachesOriginal(watch.reached)


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Disable autocast, and TF32 and bfloat16 inside float32 products, so that two passes can be compared."""
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    backends: list[Any] = [cudnn.conv, torch.backends.cuda.matmul, mkldnn.conv, mkldnn.matmul]
    before = [backend.fp32_precision for backend in backends]
    kind = device_of(model).type
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(kind, enabled=False) if kind != "meta" else nullcontext():
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


class _Watch(DispatchMode):
    """Refuse operations on parameters and buffers of models."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.reached = ""
        self._owners = {
            memory(tensor): f"{name} of a {type(module).__name__}"
            for module in dict.fromkeys(module for model in models for module in model.modules())
            for slots in (parameter_slots(module), buffer_slots(module))
            for name, tensor in slots.items()
            if tensor is not None
        }
        self._owners.pop(0, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs or {})):
            owner = self._owners.get(memory(tensor))
            if owner is not None:
                self.reached = (
                    f"a copy of this model computes with the {owner} of the original; a function, such as a lambda or "
                    "a replaced forward, or a weak reference leads there. Give the module a method instead, or use the "
                    "model itself."
                )
                raise ReachesOriginal(self.reached)
        return func(*args, **(kwargs or {}))


def memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, 0 without one."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, fake, wrapped by functorch
        return 0
