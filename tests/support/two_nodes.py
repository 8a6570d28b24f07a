"""A rank of a job on two nodes: say what the topology is, train, write the weights: ``two_nodes.py FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.models import mlp
from tests.support.wrapped import Kind, all_weights, train_share, wrap
from torchboost.algorithms.gradient_centralization import GradientCentralization
from torchboost.core.algorithm import Target, attach_all
from torchboost.distributed.topology import Topology, shutdown

__all__ = ["trained"]


def trained(kind: Kind) -> list[float]:
    """Train three steps with gradient centralisation and return the weights."""
    torch.manual_seed(0)
    model = mlp()
    wrapped = wrap(model, kind)
    target = Target(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9))
    attach_all(target, [GradientCentralization()])
    train_share(target, model)
    return all_weights(wrapped)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    here = Topology.current()
    seen = {
        "rank": here.rank,
        "world_size": here.world_size,
        "devices_per_node": here.devices_per_node,
        "nodes": here.nodes,
        "ddp": trained("ddp"),
        "fsdp": trained("fsdp"),
    }
    (Path(sys.argv[1]) / f"{here.rank}.json").write_text(json.dumps(seen))
    shutdown()
