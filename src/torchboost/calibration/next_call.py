"""Look at the inputs of the next training call of a model. Calls after it cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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
from torchboost.graph.recording import tensors_in

__all__ = ["NextCall", "entries_in", "is_training_call"]


class NextCall(Interceptor):
    """Counts the entries of the inputs of the next training call. The call then runs as if nothing had been there.

    Calls that :func:`is_training_call` does not count pass through. Copies and pickles of the model do not have it.

    Args:
        model: The bare model. No other interceptor may answer its calls. If it is compiled in place, it stays so.
        seen: Called with the number of entries, before the call runs.

    Cost: one call of a Python function per call until then, and one look at the inputs.
    """

    def __init__(self, model: nn.Module, seen: Callable[[int], None]) -> None:
        self._model, self._seen = model, seen
        self.compiled = compiled_call(model)
        set_compiled_call(model, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the model."""
        if is_training_call(self._model, args, kwargs):
            self.remove()
            self._seen(entries_in(args, kwargs))
            return self._model(*args, **kwargs)
        return self.pass_on(self._model, *args, **kwargs)

    def remove(self) -> None:
        """Put back what was there before. A second call does nothing."""
        if interceptor_of(self._model) is self:
            set_compiled_call(self._model, self.compiled)


def is_training_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
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
    return all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors_in([args, kwargs]))


def entries_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return how many entries the tensors of a call have together."""
    return sum(tensor.numel() for tensor in tensors_in([args, kwargs]))
