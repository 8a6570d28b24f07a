"""Channels-last memory format: convolutions without layout conversions."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import Self

from torchboost.core.algorithm import Algorithm, AlreadyOn, Attachment, Target, Traits, attach_each
from torchboost.core.arguments import check_module
from torchboost.core.forward import plain_hook, tensors_in
from torchboost.core.hardware import unsafe_channels_last
from torchboost.core.torch_private import AnyConv, calls_hooks, is_functorch_wrapped, is_view, parameter_slots
from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.errors import IncompatibleError, warn_no_effect
from torchboost.optim.fusing import care_for_fused
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.tensors import aligned
from torchboost.optim.wrapping_optimizer import WrappingOptimizer, change_entries

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_BEFORE = WeakTensorKeyDictionary()
"""The strides of each kernel before it was converted: the optimizer may not exist yet."""


def to_channels_last(model: nn.Module, optimizer: Optimizer | None = None) -> Attachment:
    """Store the kernels of 2-d and 3-d convolutions channels-last, so that these compute in that format.

    The fast convolution kernels of oneDNN and cuDNN work on such data. A convolution with such a kernel brings images
    into the format, and its outputs have it, so that no later layer converts between layouts. Only strides change, not
    values. The order of additions inside a kernel may change, so results agree up to rounding.

    Nothing is checked here. :func:`torchboost.boost` compares the first batch in both formats.

    Kernels in shared memory, those that are views into a larger piece of memory (a flat buffer) or whose gradients are,
    and computed ones (weight norm) do not change. Inputs are converted in front of their layers. Code outside the model
    that calls ``param.view(-1)`` or ``param.grad.view(-1)``, as ``parameters_to_vector`` does, fails for kernels in
    this format, but ``reshape`` works.

    Parameters keep their identity. Their gradients and the per-element state of ``optimizer`` (momentum, Adam's
    moments) change format with them: fused optimizers read memory in storage order and would otherwise silently
    mix up elements. ``optimizer.state_dict()`` returns it with the strides from before, as a plain run would, and a
    loaded state gets the strides of its kernel.

    Args:
        model: Not yet wrapped by DDP. It is changed in place.
        optimizer: The optimizer that holds the kernels. It may be omitted while it has no state.

    Returns:
        Its ``remove()`` restores the strides of every kernel.

    Raises:
        TypeError: Not a module.
        IncompatibleError: The model is wrapped and has kernels in another format, or oneDNN would crash on one of its
            convolutions in this format (:func:`~torchboost.core.hardware.unsafe_channels_last`).

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
    return _convert_inputs(model).with_undo(restore).with_undo(checkpoints.remove)


