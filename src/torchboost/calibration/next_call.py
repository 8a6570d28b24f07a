"""Look at the inputs of the next training call of a model. Calls after it cost nothing."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.calibration.passes import Call
from torchboost.core.containers import tensors_in
from torchboost.core.torch_private import (
    Interceptor,
    compiled_call,
    has_saved_tensor_hooks,
    inside_function_transform,
    inside_mode,
    interceptor_of,
    is_tracing,
    set_compiled_call,
)

__all__ = ["Gate", "entries_in", "is_training_call", "shapes_of"]


class Gate(Interceptor):
    """Stands in front of a model and shows each call to ``meet``, until that returns True. The call then runs.

    While ``meet`` runs, calls from other threads wait, and calls from its own thread pass. If it raises, the gate
    stays. Copies and pickles of the model do not have it, and it goes with the object of ``meet``.

    Args:
        model: The bare model. An interceptor that answered its calls is replaced. If it is compiled in place, it stays
            so.
        meet: A method, called with the arguments of a call before it runs. Its object is not kept alive.
        keep: What lives as long as the gate.

    Cost: one call of a Python function per call until then, and ``meet``.
    """

    def __init__(self, model: nn.Module, meet: Callable[[Call], bool], *, keep: object = None) -> None:
        self._model, self._meet, self._keep = model, weakref.WeakMethod(meet), keep
        self._lock, self._meets = threading.RLock(), False
        self.compiled = compiled_call(model)
        set_compiled_call(model, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the model."""
        if torch.compiler.is_compiling():
            return self.pass_on(self._model, *args, **kwargs)
        with self._lock:
            if self._stands and not self._meets:
                self._meets = True
                try:
                    meet = self._meet()
                    if meet is None or meet((args, kwargs)):
                        self.remove()
                finally:
                    self._meets = False
        if self._stands:
            return self.pass_on(self._model, *args, **kwargs)
        return self._model(*args, **kwargs)

    def remove(self) -> None:
        """Put back what was there before. A second call does nothing."""
        if self._stands:
            set_compiled_call(self._model, self.compiled)

    @property
    def _stands(self) -> bool:
        return interceptor_of(self._model) is self


def is_training_call(model: nn.Module, call: Call) -> bool:
    """Whether a call computes gradients in training mode, on plain tensors, outside compilers and tracers.

    A call inside ``torch.utils.checkpoint``, whose hooks would count the tensors that a trial saves, is none. Neither
    is one inside a transform of ``torch.func`` or a mode such as ``FlopCounterMode``, which would count the passes of a
    trial, or with other tensors in place of the parameters.
    """
    if torch.compiler.is_compiling() or is_tracing() or not torch.is_grad_enabled() or not model.training:
        return False
    if has_saved_tensor_hooks() or inside_function_transform() or inside_mode():
        return False
    if not all(isinstance(parameter, nn.Parameter) for parameter in model.parameters()):
        return False
    return all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors_in(list(call)))


def entries_in(call: Call) -> int:
    """Return how many entries the tensors of a call have together."""
    return sum(tensor.numel() for tensor in tensors_in(list(call)))


def shapes_of(call: Call) -> list[tuple[torch.Size | int, torch.dtype]]:
    """Return shape and precision of each tensor of a call."""
    return [(t.shape if not t.is_nested else t.numel(), t.dtype) for t in tensors_in(list(call))]
