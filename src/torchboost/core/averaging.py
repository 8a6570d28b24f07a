"""Find the ranks over which a wrapped model averages its gradients. AdaSum across nodes needs them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from torchboost.core.torch_private import all_reduce_hooks, inside_compiled
from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.distributed.topology import Topology
from torchboost.errors import IncompatibleError

__all__ = ["check_mesh", "check_ranks", "data_parallel", "only_ddp", "sharded_units"]


def data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP wrapper that a model is or contains, as in ``WithLoss(DDP(model))``; None without one.

    Raises:
        IncompatibleError: The model is wrapped by FSDP1 or ``DataParallel``, whose gradient exchange cannot be
            replaced, or it contains several DDPs.
    """
    inside = inside_compiled(model)
    outer = model if inside is None else inside
    wrapper = wrapper_of(outer)
    if wrapper == "FullyShardedDataParallel" or isinstance(outer, DataParallel):
        raise IncompatibleError(
            f"the model is wrapped by {wrapper}, which is not supported; use DistributedDataParallel or fully_shard "
            "(FSDP2)."
        )
    return only_ddp(outer)


def only_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the only DDP wrapper among a model and its modules; None without one.

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


def check_ranks(ddp: DistributedDataParallel, expected: range, advice: str) -> None:
    """Raise :class:`IncompatibleError` unless DDP averages over exactly these ranks. ``advice`` says what to do."""
    ranks = sorted(dist.get_process_group_ranks(ddp.process_group))
    if ranks != list(expected):
        raise IncompatibleError(f"DistributedDataParallel averages the gradients over {len(ranks)} ranks; {advice}")


def check_mesh(model: nn.Module, topology: Topology) -> bool:
    """Return whether FSDP2 shards the model.

    Raises:
        IncompatibleError: The mesh has other ranks than the node, or some parameters are not sharded.
    """
    meshes: dict[str, Any] = {n: getattr(p, "device_mesh", None) for n, p in unwrap(model).named_parameters()}
    if all(mesh is None for mesh in meshes.values()):
        return False
    for name, mesh in meshes.items():
        if mesh is None or mesh.ndim != 1 or sorted(mesh.mesh.flatten().tolist()) != list(topology.node):
            place = "is not sharded" if mesh is None else f"lies on a mesh of shape {tuple(mesh.shape)}"
            raise IncompatibleError(
                f"the parameter '{name}' {place}, but FSDP2 must shard and average over the ranks of the node only, "
                "because AdaSum replaces the mean over nodes; pass fully_shard a one-dimensional mesh over the "
                f"{topology.devices_per_node} ranks of a node."
            )
    return True


def sharded_units(model: nn.Module) -> dict[str, Any]:
    """Return the FSDP2 modules that own parameters, by name.

    Raises:
        IncompatibleError: A module already has an all-reduce hook, or its parameters are on several meshes.
    """
    units = {}
    for name, module in unwrap(model).named_modules():
        if not hasattr(module, "set_all_reduce_hook"):
            continue
        hooks = all_reduce_hooks(module)
        if len(hooks) > 1 or any(hook is not None for hook in hooks):
            raise IncompatibleError(
                f"the FSDP2 unit '{name or 'root'}' already has an all-reduce hook, or parameters on several meshes; "
                "remove the hook with set_all_reduce_hook(None), or use on='delta'."
            )
        if hooks:
            units[name or "root"] = module
    return units
