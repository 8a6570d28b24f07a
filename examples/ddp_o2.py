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


# It prints, on one busy core of a CPU:
#
#     level O2 for SGD, 1,104 steps
#     together a step is 1.14 times as fast as in your loop without them (0.86 to 1.34), measured at the first training
#     call in 0.6 s; also on, not timed: gradient_centralization, grad_freeze
#
#     switch                   state  what it did                                                   how exact
#     channels_last            on     stores images and kernels channels-last; not measured:
#                                     kernels must have their format before
#                                     DistributedDataParallel lays out its buckets
#         exact here: gradient within 4e-06
#     fused_optimizer          on     7 pairs did not decide (1.14 times as fast, 0.86 to 1.34);    exact here
#                                     kept as usual; give it more with boost(...,
#                                     calibrate=seconds)
#     gradient_centralization  on     subtracts the mean from the gradient of each filter           changes the training
#     grad_freeze              on     stops training the first blocks in some of the updates:       changes the training
#                                     total_steps=1104
#     less_bn                  off    no BatchNorm of the model can go: its residual blocks, if any, need theirs, and
#                                     others stay
#     threads                  off    the ranks share the cores
#     unpad                    off    no argument of its forward masks padding
#     sparse_head              off    the model has no output head that a loss could read in part
#     matmul_precision         off    TF32 is a precision of CUDA devices, and the model is on cpu
#     autocast                 off    the time for the trial was used up before its first pair of steps; its share of
#                                     the run is 0.6 s; boost(..., calibrate=1) measures longer
#     compile                  off    1,104 steps do not repay it: at best it saves 5.0 s, and it costs about 32 s
#
#     next: boosted.plan.save("boost.json"); boost(..., config="boost.json") then repeats this without measuring
#     rank 0: 95.6% of the test images right
#     rank 1: 95.6% of the test images right
