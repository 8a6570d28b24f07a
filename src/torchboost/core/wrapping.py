"""Recognise models that were already handed to DDP, FSDP2 or ``torch.compile``."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

__all__ = ["is_compiled", "unwrap", "wrapper_of"]


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
