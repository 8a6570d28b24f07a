"""One process, DDP or FSDP2: wrap a model, train this rank's share of the same batches, read all weights."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import batch_for
from torchboost.core.algorithm import Target

__all__ = ["Kind", "all_weights", "train_share", "wrap"]

Kind = Literal["single", "ddp", "fsdp"]


def wrap(model: nn.Module, kind: Kind, **ddp: Any) -> nn.Module:
    """Return the model as it is, inside DDP with the options ``ddp``, or sharded in place."""
    if kind == "ddp":
        return DistributedDataParallel(model, **ddp)
    return fully_shard(model) if kind == "fsdp" else model


def train_share(target: Target, model: nn.Module, *, steps: int = 3, size: int = 8) -> list[Tensor]:
    """Train on equal shares of ``size`` samples per step, all of them where there is no group; return the outputs.

    Args:
        target: What trains.
        model: The model inside, which knows what its inputs look like.
        steps: Number of batches.
        size: Samples per batch, over all ranks.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = slice(size // ranks * rank, size // ranks * (rank + 1))
    seen = []
    for step in range(steps):
        inputs, labels = batch_for(model, torch.Generator().manual_seed(step), size)
        seen.append(target.model(inputs[share]))
        F.cross_entropy(seen[-1], labels[share]).backward()
        target.optimizer.step()
        target.optimizer.zero_grad()
    return [outputs.detach() for outputs in seen]


def all_weights(model: nn.Module) -> list[float]:
    """Return every weight, gathered from all shards; numbers pickle without shared memory."""
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]  # pyright: ignore
    return torch.cat([p.detach().flatten() for p in full]).tolist()
