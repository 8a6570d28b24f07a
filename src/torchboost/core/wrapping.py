"""Recognise models that are wrapped by DDP, FSDP2 or ``torch.compile``, and optimizers that wrap other optimizers."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from torchboost.core.torch_private import calls_hooks, compiled_call, inside_compiled
from torchboost.errors import IncompatibleError

__all__ = ["already_wrapped", "compiled_parts", "hookable", "is_compiled", "sharded_units", "unwrap", "wrapper_of"]


def hookable(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that calls hooks: ``optimizer``, or the one that it wraps.

    ``AcceleratedOptimizer`` of Accelerate and ``Lookahead`` of timm do not call ``Optimizer.__init__``, which creates
    the hook registries and makes ``step`` call them. Their ``step`` calls the ``step`` of an inner optimizer.

    Raises:
        IncompatibleError: The optimizer does not call hooks and does not hold exactly one inner optimizer.
    """
    while not calls_hooks(optimizer):
        inside = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
        if len(inside) != 1:
            raise IncompatibleError(
                f"{type(optimizer).__name__} does not call the hooks of torch.optim (its __init__ does not call "
                f"super().__init__()) and holds {len(inside)} optimizers. Pass the optimizer whose step updates the "
                "weights, or call super().__init__() in your class."
            )
        optimizer = inside[0]
    return optimizer


def wrapper_of(model: nn.Module) -> str | None:
    """Return the name of the wrapper of ``model``, or of what was applied in place; None for a bare module."""
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel"
    if isinstance(model, DataParallel):
        return "DataParallel"
    if inside_compiled(model) is not None:
        return "torch.compile"
    for module in model.modules():
        if _is_instance(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            return "FullyShardedDataParallel"
        if _is_instance(module, "torch.distributed.fsdp", "FSDPModule"):
            return "fully_shard"
        if compiled_call(module) is not None:
            return "nn.Module.compile"
    return None


def already_wrapped(name: str, wrapper: str, caller: str) -> IncompatibleError:
    """Return the error for a model that must be changed, and is wrapped: how the lines must follow each other."""
    if wrapper in ("fully_shard", "FullyShardedDataParallel"):
        remedy = (
            f"call plan = torchboost.prepare({name}, ...) before that, build the optimizer after it, then call "
            f"plan.attach(torchboost.Target({name}, optimizer))."
        )
    else:
        remedy = (
            f"move the line with {caller}(...) before the line that wraps it: pass the bare {name}, and wrap what is "
            "returned."
        )
    return IncompatibleError(f"the {name} is already wrapped by {wrapper}; {remedy}")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module inside any nesting of DDP, ``DataParallel`` and ``torch.compile``."""
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif (inside := inside_compiled(model)) is not None:
            model = inside
        else:
            return model


def compiled_parts(model: nn.Module) -> list[Any]:
    """Return what ``model`` and its parts call if they are compiled in place, and what compiling wrappers wrap."""
    found = (part for module in model.modules() for part in (compiled_call(module), inside_compiled(module)))
    return [part for part in found if part is not None]


def is_compiled(model: nn.Module) -> bool:
    """Whether ``model`` or a part of it is compiled, in place or by a wrapper."""
    return bool(compiled_parts(model))


def sharded_units(model: nn.Module) -> list[Any]:
    """Return the modules of ``model`` that FSDP2 shards, ``FSDPModule`` each."""
    return [module for module in model.modules() if _is_instance(module, "torch.distributed.fsdp", "FSDPModule")]


def _is_instance(module: nn.Module, package: str, name: str) -> bool:
    """``isinstance`` without importing ``package``, which saves 0.4 s: a class never imported has no instances."""
    loaded = sys.modules.get(package)
    return loaded is not None and isinstance(module, getattr(loaded, name))