@dataclass(frozen=True, kw_only=True)
class ChannelsLast(Algorithm):
    """Applies :func:`to_channels_last`. It has no settings.

    ``transform`` changes the kernels (before wrapping). ``remove()`` gives kernels that were changed while attaching
    the strides they had. Kernels that ``plan.transform`` changed before keep the format, as under DDP, whose gradient
    buckets are laid out for them. Kernels sharded by FSDP2 do not change (it accepts contiguous parameters only): shard
    first, then attach. Inputs are then converted in front of the convolutions.
    """

    name: ClassVar[str] = "channels_last"
    traits: ClassVar[Traits] = Traits(order=20, each_optimizer=True)

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that the model has no 2-d or 3-d convolution, or that something is known to fail in the format."""
        if next(_convolutions(model), None) is None:
            return "the model has no 2-d or 3-d convolution"
        if isinstance(optimizer, LBFGS):
            return "LBFGS flattens gradients by view, which fails for kernels in this format"
        if not _takes_strides(optimizer):
            return f"{type(optimizer).__name__} has its own step, which may take gradients to be contiguous"
        return unsafe_channels_last(model)

    def check(self, target: Target) -> None:
        """Refuse a model on whose convolutions oneDNN would crash."""
        _refuse_unsafe(target.model)

    def fitted(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Self:
        """See whether the convolutions of the call compute channels-last without this."""
        kernels = _kernels(model)
        if any(kernel in _BEFORE or not _has_format(kernel) for kernel in kernels):
            return self
        images = [tensor for tensor in tensors_in((args, kwargs)) if tensor.ndim in _FORMATS]
        arrives = bool(images) and not any(image.is_contiguous() or not _has_format(image) for image in images)
        stored = not _waiting(model) and not all(kernel.is_contiguous() for kernel in kernels)
        if arrives or stored:
            return self.noting(AlreadyOn("its convolutions compute channels-last as they are"))
        return self

    def needs_transform(self, model: nn.Module) -> bool:
        """Whether the strides of some kernel are not in the format."""
        return bool(_pending(model))

    def transform(self, model: nn.Module, optimizer: Optimizer | None = None, *others: Optimizer) -> Attachment:
        """Convert the kernels, their gradients and their optimizer state in place."""
        return Attachment(undo=_convert(model, optimizer, *others))

    def attach(self, target: Target) -> Attachment:
        """Let checkpoints have the strides from before, and fused steps the layout of their kernels."""
        care = attach_each(target.optimizers, care_for_fused)
        checkpoints = attach_each(target.optimizers, functools.partial(_plain_checkpoints, target.model))
        return _convert_inputs(target.model).with_undo(checkpoints.remove).with_undo(care.remove)


def _takes_strides(optimizer: Optimizer) -> bool:
    """Whether the update is one of ``torch.optim`` or of this package, which read gradients in any memory format."""
    while isinstance(optimizer, WrappingOptimizer):
        optimizer = optimizer.opt
    kind: Any = type(optimizer)
    methods = [kind.step, kind.update] if isinstance(optimizer, UpdateRule) else [kind.step]
    return all(inspect.unwrap(one).__module__.startswith(("torch.optim.", "torchboost.")) for one in methods)


def _refuse_unsafe(model: nn.Module) -> None:
    unsafe = unsafe_channels_last(model)
    if unsafe is not None:
        raise IncompatibleError(f"channels_last: {unsafe}; leave channels_last out.")


def _convert_inputs(model: nn.Module) -> Attachment:
    """Convert inputs in front of convolutions whose kernels do not change. The others do so themselves."""
    if next(_convolutions(model), None) is None:
        kind = type(unwrap(model)).__name__
        warn_no_effect(f"channels_last: {kind} has no 2-d or 3-d convolution; leave it out.", above=2)
    waiting = _waiting(model)
    return Attachment(*(plain_hook(one, one.register_forward_pre_hook(_channels_last_inputs)) for one in waiting))


def _waiting(model: nn.Module) -> list[AnyConv]:
    """Return the convolutions that do not bring their inputs into the format by themselves."""
    weights = [(module, parameter_slots(module).get("weight")) for module in _convolutions(model)]
    return [module for module, weight in weights if not (_is_plain(weight) and _has_format(weight))]


def _channels_last_inputs(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not args or args[0].ndim not in _FORMATS:
        return args
    if not torch.compiler.is_compiling() and is_functorch_wrapped(args[0]):
        return args  # torch.func.vmap cannot change the layout of tensors it maps over, but the results are the same
    return args[0].contiguous(memory_format=_FORMATS[args[0].ndim]), *args[1:]


def _convolutions(model: nn.Module) -> Iterator[AnyConv]:
    return (m for m in model.modules() if isinstance(m, AnyConv) and len(m.kernel_size) + 2 in _FORMATS)


def _kernels(model: nn.Module) -> list[nn.Parameter]:
    """Return the kernels that may change. A layer with weight norm or pruning computes its kernel and has none."""
    slots = dict.fromkeys(parameter_slots(module).get("weight") for module in _convolutions(model))
    return [weight for weight in slots if _is_plain(weight)]


def _is_plain(weight: Tensor | None) -> TypeGuard[nn.Parameter]:
    """Whether a kernel is a parameter with a shape, not sharded, and with memory of its own."""
    if not isinstance(weight, nn.Parameter) or isinstance(weight, nn.parameter.UninitializedParameter):
        return False
    distributed = sys.modules.get("torch.distributed.tensor")
    return (distributed is None or not isinstance(weight, distributed.DTensor)) and _has_own_memory(weight)


def _has_format(weight: Tensor) -> bool:
    return weight.is_contiguous(memory_format=_FORMATS[weight.ndim])


def _has_own_memory(tensor: Tensor) -> bool:
    """Whether its memory is not shared with other processes or a larger flat buffer."""
    if tensor.device.type == "cpu" and tensor.is_shared():  # memory of GPUs always counts as shared
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _may_move(grad: Tensor | None) -> bool:
    """Whether a gradient can follow its kernel. Other code may hold the memory that it is a part of."""
    return grad is None or (grad.layout is torch.strided and not is_view(grad) and _has_own_memory(grad))


def _pending(model: nn.Module) -> list[nn.Parameter]:
    """Kernels whose strides are not in the format.

    With 1 x 1 windows or one channel both formats are the same bytes, and only the strides tell them apart. The
    compiler goes by the strides: with the strides of contiguous kernels, the convolutions of the compiled backward pass
    of a MobileNetV2 took 1.36 times as long. Under a wrapper such kernels do not change.
    """
    if wrapper_of(model) is not None:
        return [w for w in _kernels(model) if not _has_format(w)]
    return [w for w in _kernels(model) if w.stride() != _strides(w.shape) and _may_move(w.grad)]


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=_FORMATS[len(shape)]).stride()


def _convert(model: nn.Module, *optimizers: Optimizer | None) -> Callable[[], None]:
    """Convert the kernels that are in another format. Return a function that restores their strides."""
    before = [(weight, weight.stride()) for weight in _pending(model)]
    for weight, strides in before:
        _rewrite(weight, optimizers, _strides(weight.shape))
        _BEFORE[weight] = strides
    return functools.partial(_restride, before, optimizers)  # which is copied with the model


def _plain_checkpoints(model: nn.Module, optimizer: Optimizer | None) -> Attachment:
    """Let the state be saved with the strides from before. A fused kernel mixes up entries in another order."""
    kernels = _kernels(model)  # an assigned checkpoint may have had the format before
    before: dict[Tensor, tuple[int, ...]] = {weight: _BEFORE[weight] for weight in kernels if weight in _BEFORE}
    if optimizer is None or not kernels or not calls_hooks(optimizer):
        return Attachment()

    written = optimizer.register_state_dict_post_hook(functools.partial(_write_plain, before), prepend=True)
    return Attachment(written, optimizer.register_load_state_dict_post_hook(functools.partial(_follow, kernels)))


def _write_plain(before: dict[Tensor, tuple[int, ...]], optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    def plain(param: Tensor, key: str, value: Any) -> Any:
        moved = param in before and _belongs(value, param) and value.stride() != before[param]
        return _restrided(value, before[param]) if moved else value

    change_entries(optimizer, state_dict, plain)


def _follow(kernels: list[nn.Parameter], optimizer: Optimizer) -> None:
    """Bring loaded state into the format of its kernel."""
    for weight in kernels:
        state = optimizer.state.get(weight, {})
        state.update({key: aligned(value, weight) for key, value in state.items() if _belongs(value, weight)})


def _belongs(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.shape == weight.shape


def _restride(before: list[tuple[nn.Parameter, tuple[int, ...]]], optimizers: tuple[Optimizer | None, ...]) -> None:
    for weight, strides in before:
        _rewrite(weight, optimizers, strides)
        _BEFORE.pop(weight, None)


def _rewrite(weight: nn.Parameter, optimizers: tuple[Optimizer | None, ...], strides: tuple[int, ...]) -> None:
    """Change the strides of a parameter and of everything that belongs to it element by element."""
    states = [optimizer.state.get(weight, {}) for optimizer in optimizers if optimizer is not None]
    entries = [value for state in states for value in state.values()]
    followers = [value for value in entries if isinstance(value, Tensor) and value.shape == weight.shape]
    if weight.grad is not None and _may_move(weight.grad):
        followers.append(weight.grad)
    for tensor in (weight, *followers):
        tensor.data = _restrided(tensor.data, strides)


def _restrided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
