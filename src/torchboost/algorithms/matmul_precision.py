"""Lower precision inside float32 matrix products: TF32 on CUDA devices, bfloat16 on CPUs with AMX."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.hardware import matmul_backends, matmul_precision
from torchboost.errors import warn_no_effect

Precision = Literal["high", "medium"]
_ROUNDING = {"high": 2.0**-11, "medium": 2.0**-8}


def lower_matmul_precision(precision: Precision = "high") -> Attachment:
    """Let the float32 matrix products of this process round their factors, forward and backward.

    Calls ``torch.set_float32_matmul_precision``. The setting belongs to the process: other models follow it too. A
    precision that the program has set, by any of torch's switches, is kept. Convolutions are not affected: cuDNN
    computes them in TF32 unless the program says otherwise.

    Args:
        precision: ``"high"``: TF32 on CUDA devices, factors of 11 bits. ``"medium"``: bfloat16 on CPUs with AMX,
            factors of 8 bits, and TF32 on CUDA devices.

    Returns:
        Its ``remove()`` restores the state from before. If others hold this precision too, the last one does so. A
        precision that the program has set meanwhile is kept.

    Raises:
        ValueError: Another precision.

    Warns:
        NoEffectWarning: The program has set another precision, or this was called with another one. It is kept.

    Example:
        >>> import torch
        >>> with lower_matmul_precision("high"):
        ...     torch.get_float32_matmul_precision()
        'high'
        >>> torch.get_float32_matmul_precision()
        'highest'
    """
    _check(precision)
    if matmul_precision()[0] == precision and not _HOLDERS:
        return Attachment()
    chosen = _taken(precision)
    if chosen is not None:
        warn_no_effect(f"matmul_precision: {chosen}; it stays")
        return Attachment()
    return _Lowered(precision)


class _Lowered(Attachment):
    """Holds the precision of this process, with others like it. The last one to be removed restores it."""

    def __init__(self, precision: Precision) -> None:
        if not any(map(_Lowered.in_force, _HOLDERS)):
            _HOLDERS.clear()  # the program has set another precision since, and taken it back
            torch.set_float32_matmul_precision(precision)
        self.precision, (_, self._left) = precision, matmul_precision()
        super().__init__(undo=self._restore)
        _HOLDERS.add(self)

    def in_force(self) -> bool:
        """Whether the program has changed nothing since."""
        return matmul_precision() == (self.precision, self._left)

    def _restore(self) -> None:
        _HOLDERS.discard(self)
        process_wide, now = matmul_precision()
        if _HOLDERS or process_wide not in (self.precision, None):
            return
        torch.set_float32_matmul_precision("highest")
        for name, backend in matmul_backends().items():  # as untouched: "highest" would count as set
            backend.fp32_precision = "none" if now[name] == self._left[name] else now[name]


# The precision belongs to the process, and so does who holds it.
_HOLDERS: weakref.WeakSet[_Lowered] = weakref.WeakSet()


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
        """Explain that the device has no TF32, that nothing is in float32, or that another precision is set."""
        if not any(parameter.dtype is torch.float32 for parameter in model.parameters()):
            return "no parameter is in float32"
        device = next(model.parameters()).device
        if device.type not in ("cuda", "cpu") or (device.type == "cpu" and self.precision == "high"):
            return f"TF32 is a precision of CUDA devices, and the model is on {device.type}"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return "this GPU has no TF32, which begins with compute capability 8.0"
        return _taken(self.precision)

    def attach(self, target: Target) -> Attachment:
        """Set the precision of the process."""
        return lower_matmul_precision(self.precision)


def _check(precision: Any) -> None:
    if precision not in get_args(Precision):
        raise ValueError(f"precision={precision!r}: allowed are 'high' and 'medium'; choose one of them.")


def _taken(precision: str) -> str | None:
    """Name a precision of products that is set and must be kept, or None if there is none, or all hold this one."""
    for held in filter(_Lowered.in_force, _HOLDERS):
        return None if held.precision == precision else f"another model has set precision={held.precision!r}"
    by_backend = matmul_precision()[1]
    said = [f"torch.backends.{name}.fp32_precision is {v!r}" for name, v in by_backend.items() if v != "none"]
    return f"the program has set the precision of float32 products ({' and '.join(said)})" if said else None
