"""Recognise models that were already handed to DDP, FSDP2 or ``torch.compile``, and optimizers inside of others."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from torchboost.errors import IncompatibleError

__all__ = ["hookable", "is_compiled", "unwrap", "wrapper_of"]

_REGISTRIES = (
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_post_hooks"),
    *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
)


def hookable(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer whose hooks are called: ``optimizer``, or the one that it wraps.

    ``AcceleratedOptimizer`` of Accelerate and ``Lookahead`` of timm are optimizers by class only: they do not call
    ``Optimizer.__init__``, which makes the registries of the hooks and lets ``step`` call them, but the ``step`` of
    an optimizer that they hold.

    Raises:
        IncompatibleError: No hook would be called, and there is not exactly one optimizer inside.
    """
    while not _calls_hooks(optimizer):
        inside = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
        if len(inside) != 1:
            raise IncompatibleError(
                f"{type(optimizer).__name__} calls no hooks of torch.optim (its __init__ does not call "
                f"super().__init__()) and holds {len(inside)} optimizers; give the optimizer whose step moves the "
                "weights, or call super().__init__() in yours."
            )
        optimizer = inside[0]
    return optimizer


def _calls_hooks(optimizer: Optimizer) -> bool:
    # Optimizer.__init__ replaces the step of the class by one that calls the hooks, and marks it so.
    marked = getattr(type(optimizer).step, "hooked", False)
    return bool(marked) and all(name in vars(optimizer) for name in _REGISTRIES)


def wrapper_of(model: nn.Module) -> str | None:
    """Name what wraps ``model`` (or was applied to it in place), or return None for a bare module."""
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel"
    if isinstance(model, DataParallel):
        return "DataParallel"
    if _is_instance(model, "torch._dynamo", "OptimizedModule"):
        return "torch.compile"
    for module in model.modules():
        if _is_instance(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            return "FullyShardedDataParallel"
        if _is_instance(module, "torch.distributed.fsdp", "FSDPModule"):
            return "fully_shard"
        if module._compiled_call_impl is not None:
            return "nn.Module.compile"
    return None


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module inside DDP, ``DataParallel`` or ``torch.compile``, however nested."""
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif _is_instance(model, "torch._dynamo", "OptimizedModule"):
            model = model.get_submodule("_orig_mod")
        else:
            return model


def is_compiled(model: nn.Module) -> bool:
    """Whether ``model`` or a part of it is compiled, in place or by a wrapper."""
    return any(
        module._compiled_call_impl is not None or _is_instance(module, "torch._dynamo", "OptimizedModule")
        for module in model.modules()
    )


def _is_instance(module: nn.Module, package: str, name: str) -> bool:
    """``isinstance`` without importing ``package``: a class never imported has no instances (saves 0.4 s of import)."""
    loaded = sys.modules.get(package)
    return loaded is not None and isinstance(module, getattr(loaded, name))
