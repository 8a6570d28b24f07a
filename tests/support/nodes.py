"""Ranks in nodes: wrap and train on them, and what AdaSum must give there, computed in one process in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

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

__all__ = ["On", "batch_of", "formula", "fresh", "node_wrapped", "simulated", "tensors", "train"]

On = Literal["delta", "gradient"]
Make = Callable[[], nn.Module]


def fresh(make: Make = mlp) -> nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return make()


def batch_of(rank: int, step: int, model: nn.Module | None = None, size: int = 6) -> tuple[Tensor, Tensor]:
    """Return the batch of one rank; every rank and step has its own."""
    return batch_for(mlp() if model is None else model, torch.Generator().manual_seed(100 * step + rank), size)


def node_wrapped(model: nn.Module, how: str, on: On, per_node: int, **ddp: Any) -> nn.Module:
    """Wrap a model so that gradients are averaged where the form needs it: ``"bare"``, ``"ddp"`` or ``"fsdp"``."""
    if how == "ddp":
        group = None if on == "gradient" else NodeGroups.of(Topology.current(per_node)).inside
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
    on: On,
    nodes: int,
    per_node: int,
    steps: int,
    optimizer_of: Callable[[list[nn.Parameter]], Optimizer],
    *,
    make: Make = mlp,
    units: Sequence[Sequence[int]] | None = None,
    micro: int = 1,
) -> list[list[float]]:
    """Return the weights after ``steps`` updates on ranks in nodes, computed one after another in float64.

    Args:
        on: What is combined.
        nodes: Number of nodes.
        per_node: Ranks per node.
        steps: Number of updates.
        optimizer_of: Makes the optimizer of a node.
        make: Makes the model.
        units: Positions of the parameters that share a dot product; each has its own where None.
        micro: Batches per update.
    """
    like = fresh(make)
    models = [copy.deepcopy(like).double() for _ in range(nodes)]
    params = [list(model.parameters()) for model in models]
    optimizers = [optimizer_of(held) for held in params]
    units = units if units is not None else [[i] for i in range(len(params[0]))]
    for step in range(steps):
        for node, model in enumerate(models):
            for rank in range(node * per_node, (node + 1) * per_node):
                for part in range(micro):
                    x, y = batch_of(rank, step * micro + part, like)
                    x = x.double() if x.is_floating_point() else x
                    (F.cross_entropy(model(x), y) / (per_node * micro)).backward()
        if on == "gradient":
            summed = _combined([[param.grad for param in held] for held in params], units)  # pyright: ignore
            for held in params:
                for param, gradient in zip(held, summed, strict=True):
                    param.grad = gradient.clone()
        old = [param.detach().clone() for param in params[0]]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if on == "delta":
            summed = _combined([[o - p.detach() for o, p in zip(old, held, strict=True)] for held in params], units)
            for held in params:
                for param, before, delta in zip(held, old, summed, strict=True):
                    param.data = before - delta
    return tensors(models[0])


def _combined(by_node: list[list[Tensor]], units: Sequence[Sequence[int]]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for unit in units:
        flat = formula([torch.cat([vectors[i].flatten() for i in unit]) for vectors in by_node])
        parts = flat.split([by_node[0][i].numel() for i in unit])
        found |= {i: part.view_as(by_node[0][i]) for i, part in zip(unit, parts, strict=True)}
    return [found[i] for i in range(len(found))]
