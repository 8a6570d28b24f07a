"""Channels-last memory format: convolutions without layout conversions."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import check_module
from torchboost.core.covering import plain_hook
from torchboost.core.forward_watch import ForwardWatch
from torchboost.core.torch_private import AnyConv, is_functorch_wrapped_tensor, module_hooks, parameter_slots
from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.errors import IncompatibleError, NoEffectWarning
from torchboost.graph.dataflow import evaluate, runnable
from torchboost.graph.drawing import generators_kept
from torchboost.graph.unsafe_convolutions import unsafe_channels_last
from torchboost.optim.fusing import care_for_fused

__all__ = ["ChannelsLast", "to_channels_last"]

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_TOLERANCE = 1e-2
"""Tolerance of the outputs relative to the largest: rounding is far below it, an error far above."""


def to_channels_last(model: nn.Module, optimizer: Optimizer | None = None) -> Attachment:
    """Store convolution kernels channels-last and bring images into that format as they enter ``model``.

    The fast convolution kernels of oneDNN and cuDNN work on channels-last data; with both operands stored that way
    no layer converts between layouts. Values do not change, only strides; the order of additions inside a kernel
    may, so results agree up to rounding.

    If ``forward`` runs on no guessed input, the first batch is tried on contiguous kernels, too: if it runs only
    there, or the outputs differ, the model goes back to them, with a warning.

    Kernels in shared memory, and those that are views into a larger piece of memory (a flat buffer), stay as they are:
    other code holds that memory, too. Code outside the model that calls ``param.view(-1)`` or ``param.grad.view(-1)``,
    as ``parameters_to_vector`` does, fails for kernels in this format; ``reshape`` works.

    Parameters keep their identity. Their gradients and the per-element state of ``optimizer`` (momentum, Adam's
    moments) change format with them: fused optimizers read memory in storage order and would otherwise silently
    mix up elements.

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
        NoEffectWarning: The model has no 2-d or 3-d convolution; or, at the first batch, does not run in this format.

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
    return _watch_inputs(model, optimizer).with_undo(restore)


