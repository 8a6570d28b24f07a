"""Copy a model for tracing, so that the model itself is never run or changed."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.core.covering import is_our_hook
from torchboost.core.torch_private import module_hooks

__all__ = ["parameter_bytes", "twin"]

_NUMBERS_ELSEWHERE = 2**30
"""Above this many bytes of parameters, a copy that is only traced has no parameter memory."""


def twin(model: nn.Module, *, numbers: bool = True) -> nn.Module:
    """Return a deep copy in eval mode that computes what the forward of ``model`` itself computes.

    The copy is not compiled, and has neither the covers and hooks of this package nor Accelerate's mixed precision
    around ``forward``. Activations that the model keeps as attributes are detached from their graph.

    Args:
        model: A bare module; not changed.
        numbers: If False, the copy of a large model (over 1 GiB) has its parameters on the device ``meta``.

    Raises:
        TypeError: The model holds something that cannot be copied.
    """
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in _computed(model)}
    memo |= {id(hook): hook for hooks in _hooks(model) for hook in hooks.values() if is_our_hook(hook)}
    if not numbers and parameter_bytes(model) > _NUMBERS_ELSEWHERE:
        plain = [p for p in model.parameters() if type(p) is nn.Parameter]
        memo |= {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in plain}
    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:  # attributes of the user's modules may raise anything
        raise TypeError(
            f"this {type(model).__name__} cannot be copied ({type(error).__name__}: {error}); keep what cannot be "
            "copied outside the model."
        ) from error
    for hooks in _hooks(made):
        for key in [key for key, hook in hooks.items() if is_our_hook(hook)]:
            del hooks[key]
    for module in made.modules():
        _uncast(module)
    return made.eval()


def parameter_bytes(model: nn.Module) -> int:
    """Return the size of all parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _hooks(model: nn.Module) -> Iterator[dict[int, Any]]:
    for module in model.modules():
        yield from module_hooks(module)


def _computed(model: nn.Module) -> Iterator[Tensor]:
    """Yield tensors with an autograd history that modules keep as attributes; torch refuses to copy those."""
    for module in model.modules():
        for value in vars(module).values():
            yield from _with_history(value)


def _with_history(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not value.is_leaf:
            yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _with_history(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _with_history(entry)


def _uncast(module: nn.Module) -> None:
    """Remove Accelerate's mixed precision from the forward of a module in a copy.

    Accelerate sets a ``forward`` on the instance that enters autocast and casts the outputs, and stores the original
    one. Its own function for the removal follows ``__wrapped__`` through all inner wrappers too.
    """
    operations = sys.modules.get("accelerate.utils.operations")
    forward = vars(module).get("forward")
    function = getattr(forward, "__func__", forward)
    casting = getattr(function, "__wrapped__", None)
    if operations is None or not isinstance(casting, operations.ConvertOutputsToFp32):
        return
    del module.forward
    beneath = vars(module).pop("_original_forward", None)
    if isinstance(beneath, types.MethodType) and beneath.__self__ is module:
        if beneath.__func__ is not type(module).forward:
            module.forward = beneath
    elif beneath is not None:
        module.forward = beneath
