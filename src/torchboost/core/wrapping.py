"""Recognise models that are wrapped by DDP, FSDP2 or ``torch.compile``, and optimizers that wrap other optimizers."""

from __future__ import annotations

import gc
import sys
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from torchboost.core.torch_private import calls_hooks, compiled_call, inside_compiled
from torchboost.distributed.topology import Topology
from torchboost.errors import IncompatibleError

Kind = TypeVar("Kind")


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


def parameters_of(*optimizers: Optimizer) -> list[Tensor]:
    """Return the parameters that optimizers hold, in the order of their groups."""
    return [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]


def wrapper_of(model: nn.Module) -> str | None:
    """Return the name of the wrapper of ``model``, or of the function applied in place, or None for a bare module."""
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel"
    if isinstance(model, DataParallel):
        return "DataParallel"
    if inside_compiled(model) is not None:
        return "torch.compile"
    for module in model.modules():
        if _is_of_fsdp(module, "FullyShardedDataParallel"):
            return "FullyShardedDataParallel"
        if _is_of_fsdp(module, "FSDPModule"):
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
    """Return the calls in ``model`` that are compiled in place, and the modules that compiling wrappers hold."""
    parts = (part for module in model.modules() for part in (compiled_call(module), inside_compiled(module)))
    return [part for part in parts if part is not None]


def is_compiled(model: nn.Module) -> bool:
    """Whether ``model`` or a part of it is compiled, in place or by a wrapper."""
    return bool(compiled_parts(model))


def sharded_units(model: nn.Module) -> list[Any]:
    """Return the modules of ``model`` that FSDP2 shards, ``FSDPModule`` each."""
    return [module for module in model.modules() if _is_of_fsdp(module, "FSDPModule")]


def _is_of_fsdp(module: nn.Module, name: str) -> bool:
    """``isinstance`` without importing the package, which saves 0.4 s: a class never imported has no instances."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, name))


def only_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the only DDP wrapper among a model and its modules, or None without one.

    Raises:
        IncompatibleError: There are several. They may average over different ranks and in different passes.
    """
    wrappers = {name: module for name, module in model.named_modules() if isinstance(module, DistributedDataParallel)}
    if len(wrappers) > 1:
        names = " and ".join(repr(name or "the model itself") for name in wrappers)
        raise IncompatibleError(
            f"{len(wrappers)} modules are wrapped by DistributedDataParallel, {names}; wrap the whole model once."
        )
    return next(iter(wrappers.values()), None)


def data_parallel(model: nn.Module, *, replicas: bool = False) -> DistributedDataParallel | None:
    """Return the DDP wrapper that a model is or contains, as in ``WithLoss(DDP(model))``, or None without one.

    Raises:
        IncompatibleError: The model is wrapped by FSDP1 or, unless ``replicas`` are allowed, by ``DataParallel``, whose
            gradient exchange cannot be replaced, or it contains several DDPs.
    """
    inside = inside_compiled(model)
    outer = model if inside is None else inside
    wrapper = wrapper_of(outer)
    if wrapper == "FullyShardedDataParallel" or (isinstance(outer, DataParallel) and not replicas):
        raise IncompatibleError(
            f"the model is wrapped by {wrapper}, which is not supported; use fully_shard (FSDP2) or "
            "DistributedDataParallel."
        )
    return only_ddp(outer)


def check_ranks(ddp: DistributedDataParallel, expected: range, advice: str) -> None:
    """Raise :class:`IncompatibleError` unless DDP averages over exactly these ranks. ``advice`` says what to do."""
    ranks = sorted(dist.get_process_group_ranks(ddp.process_group))
    if ranks != list(expected):
        raise IncompatibleError(f"DistributedDataParallel averages the gradients over {len(ranks)} ranks; {advice}")


def check_mesh(model: nn.Module, topology: Topology) -> None:
    """Raise :class:`IncompatibleError` if FSDP2 shards over other ranks than the node, or some parameters only."""
    meshes: dict[str, Any] = {n: getattr(p, "device_mesh", None) for n, p in unwrap(model).named_parameters()}
    if all(mesh is None for mesh in meshes.values()):
        return
    for name, mesh in meshes.items():
        if mesh is None or mesh.ndim != 1 or sorted(mesh.mesh.flatten().tolist()) != list(topology.node):
            place = "is not sharded" if mesh is None else f"lies on a mesh of shape {tuple(mesh.shape)}"
            raise IncompatibleError(
                f"the parameter '{name}' {place}, but FSDP2 must shard and average over the ranks of the node only, "
                "because AdaSum replaces the mean over nodes; pass fully_shard a one-dimensional mesh over the "
                f"{topology.devices_per_node} ranks of a node."
            )


def living(kind: type[Kind]) -> list[Kind]:
    """Return all objects of a class in this process.

    A last resort for two questions that torch does not answer: which optimizers hold a parameter, and which wrapper
    holds an optimizer. Objects that ``gc.freeze()`` has moved aside are missing.

    Cost: one pass over all objects of the garbage collector, about 0.1 s for a million.
    """
    # Not isinstance, which reads __class__ of proxies and runs their code.
    return [entry for entry in gc.get_objects() if issubclass(type(entry), kind)]