@dataclass(frozen=True, kw_only=True)
class ChannelsLast(Algorithm):
    """Applies :func:`to_channels_last`. It has no settings.

    ``transform`` changes the kernels (before wrapping), ``attach`` brings inputs into the format. A plan leaves it out
    if one trial, forward and backward on a copy and on noise that fits the first layer, fails in this format alone.
    ``remove()`` gives kernels that were changed while attaching the strides they had; kernels that
    ``plan.transform`` changed before stay, as under DDP, whose gradient buckets are laid out for them. Kernels sharded
    by FSDP2 stay as they are (it accepts contiguous parameters only): shard first, then attach; the inputs alone bring
    the gain.
    """

    name: ClassVar[str] = "channels_last"
    traits: ClassVar[Traits] = Traits(order=20)

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that the model has no 2-d or 3-d convolution, or that something fails in the format."""
        if not _dimensions(model):
            return "the model has no 2-d or 3-d convolution"
        if isinstance(optimizer, LBFGS):
            return "LBFGS flattens gradients by view, which fails for kernels in this format"
        unsafe = unsafe_channels_last(model)
        return _objection(model) if wrapper_of(model) is None and unsafe is None else unsafe

    def check(self, target: Target) -> None:
        """Refuse a model on whose convolutions oneDNN would crash."""
        _refuse_unsafe(target.model)

    def needs_transform(self, model: nn.Module) -> bool:
        """Whether some kernel has other strides than those of the format."""
        return bool(_pending(model))

    def transform(self, model: nn.Module, optimizer: Optimizer | None = None) -> Attachment:
        """Convert the kernels, their gradients and their optimizer state in place."""
        return Attachment(undo=_convert(model, optimizer))

    def attach(self, target: Target) -> Attachment:
        """Bring images into the format as they enter the model.

        Warns:
            NoEffectWarning: After the first update: the forward of the model was not called.
        """
        watch = ForwardWatch(self.name, target.model, target.optimizer)
        care = care_for_fused(target.optimizer)
        effect = _watch_inputs(target.model, target.optimizer, watch)
        return effect.with_undo(care.remove).with_undo(watch.remove)


def _refuse_unsafe(model: nn.Module) -> None:
    unsafe = unsafe_channels_last(model)
    if unsafe is not None:
        raise IncompatibleError(f"channels_last: {unsafe}; leave channels_last out.")


@dataclass(eq=False, slots=True)
class _ConvertInputs:
    """The hook of the root module.

    Args:
        dimensions: Of the inputs that are converted.
        optimizer: Its state follows if the kernels go back. The model does not keep it alive.
        untried: Whether no pass has run in this format yet.
        watch: Told that the model is called.
    """

    dimensions: frozenset[int]
    optimizer: weakref.ref[Optimizer] | None = None
    untried: bool = False
    watch: ForwardWatch | None = None

    @property
    def __name__(self) -> str:
        raise AttributeError(  # torch asks the hooks of a module for it to compile them
            "torch.jit.script cannot compile what torchboost attached to this model; call remove() first, or script "
            "the copy for inference."
        )

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.watch is not None:
            self.watch.called = True
        if not self.dimensions:
            return args, kwargs
        converted = tuple(map(self._convert, args)), {key: self._convert(value) for key, value in kwargs.items()}
        if self.untried and not torch.compiler.is_compiling() and _has_its_parameters(module):
            reason = _objection_to(module, (args, kwargs), converted)
            self.untried = reason is None
            if reason:
                self._give_up(module, reason)
                return args, kwargs
        return converted

    def __getstate__(self) -> dict[str, Any]:
        """A pickled attachment keeps neither the optimizer nor the watch."""
        return {"dimensions": self.dimensions, "untried": self.untried}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizer = self.watch = None
        for name, value in state.items():
            setattr(self, name, value)

    def _give_up(self, module: nn.Module, reason: str) -> None:
        self.dimensions = frozenset()
        optimizer = None if self.optimizer is None else self.optimizer()
        for weight in _kernels(module):
            _rewrite(weight, optimizer, Tensor.contiguous)
        warnings.warn(f"channels_last: {reason}; the model stays contiguous.", NoEffectWarning, stacklevel=2)

    def _convert(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim not in self.dimensions:
            return value
        if not value.is_floating_point() or value.layout is not torch.strided:
            return value
        if not torch.compiler.is_compiling() and is_functorch_wrapped_tensor(value):
            return value  # torch.func.vmap cannot change the layout of what it maps over; the results are the same
        converted = value.contiguous(memory_format=_FORMATS[value.ndim])
        # With one channel both formats are the same bytes, and only the strides tell the next convolution which it is.
        return converted.squeeze(1).unsqueeze(-1).movedim(-1, 1) if converted.shape[1] == 1 else converted


def _watch_inputs(model: nn.Module, optimizer: Optimizer | None, watch: ForwardWatch | None = None) -> Attachment:
    dimensions = _dimensions(model)
    if not dimensions:
        warnings.warn(
            f"channels_last: {type(unwrap(model)).__name__} has no 2-d or 3-d convolution; leave it out.",
            NoEffectWarning,
            stacklevel=3,
        )
        return Attachment()

    copied = _copied(model) if wrapper_of(model) is None else None
    held = None if optimizer is None else weakref.ref(optimizer)
    hook = _ConvertInputs(dimensions, held, copied is not None and runnable(copied) is None, watch)
    return plain_hook(model, model.register_forward_pre_hook(hook, with_kwargs=True))


def _objection(model: nn.Module) -> str | None:
    """Explain why a model that runs on a guessed input fails channels-last; None if it does not."""
    copied = _copied(model)
    found = runnable(copied) if copied is not None else None
    if found is None:
        return None
    network, sample = found
    expected = evaluate(network, sample)
    _convert(network, None)
    converted = sample.contiguous(memory_format=_FORMATS[sample.ndim]) if sample.ndim in _FORMATS else sample
    try:
        reason = _difference(expected, evaluate(network, converted))
        if reason is None and any(parameter.requires_grad for parameter in network.parameters()):
            _run_backward(network.eval(), converted)
    except RuntimeError as error:
        return _does_not_run(network, error)
    return reason


def _objection_to(module: nn.Module, given: Any, converted: Any) -> str | None:
    """Compare a channels-last pass with a pass on contiguous kernels and the given arguments, in eval mode.

    Returns:
        What is wrong; empty if nothing is, or if it is unknown; None if neither runs on these arguments.
    """
    copied = _copied(module)
    if copied is None:
        return ""
    called, found, failed = _Called(copied), None, None
    try:
        found = evaluate(called, {"call": converted})
    except RuntimeError as error:
        failed = error
    for weight in _kernels(copied):
        weight.data = weight.data.contiguous()
    try:
        expected = evaluate(called, {"call": given})
    except RuntimeError:  # not the fault of the format; the caller will see it
        return None
    return _does_not_run(module, failed) if failed is not None else _difference(expected, found or []) or ""


class _Called(nn.Module):
    """A model that takes positional and named arguments as one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        return self.inner(*call[0], **call[1])


