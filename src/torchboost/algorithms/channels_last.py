"""Channels-last memory format: convolutions without layout conversions."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

import torchboost.optim
from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits, attach_each
from torchboost.core.arguments import check_module
from torchboost.core.covering import ForwardWatch, plain_hook
from torchboost.core.torch_private import (
    AnyConv,
    calls_hooks,
    is_functorch_wrapped,
    is_view,
    parameter_slots,
    store_in_order,
    version,
)
from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.errors import IncompatibleError, NoEffectWarning
from torchboost.graph.unsafe_convolutions import unsafe_channels_last
from torchboost.optim.fusing import care_for_fused
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.rules.checkpoints import change_entries
from torchboost.optim.tensors import aligned
from torchboost.optim.wrapping_optimizer import WrappingOptimizer

__all__ = ["ChannelsLast", "to_channels_last"]

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_Strides = dict[Tensor, tuple[int, ...]]
_BEFORE = WeakTensorKeyDictionary()
"""The strides of each kernel before it was converted: the optimizer may not exist yet."""


def to_channels_last(model: nn.Module, optimizer: Optimizer | None = None) -> Attachment:
    """Store convolution kernels channels-last and bring images into that format as they enter ``model``.

    The fast convolution kernels of oneDNN and cuDNN work on channels-last data; with both operands stored that way
    no layer converts between layouts. Values do not change, only strides; the order of additions inside a kernel
    may, so results agree up to rounding.

    Nothing is checked here; :func:`torchboost.boost` compares the first batch in both formats.

    Kernels in shared memory, and those that are views into a larger piece of memory (a flat buffer) or whose gradients
    are, stay as they are: other code holds that memory, too. What the model writes into an input reaches the tensor
    that the loop holds. Code outside the model that calls ``param.view(-1)`` or ``param.grad.view(-1)``,
    as ``parameters_to_vector`` does, fails for kernels in this format; ``reshape`` works.

    Parameters keep their identity. Their gradients and the per-element state of ``optimizer`` (momentum, Adam's
    moments) change format with them: fused optimizers read memory in storage order and would otherwise silently
    mix up elements. ``optimizer.state_dict()`` returns it with the strides from before, as a plain run would, and a
    loaded state gets those of its kernel.

    Args:
        model: Not yet wrapped by DDP; changed in place.
        optimizer: The optimizer that holds the kernels; may be left out while it has no state.

    Returns:
        Its ``remove()`` restores the strides of every kernel.

    Raises:
        TypeError: Not a module.
        IncompatibleError: The model is wrapped and has kernels in another format, or oneDNN would crash on one of its
            convolutions in this format (:func:`~torchboost.graph.unsafe_convolutions.unsafe_channels_last`).

    Warns:
        NoEffectWarning: The model has no 2-d or 3-d convolution.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> effect = to_channels_last(model)
        >>> model(torch.randn(2, 3, 16, 16)).is_contiguous(memory_format=torch.channels_last)
        True
        >>> effect.remove()
    """
    check_module(model)
    wrapper = wrapper_of(model)
    if wrapper is not None and _pending(model):
        raise IncompatibleError(
            f"channels_last changes the memory format of kernels, but the model is already wrapped by {wrapper}; call "
            "it on the bare model before wrapping."
        )
    _refuse_unsafe(model)
    restore = _convert(model, optimizer)
    checkpoints = _plain_checkpoints(model, optimizer)
    return _watch_inputs(model).with_undo(restore).with_undo(checkpoints.remove)


@dataclass(frozen=True, kw_only=True)
class ChannelsLast(Algorithm):
    """Applies :func:`to_channels_last`. It has no settings.

    ``transform`` changes the kernels (before wrapping), ``attach`` brings inputs into the format.
    ``remove()`` gives kernels that were changed while attaching the strides they had; kernels that
    ``plan.transform`` changed before stay, as under DDP, whose gradient buckets are laid out for them. Kernels sharded
    by FSDP2 stay as they are (it accepts contiguous parameters only): shard first, then attach; the inputs alone bring
    the gain.
    """

    name: ClassVar[str] = "channels_last"
    traits: ClassVar[Traits] = Traits(order=20, each_optimizer=True)

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that the model has no 2-d or 3-d convolution, or that something is known to fail in the format."""
        if not _dimensions(model):
            return "the model has no 2-d or 3-d convolution"
        if isinstance(optimizer, LBFGS):
            return "LBFGS flattens gradients by view, which fails for kernels in this format"
        if not _takes_strides(optimizer):
            return f"{type(optimizer).__name__} has its own step, which may take gradients to be contiguous"
        return unsafe_channels_last(model)

    def check(self, target: Target) -> None:
        """Refuse a model on whose convolutions oneDNN would crash."""
        _refuse_unsafe(target.model)

    def needs_transform(self, model: nn.Module) -> bool:
        """Whether some kernel has other strides than those of the format."""
        return bool(_pending(model))

    def transform(self, model: nn.Module, optimizer: Optimizer | None = None, *others: Optimizer) -> Attachment:
        """Convert the kernels, their gradients and their optimizer state in place."""
        return Attachment(undo=_convert(model, optimizer, *others))

    def attach(self, target: Target) -> Attachment:
        """Bring images into the format as they enter the model.

        Warns:
            NoEffectWarning: After the first update: the forward of the model was not called.
        """
        watch = ForwardWatch(self.name, target.model, target.optimizer)
        care = attach_each(target.optimizers, care_for_fused)
        checkpoints = attach_each(target.optimizers, functools.partial(_plain_checkpoints, target.model))
        inputs = _watch_inputs(target.model, watch)
        return inputs.with_undo(checkpoints.remove).with_undo(care.remove).with_undo(watch.remove)


