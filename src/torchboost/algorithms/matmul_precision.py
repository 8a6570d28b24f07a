"""Lower precision inside float32 matrix products: TF32 on CUDA devices, bfloat16 on CPUs with AMX."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.kernels import matmul_backends
from torchboost.errors import NoEffectWarning

__all__ = ["MatmulPrecision", "lower_matmul_precision"]

Precision = Literal["high", "medium"]
_ROUNDING = {"high": 2.0**-11, "medium": 2.0**-8}


def lower_matmul_precision(precision: Precision = "high") -> Attachment:
    """Let the float32 matrix products of this process round their factors, forward and backward.

    Calls ``torch.set_float32_matmul_precision``. The setting belongs to the process: other models follow it too. A
    precision that the program has set, by any of torch's switches, stays as it is. Convolutions are left alone: cuDNN
    computes them in TF32 unless the program says otherwise.

    Args:
        precision: ``"high"``: TF32 on CUDA devices, factors of 11 bits. ``"medium"``: bfloat16 on CPUs with AMX,
            factors of 8 bits; TF32 on CUDA devices.

    Returns:
        Its ``remove()`` restores the state from before, unless the program has set another precision meanwhile.

    Raises:
        ValueError: Another precision.

    Warns:
        NoEffectWarning: The program has set another precision. It stays.

    Example:
        >>> import torch
        >>> with lower_matmul_precision("high"):
        ...     torch.get_float32_matmul_precision()
        'high'
        >>> torch.get_float32_matmul_precision()
        'highest'
    """
    _check(precision)
    if _is(precision):
        return Attachment()
    chosen = _of_program()
    if chosen is not None:
        warnings.warn(f"matmul_precision: {chosen}; it stays", NoEffectWarning, stacklevel=2)
        return Attachment()
    torch.set_float32_matmul_precision(precision)

    def restore() -> None:
        if _is(precision):
            torch.set_float32_matmul_precision("highest")
            for backend in matmul_backends().values():
                backend.fp32_precision = "none"  # as untouched: "highest" would count as set

    return Attachment(undo=restore)


@dataclass(frozen=True, kw_only=True)
class MatmulPrecision(Algorithm):
    """Applies :func:`lower_matmul_precision`.

    Args:
        precision: ``"high"`` or ``"medium"``, as in ``torch.set_float32_matmul_precision``.
    """

    name: ClassVar[str] = "matmul_precision"
    traits: ClassVar[Traits] = Traits(order=25, withdrawn=2, each_optimizer=True)

    precision: Precision = "high"

    def __post_init__(self) -> None:
        _check(self.precision)

    @property
    def rounding(self) -> float:
        """Half a unit in the last place of a factor."""
        return _ROUNDING[self.precision]

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that the device has no TF32, that nothing is in float32, or that the program has decided."""
        if not any(parameter.dtype is torch.float32 for parameter in model.parameters()):
            return "no parameter is in float32"
        device = next(model.parameters()).device
        if device.type not in ("cuda", "cpu") or (device.type == "cpu" and self.precision == "high"):
            return f"TF32 is a precision of CUDA devices, and the model is on {device.type}"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return "this GPU has no TF32, which begins with compute capability 8.0"
        return _of_program()

    def attach(self, target: Target) -> Attachment:
        """Set the precision of the process."""
        return lower_matmul_precision(self.precision)


def _check(precision: Any) -> None:
    if precision not in get_args(Precision):
        raise ValueError(f"precision={precision!r}: allowed are 'high' and 'medium'; choose one of them.")


def _is(precision: str) -> bool:
    try:
        return torch.get_float32_matmul_precision() == precision
    except RuntimeError:  # the program has set backends one by one
        return False


def _of_program() -> str | None:
    """Say which precision of products the program has set; None if it has set none."""
    found = {name: str(backend.fp32_precision) for name, backend in matmul_backends().items()}
    said = [f"torch.backends.{name}.fp32_precision is {value!r}" for name, value in found.items() if value != "none"]
    return f"the program has set the precision of float32 products ({' and '.join(said)})" if said else None