def _copied(model: nn.Module) -> nn.Module | None:
    """Return a copy without hooks, so that no hook sees the trial passes; None if it cannot be copied."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    try:
        made = copy.deepcopy(model)
    except Exception:  # whatever the attributes of the user's modules raise
        return None
    for module in made.modules():
        for registered in module_hooks(module):
            registered.clear()
    return made


def _run_backward(network: nn.Module, sample: Any) -> None:
    with generators_kept(range(torch.cuda.device_count())), torch.enable_grad():
        parts = [part for part in _leaves(network(sample)) if part.requires_grad and part.is_floating_point()]
        if parts:
            torch.stack([part.float().sum() for part in parts]).sum().backward()


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(part)


def _difference(expected: list[Tensor], found: list[Tensor]) -> str | None:
    for one, other in zip(expected, found, strict=False):
        if one.shape != other.shape:
            return f"the outputs have shape {tuple(other.shape)} in this format and {tuple(one.shape)} without"
        if one.dtype in (torch.float32, torch.float64) and one.numel():
            largest, gap = one.abs().max(), (one - other).abs().max()
            if gap > _TOLERANCE * largest and bool(torch.isfinite(gap)):
                return f"the outputs in this format differ by {float(gap / largest):.1e} of the largest one"
    return None


def _does_not_run(model: nn.Module, error: RuntimeError) -> str:
    said = str(error).splitlines()[0]
    return f"{type(model).__name__} does not run in this format ({said}); use reshape in place of view"


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


def _has_its_parameters(model: nn.Module) -> bool:
    """Whether no other tensors stand in the places of its parameters, as they do inside ``functional_call``."""
    return all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def _has_own_memory(weight: nn.Parameter) -> bool:
    """Whether its memory is not shared with other processes or a larger flat buffer."""
    if weight.device.type == "cpu" and weight.is_shared():  # memory of GPUs always counts as shared
        return False
    return weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()


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
    return [w for w in _kernels(model) if w.stride() != _strides(w.shape)]


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=_FORMATS[len(shape)]).stride()


def _convert(model: nn.Module, optimizer: Optimizer | None) -> Callable[[], None]:
    """Convert the kernels that are in another format; return a function that restores their strides."""
    before = [(weight, weight.stride()) for weight in _pending(model)]
    for weight, _ in before:
        layout = _FORMATS[weight.ndim]
        _rewrite(weight, optimizer, lambda tensor, layout=layout: tensor.to(memory_format=layout))
    return functools.partial(_restride, before, optimizer)


def _restride(before: list[tuple[nn.Parameter, tuple[int, ...]]], optimizer: Optimizer | None) -> None:
    for weight, strides in before:
        _rewrite(weight, optimizer, functools.partial(_restrided, strides=strides))


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
