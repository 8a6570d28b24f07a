"""Ranks in nodes: wrap and train on them, and what AdaSum must give there, computed in one process in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.support.models import batch_for, mlp
from torchboost.distributed.topology import NodeGroups, Topology

__all__ = ["batch_of", "formula", "fresh", "node_wrapped", "simulated", "tensors", "train"]

Make = Callable[[], nn.Module]


def fresh(make: Make = mlp) -> nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return make()


def batch_of(rank: int, step: int, model: nn.Module | None = None, size: int = 6) -> tuple[Tensor, Tensor]:
    """Return the batch of one rank; every rank and step has its own."""
    return batch_for(mlp() if model is None else model, torch.Generator().manual_seed(100 * step + rank), size)


def node_wrapped(model: nn.Module, how: str, per_node: int, **ddp: Any) -> nn.Module:
    """Wrap a model so that gradients are averaged inside the node: ``"bare"``, ``"ddp"`` or ``"fsdp"``."""
    if how == "ddp":
        group = NodeGroups.of(Topology.current(per_node)).inside
        return DistributedDataParallel(model, process_group=group, **ddp)
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size() // per_node, per_node), mesh_dim_names=("node", "shard"))
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh["shard"])
        return fully_shard(model, mesh=mesh["shard"])
    return model


def train(model: nn.Module, optimizer: Optimizer, steps: int, first: int = 0, like: nn.Module | None = None) -> None:
    """Train this rank on its own batches."""
    for step in range(first, first + steps):
        x, y = batch_of(dist.get_rank(), step, like)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors(model: nn.Module) -> list[list[float]]:
    """Return every parameter, gathered from its shards; numbers pickle without shared memory."""
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]  # pyright: ignore
    return [param.detach().flatten().tolist() for param in full]


def formula(vectors: Sequence[Tensor]) -> Tensor:
    """Return the published sum of the vectors of 1, 2 or 4 nodes, in float64."""
    sides = [vector.double() for vector in vectors]
    while len(sides) > 1:
        assert len(sides) % 2 == 0
        sides = [_pair(a, b) for a, b in zip(sides[::2], sides[1::2], strict=True)]
    return sides[0]


def _pair(a: Tensor, b: Tensor) -> Tensor:
    product = (a * b).sum()
    left, right = (a * a).sum(), (b * b).sum()
    return (1 - product / (2 * left) if left else 1.0) * a + (1 - product / (2 * right) if right else 1.0) * b


def simulated(
    nodes: int,
    per_node: int,
    steps: int,
    optimizer_of: Callable[[list[nn.Parameter]], Optimizer],
    *,
    make: Make = mlp,
    micro: int = 1,
) -> list[list[float]]:
    """Return the weights after ``steps`` updates on ranks in nodes, computed one after another in float64.

    Args:
        nodes: Number of nodes.
        per_node: Ranks per node.
        steps: Number of updates.
        optimizer_of: Makes the optimizer of a node.
        make: Makes the model.
        micro: Batches per update.
    """
    like = fresh(make)
    models = [copy.deepcopy(like).double() for _ in range(nodes)]
    params = [list(model.parameters()) for model in models]
    optimizers = [optimizer_of(held) for held in params]
    for step in range(steps):
        for node, model in enumerate(models):
            for rank in range(node * per_node, (node + 1) * per_node):
                for part in range(micro):
                    x, y = batch_of(rank, step * micro + part, like)
                    x = x.double() if x.is_floating_point() else x
                    (F.cross_entropy(model(x), y) / (per_node * micro)).backward()
        old = [param.detach().clone() for param in params[0]]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for place, before in enumerate(old):
            summed = formula([before - held[place].detach() for held in params])
            for held in params:
                held[place].data = before - summed
    return tensors(models[0])
