"""DDP at level O2: the order of the lines in a script for several ranks.

torchrun --standalone --nproc-per-node 2 examples/ddp_o2.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchboost
from torchboost.distributed.topology import shutdown
from torchboost.workloads.data import digits
from torchboost.workloads.models import Bottleneck, ResNet


def train(epochs: int, batch: int = 64) -> float:
    rank, ranks, data = dist.get_rank(), dist.get_world_size(), digits(8)
    updates = epochs * data.steps(batch)
    torch.manual_seed(0)  # the same on every rank
    model = ResNet(Bottleneck, [1, 1, 1], width=16, classes=10, in_channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)

    config = {"grad_freeze": {"total_steps": updates}}
    plan = torchboost.Plan.of("O2", config, torchboost.Facts.measure(model)).fit(model, optimizer)
    if rank == 0:
        print(plan.explain())
    plan.transform(model, optimizer)  # 1. change the modules
    wrapped = DistributedDataParallel(model)  # 2. wrap
    attached = plan.attach(torchboost.Target(wrapped, optimizer))  # 3. attach to the loop

    for epoch in range(epochs):
        for images, labels in data.train(batch, seed=0, epoch=epoch):
            loss = F.cross_entropy(wrapped(images[rank::ranks]), labels[rank::ranks])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch + 1} of {epochs}: loss of the last batch {loss.item():.3f}")
    attached.remove()

    wrapped.eval()
    with torch.no_grad():
        right = sum((wrapped(x).argmax(1) == y).sum() for x, y in data.test(60))
    dist.broadcast(right, 0)  # each rank has its own BatchNorm statistics; DDP trains with rank 0's
    return int(right) / len(data.test_labels)


def main() -> None:
    dist.init_process_group("gloo")
    accuracy = train(epochs=6)
    if dist.get_rank() == 0:
        print(f"{accuracy:.1%} of the test images right")
    shutdown()


if __name__ == "__main__":
    main()
