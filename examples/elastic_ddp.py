"""DDP at level O2 that survives crashes: a restart resumes from the newest complete checkpoint, bit for bit.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # otherwise restarted ranks look for dead ones (pytorch#135712)
torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic_ddp.py out/elastic
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import torchboost
from torchboost.distributed import checkpoint
from torchboost.distributed.topology import shutdown
from torchboost.workloads.data import digits
from torchboost.workloads.models import Bottleneck, ResNet


def shares(batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of every batch, the same at every start."""
    rank, ranks, data = dist.get_rank(), dist.get_world_size(), digits(8)
    for epoch in count():
        for images, labels in data.train(batch, seed=0, epoch=epoch):
            yield images[rank::ranks], labels[rank::ranks]


def train(folder: Path, updates: int, every: int) -> None:
    torch.manual_seed(0)
    model = ResNet(Bottleneck, [1, 1, 1], width=8, classes=10, in_channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = folder / "plan.json"  # so that a restart does not measure again
    if dist.get_rank() == 0 and not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        torchboost.Plan.of("O2", total_steps=updates).fit(model, optimizer).save(kept)
    dist.barrier()
    plan = torchboost.Plan.of("O2", kept, torchboost.Facts.measure(model)).fit(model, optimizer)
    plan.transform(model, optimizer)  # change the modules, then wrap, then attach
    wrapped = DistributedDataParallel(model)
    target = torchboost.Target(wrapped, optimizer)
    attached = plan.attach(target)
    step = torchboost.TrainStep(target, lambda x, y: F.cross_entropy(wrapped(x), y), attached=attached)
    scheduler = CosineAnnealingLR(optimizer, updates)
    parts = {"boost": step, "scheduler": scheduler}
    newest = checkpoint.latest(folder)
    done = int(newest.name) if newest else 0
    if newest:
        checkpoint.load(newest, wrapped, optimizer, **parts)
    for number, (images, labels) in enumerate(islice(shares(64), done, updates), start=done + 1):
        loss = step(images, labels).loss
        scheduler.step()
        if number % every == 0 or number == updates:
            checkpoint.save(folder, number, wrapped, optimizer, **parts)
            if dist.get_rank() == 0:
                print(f"update {number} of {updates}, started from {done}: loss {loss:.3f}", flush=True)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "weights.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    options = parser.parse_args()
    dist.init_process_group("gloo")  # the model stays on the CPU
    train(options.folder, options.updates, options.every)
    shutdown()


if __name__ == "__main__":
    main()
