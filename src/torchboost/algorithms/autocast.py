"""Mixed precision: the forward pass of a model under autocast, without changes to the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import check_module
from torchboost.core.containers import with_tensors
from torchboost.core.covering import cover_forward
from torchboost.core.forward_watch import ForwardWatch
from torchboost.errors import IncompatibleError
from torchboost.graph.unsafe_convolutions import convolutions_unsafe_in_bfloat16, is_unsafe_in_bfloat16

__all__ = ["Autocast", "autocast_forward"]

_HALF = (torch.bfloat16, torch.float16)


def autocast_forward(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Attachment:
    """Run every forward of ``model`` under ``torch.autocast`` and return its outputs in float32.

    Outputs keep their containers (see :func:`~torchboost.core.containers.with_tensors`); tensors in an
    object of another kind stay in the precision that autocast gave them.

    Matrix products and convolutions read ``dtype``; reductions that need it stay in float32; parameters,
    gradients and optimizer state stay as they are. Each weight is cast once per forward (autocast's cache).
    The loss is computed by the caller on float32 outputs, outside autocast.

    On the CPU, a strided convolution whose outputs have one entry in the last dimension computes in float32, because
    oneDNN computes its gradient wrongly in bfloat16
    (:func:`~torchboost.graph.unsafe_convolutions.is_unsafe_in_bfloat16`).

    The ``forward`` of this one instance is replaced by a function that calls the original. Forward hooks do not work:
    in a model compiled by ``nn.Module.compile()`` the hooks of the root are compiled separately from ``forward``, so
    entering autocast in them has no effect and the model silently runs in float32. The replaced ``forward`` is traced
    into the same graph, compiled before or after, in place or not, without graph breaks.

    Args:
        model: The model as the loop calls it. If there is a wrapper (DDP, ``torch.compile``), pass the wrapper.
        dtype: ``torch.bfloat16``, or ``torch.float16``, which needs a ``GradScaler`` in the loop.

    Returns:
        Its ``remove()`` restores the original ``forward``.

    Raises:
        TypeError: Not a module.
        ValueError: ``dtype`` is neither bfloat16 nor float16.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> with autocast_forward(model):
        ...     model(torch.randn(3, 4)).dtype
        torch.float32
    """
    return _cover(model, dtype, None)


def _cover(model: nn.Module, dtype: torch.dtype, watch: ForwardWatch | None) -> Attachment:
    check_module(model)
    if dtype not in _HALF:
        raise ValueError(f"autocast to {dtype}: allowed are torch.bfloat16 and torch.float16; pass one of them.")
    device_type = next((p.device.type for p in model.parameters()), torch.get_default_device().type)

    def under_autocast(
        forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if watch is not None:
            watch.called = True
        try:
            with torch.autocast(device_type, dtype):
                outputs = forward(module, *args, **kwargs)
        except (RuntimeError, TypeError) as error:  # torch raises these if precisions do not match
            _explain(error, dtype)
            raise
        return with_tensors(outputs, _to_float32)

    covers = [cover_forward(model, under_autocast)]
    if dtype is torch.bfloat16:
        unsafe = convolutions_unsafe_in_bfloat16(model)
        covers += [cover_forward(conv, _in_float32_if_unsafe, innermost=True) for conv in unsafe]
    return Attachment(*covers)


def _in_float32_if_unsafe(forward: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    inputs = args[0] if args else kwargs["input"]
    if not is_unsafe_in_bfloat16(module, inputs):
        return forward(module, *args, **kwargs)
    with torch.autocast("cpu", enabled=False):
        return forward(module, inputs.float(), *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Autocast(Algorithm):
    """Settings of :func:`autocast_forward`.

    Args:
        dtype: ``"bfloat16"``, or ``"float16"``, which needs a scaler in the target.
    """

    name: ClassVar[str] = "autocast"
    traits: ClassVar[Traits] = Traits(order=30, withdrawn=2, each_optimizer=True)

    dtype: Literal["bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype={self.dtype!r}: allowed are 'bfloat16' and 'float16'; choose one of them.")

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that no parameter is in float32, the only precision that autocast lowers."""
        if any(parameter.dtype is torch.float32 for parameter in model.parameters()):
            return None
        return "no parameter is in float32, so there is nothing to lower"

    def check(self, target: Target) -> None:
        """Refuse float16 without a scaler: small gradients would vanish.

        Raises:
            IncompatibleError: float16 without a scaler.
        """
        if self.dtype == "float16" and target.scaler is None and not target.scaler_follows:
            raise IncompatibleError(
                "autocast to float16 without a scaler: small gradients would become zero; pass "
                "scaler=torch.amp.GradScaler() to boost(...), network_auto_process_train(...) or Target(...), or "
                "choose dtype='bfloat16'."
            )

    def attach(self, target: Target) -> Attachment:
        """Replace the forward of the model.

        Warns:
            NoEffectWarning: After the first update: the forward of the model was not called.
        """
        watch = ForwardWatch(self.name, target.model, target.optimizer)
        return _cover(target.model, getattr(torch, self.dtype), watch).with_undo(watch.remove)


def _explain(error: Exception, dtype: torch.dtype) -> None:
    """Add a note to the error that the forward ran under autocast."""
    if not isinstance(error, (IncompatibleError, torch.OutOfMemoryError)):
        error.add_note(
            f"torchboost runs this forward under torch.autocast to {dtype}. If the model mixes precisions itself, turn "
            "it off: set extra.autocast = false in the configuration, or leave out Autocast. Or compute the part that "
            "fails under torch.autocast(device_type, enabled=False)."
        )


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
