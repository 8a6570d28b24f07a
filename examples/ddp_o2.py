"""DDP at level O2: the order of the lines in a script for several ranks.

torchrun --standalone --nproc-per-node 2 examples/ddp_o2.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchboost


def train(epochs: int, batch: int = 64) -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) / 16
    torch.manual_seed(0)  # the same on every rank
    layers = [nn.Conv2d(1, 16, 3, padding=1)]
    for _ in range(4):
        layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, bias=False)]
    model = nn.Sequential(*layers, nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    updates = epochs * (1500 // batch)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)

    boosted = torchboost.boost(model, optimizer, level="O2", total_steps=updates)  # 1. boost
    wrapped = DistributedDataParallel(model)  # 2. wrap
    for _ in range(epochs):
        for rows in torch.randperm(1500).split(batch)[:-1]:
            mine = rows[rank::ranks]
            F.cross_entropy(wrapped(images[mine]), labels[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    if rank == 0:
        print(boosted.explain(), flush=True)
    boosted.remove()

    wrapped.eval()
    with torch.no_grad():
        right = (wrapped(images[1500:]).argmax(1) == labels[1500:]).sum()
    dist.broadcast(right, 0)  # each rank has its own BatchNorm statistics, and DDP trains with those of rank 0
    return int(right) / len(labels[1500:])


def main() -> None:
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: {train(epochs=48):.1%} of the test images right", flush=True)
    torchboost.shutdown()


if __name__ == "__main__":
    main()
