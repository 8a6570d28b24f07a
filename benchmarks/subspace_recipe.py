"""The gain of the published recipe of dimension-reduced training at small scale, including its collection.

SGD with a constant rate collects snapshots, their principal components span a subspace, and training starts again in it
(Li et al., TPAMI 2022). It is compared with SGD alone with a one-cycle rate at the same total cost, and with the mean
of the last snapshots at the cost of the collection alone. Cost is processor time on one thread, evaluation not counted.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from images import endless
from options import Options, parser, run_own, save_result
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost import Target
from torchboost.algorithms import DimReduction
from torchboost.algorithms.dim_reduce.algorithm import DimReduceRun
from torchboost.core import attach_all
from torchboost.workloads.data import Images, cifar10
from torchboost.workloads.models import BasicBlock, ResNet
from torchboost.workloads.named import accuracy, one_cycle

DIRECTIONS, SNAPSHOTS, COLLECTING, BATCH, LARGE = 32, 48, 6, 64, 256
"""Directions; snapshots; epochs over which they are taken; batch of SGD; batch in the subspace."""
SUBSPACE = 3
"""Epochs in the subspace."""
RATE = 0.05
PARTS = {
    "collected": "SGD that collects, constant rate",
    "mean": "mean of its last quarter of snapshots",
    "subspace": "the recipe: collection, then the subspace",
    "sgd": "SGD, one cycle, for the cost of the recipe",
}
"""Part of a run -> what it is."""


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return ResNet(BasicBlock, [1, 1, 1, 1], width=16)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def scored(model: nn.Module, data: Images) -> float:
    model.eval()
    found = accuracy(model, data)
    model.train()
    return found


def sgd(model: nn.Module, rate: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)


def recipe(data: Images, seed: int, rate: float, collecting: int, subspace: int) -> dict[str, Any]:
    """Run the whole recipe with one algorithm object; return scores and costs after every part."""
    model = network(seed)
    target = Target(model, sgd(model, rate))
    per_epoch = data.steps(BATCH)
    every = collecting * per_epoch // SNAPSHOTS
    settings = DimReduction(n_components=DIRECTIONS, snapshots=SNAPSHOTS, snapshot_every=every)
    first = [p.detach().clone() for p in model.parameters()]
    attach_all(target, [settings])
    run = target.optimizer
    assert isinstance(run, DimReduceRun)
    mean, taken = [torch.zeros_like(p) for p in model.parameters()], 0
    found: dict[str, Any] = {"curve": []}
    spent = 0.0
    for batch in endless(data, BATCH, seed):
        began = time.process_time()
        run.step(lambda batch=batch: loss_of(model, batch))
        spent += time.process_time() - began
        if run.phase == "subspace":
            break
        if run.updates % every == 0 and run.updates > SNAPSHOTS * every * 3 // 4:
            taken += 1
            for held, p in zip(mean, model.parameters(), strict=True):
                held.add_(p.detach())
        if run.updates == SNAPSHOTS * every - 1:
            found["collected"] = {"accuracy": scored(model, data), "seconds": spent}
            found["mean"] = {"accuracy": averaged(model, mean, taken, data, seed), "seconds": spent}
    with torch.no_grad():
        for p, start in zip(model.parameters(), first, strict=True):
            p.copy_(start)  # as published
    found["start"] = {"accuracy": scored(model, data), "seconds": spent}
    for epoch in range(subspace):
        for batch in data.train(LARGE, seed=seed + 100, epoch=epoch):
            began = time.process_time()
            run.step(lambda batch=batch: loss_of(model, batch))
            spent += time.process_time() - began
        found["curve"].append({"accuracy": scored(model, data), "seconds": spent})
    assert run.subspace is not None
    found["subspace"] = found["curve"][-1] | {"accepted": run.subspace.accepted}
    return found


def averaged(model: nn.Module, total: list[Tensor], count: int, data: Images, seed: int) -> float:
    """Score the mean of the last snapshots, with recomputed BatchNorm statistics."""
    fresh = network(0)
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        for p, held in zip(fresh.parameters(), total, strict=True):
            p.copy_(held / count)
        for module in fresh.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None
        for number, (inputs, _) in enumerate(data.train(BATCH, seed=seed, epoch=0)):
            fresh(inputs)
            if number == 30:
                break
    return scored(fresh, data)


def alone(data: Images, seed: int, rate: float, budget: float) -> dict[str, Any]:
    """SGD with a one-cycle rate that ends when the budget does; its length is estimated from the first steps."""
    model = network(seed)
    optimizer = sgd(model, rate)
    spent, planned = 0.0, 0
    for done, batch in enumerate(endless(data, BATCH, seed), start=1):
        factor = one_cycle(done - 1, planned or 1000)
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        began = time.process_time()
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        spent += time.process_time() - began
        if done >= 20:
            planned = round(done * budget / spent)
        if planned and done >= planned:
            return {"accuracy": scored(model, data), "seconds": spent, "epochs": done / data.steps(BATCH)}
    raise AssertionError("epochs do not end")


def measure(options: Options) -> Path:
    torch.set_num_threads(1)
    data = cifar10(options.data, train_limit=1024 if options.smoke else 5_000)
    seeds, collecting, subspace = (1, 6, 1) if options.smoke else (3, COLLECTING, SUBSPACE)
    settings = {
        "train_samples": data.samples,
        "directions": DIRECTIONS,
        "snapshots": SNAPSHOTS,
        "collecting_epochs": collecting,
        "subspace_epochs": subspace,
        "batch": BATCH,
        "subspace_batch": LARGE,
    }
    title = "The published recipe of subspace training on CIFAR-10, against SGD and averaging at equal cost"
    about = {"title": title, "model": "ResNet, basic blocks [1, 1, 1, 1], width 16", "settings": settings}
    file, runs = options.file("subspace_recipe"), list[dict[str, Any]]()
    for seed in range(seeds):
        one = recipe(data, seed, RATE, collecting, subspace)
        one["sgd"] = alone(data, seed, RATE, one["subspace"]["seconds"])
        runs.append(one)
        print(seed, {k: round(v["accuracy"], 4) for k, v in one.items() if k != "curve"}, flush=True)
        save_result(file, **about, runs={str(RATE): runs})
    return file


if __name__ == "__main__":
    run_own(measure, parser(__doc__).parse_args())
