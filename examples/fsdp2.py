"""FSDP2 at level O1, with a checkpoint after every epoch that any number of ranks can resume.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py out/fsdp2  # run it again to continue
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import torchboost
from torchboost import checkpoint


def train(folder: Path, epochs: int, batch: int = 64) -> float:
    """Train so many epochs more, and return the last loss."""
    rank, ranks, loss = dist.get_rank(), dist.get_world_size(), torch.nan
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) / 16
    torch.manual_seed(0)  # the same on every rank
    conv, norm = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
    model = nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10))
    config = {"extra": {"channels_last": False}}  # FSDP2 shards contiguous tensors only
    plan = torchboost.prepare(model, level="O1", config=config)  # 1. change the modules
    mesh = init_device_mesh("cpu", (ranks,))  # by default FSDP2 uses an accelerator
    fully_shard(model, mesh=mesh)  # 2. shard
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # 3. build the optimizer over the shards
    target = torchboost.Target(model, optimizer)
    attached = plan.fit(model, optimizer).attach(target)  # 4. attach to the loop
    step = torchboost.TrainStep(target, lambda x, y: F.cross_entropy(model(x), y), attached=attached)

    done = 0
    if newest := checkpoint.latest(folder):
        done = int(newest.name)
        checkpoint.load(newest, model, optimizer, boost=step)
    for epoch in range(done, done + epochs):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(batch):
            loss = float(step(images[rows[rank::ranks]], labels[rows[rank::ranks]]).loss)
        checkpoint.save(folder, epoch + 1, model, optimizer, boost=step)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss of the last batch {loss:.3f}", flush=True)
    return loss


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), epochs=2)
    torchboost.shutdown()


# It prints, on one busy core of a CPU:
#
#     epoch 1: loss of the last batch 0.031
#     epoch 2: loss of the last batch 0.050
