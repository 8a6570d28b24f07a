"""Ray Train at level O2, with two workers on this machine.

pip install "ray[train]"
python examples/ray_train.py out/ray
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig, get_context, report
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch.nn import functional as F

import torchboost
from torchboost.workloads.data import digits
from torchboost.workloads.models import Bottleneck, ResNet


def train(settings: dict[str, Any]) -> None:
    """Run on every worker, in the process group that Ray has made."""
    rank, ranks, data = get_context().get_world_rank(), get_context().get_world_size(), digits(8)
    updates = settings["epochs"] * data.steps(64)
    torch.manual_seed(0)  # the same on every rank
    model = ResNet(Bottleneck, [1, 1, 1], width=16, classes=10, in_channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    boosted = torchboost.boost(model, optimizer, level="O2", total_steps=updates)  # 1. boost
    wrapped = prepare_model(model)  # 2. let Ray wrap it in DistributedDataParallel
    for epoch in range(settings["epochs"]):
        for images, labels in data.train(64, seed=0, epoch=epoch):
            F.cross_entropy(wrapped(images[rank::ranks]), labels[rank::ranks]).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    wrapped.eval()
    with torch.no_grad():
        right = sum((wrapped(x).argmax(1) == y).sum() for x, y in data.test(60))
    dist.broadcast(right, 0)  # each rank has its own BatchNorm statistics; DDP trains with rank 0's
    with tempfile.TemporaryDirectory() as folder:
        torch.save(wrapped.module.state_dict(), Path(folder) / "weights.pt")
        found = {"right": int(right) / len(data.test_labels), "on": boosted.explain()}
        report(found, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def main(folder: str = "out/ray") -> float:
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": 6},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),  # the model stays on the CPU
        run_config=RunConfig(storage_path=str(Path(folder).resolve())),
    )
    metrics = trainer.fit().metrics or {}
    ray.shutdown()
    print(metrics["on"])
    print(f"{metrics['right']:.1%} of the test images right")
    return metrics["right"]


if __name__ == "__main__":
    main(*sys.argv[1:])