def _takes_strides(optimizer: Optimizer) -> bool:
    """Whether the update is one of ``torch.optim`` or of this package, which read gradients in any memory format."""
    while isinstance(optimizer, WrappingOptimizer):
        optimizer = optimizer.opt
    own: Any = type(optimizer)
    if isinstance(optimizer, UpdateRule):
        known = _kinds(UpdateRule, (getattr(torchboost.optim, name) for name in dir(torchboost.optim)))
        return any(own.update is kind.update and own.step is kind.step for kind in known)
    known = _kinds(Optimizer, vars(torch.optim).values())
    return any(inspect.unwrap(own.step) is inspect.unwrap(kind.step) for kind in known)


def _kinds(base: type, found: Iterable[Any]) -> list[Any]:
    return [kind for kind in found if isinstance(kind, type) and issubclass(kind, base) and kind is not base]


def _refuse_unsafe(model: nn.Module) -> None:
    unsafe = unsafe_channels_last(model)
    if unsafe is not None:
        raise IncompatibleError(f"channels_last: {unsafe}; leave channels_last out.")


class _Given(NamedTuple):
    """What a copy of an input was made from, and how it was before the model could write into it."""

    original: Tensor
    version: int
    grad_fn: Any

    def take_back(self, copied: Tensor) -> None:
        """Write into the original what the model wrote into the copy, under autograd if the model did so."""
        if version(copied) == self.version:
            return
        with torch.set_grad_enabled(torch.is_grad_enabled() and copied.grad_fn is not self.grad_fn):
            self.original.copy_(copied)


