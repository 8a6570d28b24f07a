"""Over which ranks a wrapped model averages its gradients, as AdaSum across nodes needs to know."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.distributed.topology import Topology
from torchboost.errors import IncompatibleError

__all__ = ["check_mesh", "check_ranks", "data_parallel", "only_ddp", "sharded_units"]


def data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP wrapper of a model as the loop calls it, or the one inside it, as in ``WithLoss(DDP(model))``.

    Raises:
        IncompatibleError: FSDP1 or ``DataParallel``, whose exchange of gradients cannot be replaced; several DDPs.
    """
    outer = model.get_submodule("_orig_mod") if wrapper_of(model) == "torch.compile" else model
    wrapper = wrapper_of(outer)
    if wrapper == "FullyShardedDataParallel" or isinstance(outer, DataParallel):
        raise IncompatibleError(
            f"the model is wrapped by {wrapper}, which this does not know; use DistributedDataParallel or fully_shard "
            "(FSDP2)."
        )
    return only_ddp(outer)


def only_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP wrapper that a model is, or that is inside it.

    Raises:
        IncompatibleError: There are several, which may average over different ranks and at different passes.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, DistributedDataParallel)}
    if len(found) > 1:
        names = " and ".join(repr(name or "the model itself") for name in found)
        raise IncompatibleError(
            f"{len(found)} modules are wrapped by DistributedDataParallel, {names}; wrap the whole model in one."
        )
    return next(iter(found.values()), None)


def check_ranks(ddp: DistributedDataParallel, wanted: range, advice: str) -> None:
    """Raise :class:`IncompatibleError` unless DDP averages over just these ranks; ``advice`` says what to do."""
    found = sorted(dist.get_process_group_ranks(ddp.process_group))
    if found != list(wanted):
        raise IncompatibleError(f"DistributedDataParallel averages the gradients over {len(found)} ranks; {advice}")


def check_mesh(model: nn.Module, topology: Topology) -> bool:
    """Return whether FSDP2 shards the model.

    Raises:
        IncompatibleError: It does so over other ranks than those of the node, or leaves parameters out.
    """
    meshes: dict[str, Any] = {n: getattr(p, "device_mesh", None) for n, p in unwrap(model).named_parameters()}
    if all(mesh is None for mesh in meshes.values()):
        return False
    for name, mesh in meshes.items():
        if mesh is None or mesh.ndim != 1 or sorted(mesh.mesh.flatten().tolist()) != list(topology.node):
            found = "is not sharded" if mesh is None else f"lies on a mesh of shape {tuple(mesh.shape)}"
            raise IncompatibleError(
                f"the parameter '{name}' {found}, but FSDP2 must shard and average over the ranks of the node alone, "
                "as AdaSum takes the place of the mean over nodes; give fully_shard a mesh of one dimension over the "
                f"{topology.devices_per_node} ranks of a node."
            )
    return True


def sharded_units(model: nn.Module) -> dict[str, Any]:
    """Return by name the FSDP2 modules that have parameters of their own.

    Raises:
        IncompatibleError: One of them has an all-reduce hook already, or parameters on several meshes.
    """
    units = {}
    for name, module in unwrap(model).named_modules():
        if not hasattr(module, "set_all_reduce_hook"):
            continue
        # torch has no public way to ask for the hook; setting one would silently replace it.
        groups = module._get_fsdp_state()._fsdp_param_groups  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        if len(groups) > 1 or any(group._all_reduce_hook is not None for group in groups):
            raise IncompatibleError(
                f"the FSDP2 unit '{name or 'root'}' has an all-reduce hook already, or parameters on several meshes; "
                "take the hook away with set_all_reduce_hook(None), or use on='delta'."
            )
        if groups:
            units[name or "root"] = module
    return units
