"""FSDP2 at level O1, with a checkpoint during the run that any number of ranks can resume.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py out/fsdp2  # run it again to resume
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import torchboost
from torchboost.distributed import checkpoint
from torchboost.distributed.topology import shutdown
from torchboost.workloads.data import digits
from torchboost.workloads.models import Bottleneck, ResNet


class Job:
    def __init__(self) -> None:
        torch.manual_seed(0)  # the same on every rank
        self.model: nn.Module = ResNet(Bottleneck, [1, 1, 1], width=16, classes=10, in_channels=1)
        config = {"extra": {"channels_last": False}}  # FSDP2 shards contiguous tensors only
        plan = torchboost.Plan.of("O1", config, torchboost.Facts.measure(self.model))
        plan.transform(self.model)  # 1. change the modules
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # by default FSDP2 uses an accelerator
        for block in self.model.stages:  # 2. shard
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)  # 3. build the optimizer over the shards
        target = torchboost.Target(self.model, self.optimizer)
        attached = plan.fit(self.model, self.optimizer).attach(target)  # 4. attach to the loop
        self.step = torchboost.TrainStep(target, lambda x, y: F.cross_entropy(self.model(x), y), attached=attached)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.parts = {"boost": self.step, "scheduler": self.scheduler}

    def train(self, epoch: int) -> float:
        rank, ranks, loss = dist.get_rank(), dist.get_world_size(), torch.nan
        for images, labels in digits(8).train(64, seed=0, epoch=epoch):
            loss = float(self.step(images[rank::ranks], labels[rank::ranks]).loss)
            self.scheduler.step()
        return loss

    def weights(self) -> list[torch.Tensor]:
        return [param.full_tensor() for param in self.model.parameters()]


def train(folder: Path) -> bool:
    job, again = Job(), Job()
    done = 0  # epochs
    if newest := checkpoint.latest(folder):
        done = int(newest.name)
        checkpoint.load(newest, job.model, job.optimizer, **job.parts)
    job.train(done)
    path = checkpoint.save(folder, done + 1, job.model, job.optimizer, **job.parts)
    loss = job.train(done + 1)
    checkpoint.load(path, again.model, again.optimizer, **again.parts)
    again.train(done + 1)
    same = all(map(torch.equal, job.weights(), again.weights()))
    if dist.get_rank() == 0:
        print(f"loss {loss:.3f}; resumed run equals the undisturbed one bit for bit: {same}")
    return same


def main() -> None:
    dist.init_process_group("gloo")
    train(Path(sys.argv[1] if len(sys.argv) > 1 else "out/fsdp2"))
    shutdown()


if __name__ == "__main__":
    main()
