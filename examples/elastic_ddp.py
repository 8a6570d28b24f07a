"""DDP at level O2 that survives crashes: a restart resumes from the newest complete checkpoint, bit for bit.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # otherwise restarted ranks look for dead ones (pytorch#135712)
torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic_ddp.py out/elastic
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchboost
from torchboost import checkpoint


def train(folder: Path, updates: int = 60, every: int = 10) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) / 16
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
    model = nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kept = folder / "plan.json"  # so that a restart does not measure again
    if rank == 0 and not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        torchboost.Plan.of("O2", total_steps=updates).fit(model, optimizer).save(kept)
    dist.barrier()
    plan = torchboost.Plan.of("O2", kept, torchboost.Facts.measure(model)).fit(model, optimizer)
    plan.transform(model, optimizer)  # change the modules, then wrap, then attach
    wrapped = DistributedDataParallel(model)
    target = torchboost.Target(wrapped, optimizer)
    attached = plan.attach(target)
    step = torchboost.TrainStep(target, lambda x, y: F.cross_entropy(wrapped(x), y), attached=attached)
    if newest := checkpoint.latest(folder):
        checkpoint.load(newest, wrapped, optimizer, boost=step)
    done = int(newest.name) if newest else 0
    for number in range(done + 1, updates + 1):
        rows = torch.randperm(1500, generator=torch.Generator().manual_seed(number))[:64]  # the same at every start
        loss = step(images[rows[rank::ranks]], labels[rows[rank::ranks]]).loss
        if number % every == 0 or number == updates:
            checkpoint.save(folder, number, wrapped, optimizer, boost=step)
            if rank == 0:
                print(f"update {number} of {updates}, started from {done}: loss {loss:.3f}", flush=True)
    if rank == 0:
        torch.save(model.state_dict(), folder / "weights.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")  # the model stays on the CPU
    train(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    torchboost.shutdown()


# It prints, on one busy core of a CPU:
#
#     update 10 of 60, started from 0: loss 1.373
#     update 20 of 60, started from 0: loss 0.420
#     update 30 of 60, started from 0: loss 0.112
#     update 40 of 60, started from 0: loss 0.113
#     update 50 of 60, started from 0: loss 0.330
#     update 60 of 60, started from 0: loss 0.016
