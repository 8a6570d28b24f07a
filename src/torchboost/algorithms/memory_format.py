"""Channels-last memory format: convolutions without layout conversions."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import check_module
from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.errors import IncompatibleError, NoEffectWarning

__all__ = ["ChannelsLast", "channels_last"]

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(model: nn.Module, optimizer: Optimizer | None = None) -> Attachment:
    """Store convolution kernels channels-last and bring images into that format as they enter ``model``.

    The fast convolution kernels of oneDNN and cuDNN work on channels-last data; with both operands stored that way
    no layer converts between layouts. Values do not change, only strides; the order of additions inside a kernel
    may, so results agree up to rounding.

    Parameters keep their identity. Their gradients and the per-element state of ``optimizer`` (momentum, Adam's
    moments) change format with them: fused optimizers read memory in storage order and would otherwise silently
    mix up elements.

    Args:
        model: Not yet wrapped by DDP; changed in place.
        optimizer: The optimizer that holds the kernels; may be left out while it has no state.

    Returns:
        Its ``remove()`` gives every kernel the strides it had before.

    Raises:
        TypeError: Not a module.
        IncompatibleError: A wrapped model still has kernels in another format.

    Warns:
        NoEffectWarning: The model has no 2-d or 3-d convolution.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> effect = channels_last(model)
        >>> model(torch.randn(2, 3, 16, 16)).is_contiguous(memory_format=torch.channels_last)
        True
        >>> effect.remove()
    """
    check_module(model)
    wrapper = wrapper_of(model)
    if wrapper is not None and _pending(model):
        raise IncompatibleError(
            f"channels_last changes the memory format of kernels, but the model is already wrapped by {wrapper}; "
            "call it on the bare model first, then wrap."
        )
    before = [(weight, weight.stride()) for weight in _pending(model)]
    _convert(model, optimizer)
    return _watch_inputs(model, functools.partial(_restride, before, optimizer))


@dataclass(frozen=True, kw_only=True)
class ChannelsLast(Algorithm):
    """Settings of :func:`channels_last`; there are none.

    ``transform`` changes the kernels (before wrapping), ``attach`` brings inputs into the format. ``remove()``
    makes the kernels contiguous again, but under DDP, whose gradient buckets are laid out for the format the
    kernels had when it was built: there only the input hook goes. Kernels sharded by FSDP2 stay as they are
    (it accepts contiguous parameters only): shard first, then attach; the inputs alone bring the gain.
    """

    name: ClassVar[str] = "channels_last"
    traits: ClassVar[Traits] = Traits(order=20)

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Say so when the model has no convolution over images or volumes."""
        return None if _dimensions(model) else "the model has no 2-d or 3-d convolution"

    def needs_transform(self, model: nn.Module) -> bool:
        """Whether some kernel is stored in another format."""
        return bool(_pending(model))

    def transform(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Convert the kernels, their gradients and their optimizer state in place."""
        _convert(model, optimizer)

    def attach(self, target: Target) -> Attachment:
        """Bring images into the format as they enter the model."""
        return _watch_inputs(target.model, functools.partial(_make_contiguous, target.model, target.optimizer))


@dataclass(eq=False, slots=True)
class _ConvertInputs:
    """The hook of the root module, which is pickled with the model: an object of a class, not a closure.

    A pickled model takes the number of the hook along, and the handle makes torch give it to no other hook of the
    process that loads it.
    """

    dimensions: frozenset[int]
    handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(self._convert, args)), {key: self._convert(value) for key, value in kwargs.items()}

    def _convert(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim not in self.dimensions:
            return value
        if not value.is_floating_point() or value.layout is not torch.strided:
            return value
        return value.contiguous(memory_format=_FORMATS[value.ndim])


def _watch_inputs(model: nn.Module, restore: Callable[[], None]) -> Attachment:
    dimensions = _dimensions(model)
    if not dimensions:
        warnings.warn(
            f"channels_last: {type(unwrap(model)).__name__} has no 2-d or 3-d convolution; leave it out.",
            NoEffectWarning,
            stacklevel=3,
        )
        return Attachment()

    hook = _ConvertInputs(dimensions)
    hook.handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    return Attachment(hook.handle, undo=restore)


def _restride(before: list[tuple[nn.Parameter, tuple[int, ...]]], optimizer: Optimizer | None) -> None:
    for weight, strides in before:
        _rewrite(weight, optimizer, functools.partial(_restrided, strides=strides))


def _make_contiguous(model: nn.Module, optimizer: Optimizer) -> None:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return
    for weight in _kernels(model):
        _rewrite(weight, optimizer, Tensor.contiguous)


def _convolutions(model: nn.Module) -> Iterator[nn.Module]:
    # A parametrised kernel (weight norm, pruning) is computed at every forward and no parameter of its layer.
    found = (module for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd))
    return (module for module in found if module._parameters.get("weight") is not None)


def _dimensions(model: nn.Module) -> frozenset[int]:
    found = (len(m.kernel_size) + 2 for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd))
    return frozenset(found) & _FORMATS.keys()


def _kernels(model: nn.Module) -> list[nn.Parameter]:
    weights = (module.get_parameter("weight") for module in _convolutions(model))
    return [w for w in dict.fromkeys(weights) if _is_plain(w) and w.ndim in _FORMATS]


def _is_plain(weight: nn.Parameter) -> bool:
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return False
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is None or not isinstance(weight, distributed.DTensor)


def _pending(model: nn.Module) -> list[nn.Parameter]:
    """Kernels whose bytes would move; with 1 x 1 windows or one channel both formats are the same bytes."""
    return [w for w in _kernels(model) if not w.is_contiguous(memory_format=_FORMATS[w.ndim])]


def _convert(model: nn.Module, optimizer: Optimizer | None) -> None:
    for weight in _pending(model):
        layout = _FORMATS[weight.ndim]
        _rewrite(weight, optimizer, lambda tensor, layout=layout: tensor.contiguous(memory_format=layout))


def _rewrite(weight: nn.Parameter, optimizer: Optimizer | None, change: Callable[[Tensor], Tensor]) -> None:
    """Change the strides of a parameter and of everything that belongs to it element by element."""
    state = optimizer.state.get(weight, {}) if optimizer is not None else {}
    followers = [value for value in state.values() if isinstance(value, Tensor) and value.shape == weight.shape]
    if weight.grad is not None:
        followers.append(weight.grad)
    for tensor in (weight, *followers):
        tensor.data = change(tensor.data)


def _restrided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