@dataclass(eq=False, slots=True)
class _ConvertInputs:
    """The hooks of the root module.

    A model may write into its inputs, and the loop may read them afterwards. So what was written into a converted copy
    is written into the original, too. Under ``inference_mode`` writes cannot be seen, so nothing is copied:
    convolutions with converted kernels then convert their input themselves. A graph that is compiled cannot ask whether
    the model writes: there, a write stays in the copy.

    Args:
        dimensions: Of the inputs that are converted.
        watch: Told that the model is called.
        given: For each copy that is in use.
    """

    dimensions: frozenset[int]
    watch: ForwardWatch | None = None
    given: MutableMapping[Tensor, _Given] = field(default_factory=WeakTensorKeyDictionary)

    @property
    def __name__(self) -> str:
        raise AttributeError(  # torch asks the hooks of a module for it to compile them
            "torch.jit.script cannot compile what torchboost attached to this model; call remove() first, or script "
            "the copy for inference."
        )

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.watch is not None:
            self.watch.called = True
        if torch.compiler.is_compiling():
            return tuple(map(self._convert, args)), {key: self._convert(value) for key, value in kwargs.items()}
        unique = {id(value): value for value in (*args, *kwargs.values())}  # an input that is given twice stays one
        made = {key: self._convert(value) for key, value in unique.items()}
        return tuple(made[id(value)] for value in args), {key: made[id(value)] for key, value in kwargs.items()}

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Bring what the model wrote into its inputs to the loop."""
        if torch.compiler.is_compiling() or not self.given:
            return
        for value in (*args, *kwargs.values()):
            given = self.given.pop(value, None) if isinstance(value, Tensor) else None
            if given is not None:
                given.take_back(value)

    def __getstate__(self) -> dict[str, Any]:
        """A pickled attachment does not keep the watch."""
        return {"dimensions": self.dimensions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.watch, self.given = None, WeakTensorKeyDictionary()
        for name, value in state.items():
            setattr(self, name, value)

    def _convert(self, value: Any) -> Any:
        if not issubclass(type(value), Tensor) or value.ndim not in self.dimensions:
            return value
        if not value.is_floating_point() or value.layout is not torch.strided:
            return value
        if not torch.compiler.is_compiling() and is_functorch_wrapped(value):
            return value  # torch.func.vmap cannot change the layout of what it maps over; the results are the same
        layout = _FORMATS[value.ndim]
        stays = value.is_contiguous(memory_format=layout)
        if not stays and not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            return value
        converted = value.contiguous(memory_format=layout)
        if value.shape[1] == 1:
            # Both formats are the same bytes, and only the strides tell the next convolution which it is.
            converted = converted.squeeze(1).unsqueeze(-1).movedim(-1, 1)
        if not (stays or torch.compiler.is_compiling()):
            self.given[converted] = _Given(value, version(converted), converted.grad_fn)
        return converted


def _watch_inputs(model: nn.Module, watch: ForwardWatch | None = None) -> Attachment:
    dimensions = _dimensions(model)
    if not dimensions:
        warnings.warn(
            f"channels_last: {type(unwrap(model)).__name__} has no 2-d or 3-d convolution; leave it out.",
            NoEffectWarning,
            stacklevel=3,
        )
        return Attachment()

    hook = _ConvertInputs(dimensions, watch)
    entry = model.register_forward_pre_hook(hook, with_kwargs=True)
    leaving = model.register_forward_hook(hook.leave, prepend=True, with_kwargs=True, always_call=True)
    store_in_order(model)
    return Attachment(plain_hook(model, entry), plain_hook(model, leaving))


def _convolutions(model: nn.Module) -> Iterator[nn.Module]:
    # A parametrised kernel (weight norm, pruning) is computed at every forward and no parameter of its layer.
    found = (module for module in model.modules() if isinstance(module, AnyConv))
    return (module for module in found if parameter_slots(module).get("weight") is not None)


def _dimensions(model: nn.Module) -> frozenset[int]:
    found = (len(m.kernel_size) + 2 for m in model.modules() if isinstance(m, AnyConv))
    return frozenset(found) & _FORMATS.keys()


def _kernels(model: nn.Module) -> list[nn.Parameter]:
    slots = (parameter_slots(module)["weight"] for module in _convolutions(model))
    weights = [weight for weight in slots if isinstance(weight, nn.Parameter)]
    return [w for w in dict.fromkeys(weights) if _is_plain(w) and w.ndim in _FORMATS and _has_own_memory(w)]


def _has_own_memory(tensor: Tensor) -> bool:
    """Whether its memory is not shared with other processes or a larger flat buffer."""
    if tensor.device.type == "cpu" and tensor.is_shared():  # memory of GPUs always counts as shared
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _may_move(grad: Tensor | None) -> bool:
    """Whether a gradient can follow its kernel; other code may hold the memory that it is a part of."""
    return grad is None or (grad.layout is torch.strided and not is_view(grad) and _has_own_memory(grad))


def _is_plain(weight: nn.Parameter) -> bool:
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return False
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is None or not isinstance(weight, distributed.DTensor)


def _pending(model: nn.Module) -> list[nn.Parameter]:
    """Kernels with other strides than those of the format.

    With 1 x 1 windows or one channel both formats are the same bytes, and only the strides tell them apart. The
    compiler goes by the strides: with those of contiguous kernels, the convolutions of the compiled backward pass of a
    MobileNetV2 took 1.36 times as long. Under a wrapper such kernels stay as they are.
    """
    if wrapper_of(model) is not None:
        return [w for w in _kernels(model) if not w.is_contiguous(memory_format=_FORMATS[w.ndim])]
    return [w for w in _kernels(model) if w.stride() != _strides(w.shape) and _may_move(w.grad)]


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=_FORMATS[len(shape)]).stride()


def _convert(model: nn.Module, *optimizers: Optimizer | None) -> Callable[[], None]:
    """Convert the kernels that are in another format; return a function that restores their strides."""
    before = [(weight, weight.stride()) for weight in _pending(model)]
    for weight, strides in before:
        layout = _FORMATS[weight.ndim]
        _rewrite(weight, optimizers, lambda tensor, layout=layout: tensor.to(memory_format=layout))
        _BEFORE[weight] = strides
    return functools.partial(_restride, before, optimizers)


def _plain_checkpoints(model: nn.Module, optimizer: Optimizer | None) -> Attachment:
    """Let the state be saved with the strides from before; a fused kernel mixes up what lies in another order."""
    before: _Strides = {weight: _BEFORE[weight] for weight in _kernels(model) if weight in _BEFORE}
    if optimizer is None or not before or not calls_hooks(optimizer):
        return Attachment()

    written = optimizer.register_state_dict_post_hook(functools.partial(_write_plain, before), prepend=True)
    return Attachment(written, optimizer.register_load_state_dict_post_hook(functools.partial(_follow, before)))


def _write_plain(before: _Strides, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    def plain(param: Tensor, key: str, value: Any) -> Any:
        moved = param in before and _belongs(value, param) and value.stride() != before[param]
        return _restrided(value, before[param]) if moved else value

    change_entries(optimizer, state_dict, plain)


def _follow(before: _Strides, optimizer: Optimizer) -> None:
    """Bring loaded state into the format of its kernel."""
    for weight in before:
        state = optimizer.state.get(weight, {})
        state.update({key: aligned(value, weight) for key, value in state.items() if _belongs(value, weight)})


def _belongs(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.shape == weight.shape


def _restride(before: list[tuple[nn.Parameter, tuple[int, ...]]], optimizers: tuple[Optimizer | None, ...]) -> None:
    for weight, strides in before:
        _rewrite(weight, optimizers, functools.partial(_restrided, strides=strides))
        _BEFORE.pop(weight, None)


def _rewrite(
    weight: nn.Parameter, optimizers: tuple[Optimizer | None, ...], change: Callable[[Tensor], Tensor]
) -> None:
    """Change the strides of a parameter and of everything that belongs to it element by element."""
    states = [optimizer.state.get(weight, {}) for optimizer in optimizers if optimizer is not None]
    entries = [value for state in states for value in state.values()]
    followers = [value for value in entries if isinstance(value, Tensor) and value.shape == weight.shape]
    if weight.grad is not None and _may_move(weight.grad):
        followers.append(weight.grad)
    for tensor in (weight, *followers):
        tensor.data = change(tensor.data)


def _restrided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
