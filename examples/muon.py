"""Muon for the hidden matrices and AdamW for the rest, in one optimizer: which parameter goes where, what it brings."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchboost.optim import AdamW, MixedOptimizer, muon_groups
from torchboost.workloads.data import text
from torchboost.workloads.models import GPT
from torchboost.workloads.named import one_cycle

Build = Callable[[nn.Module], Optimizer]


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def muon(model: nn.Module) -> Optimizer:
    rest = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    return MixedOptimizer(muon_groups(model, muon={"lr": 0.02, "weight_decay": 0.01}, adamw=rest))


def train(build: Build, steps: int) -> float:
    """Return the mean loss of the last tenth of the steps, in nats per character."""
    data = text(context=64)
    torch.manual_seed(0)
    model = GPT(len(data.characters), context=64, layers=2, heads=2, width=64)
    optimizer = build(model)
    scheduler = LambdaLR(optimizer, functools.partial(one_cycle, total=steps))
    losses = []
    for step, (inputs, targets) in enumerate(data.train(16, seed=0, epoch=0)):
        if step == steps:
            break
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    return float(torch.stack(losses[-max(1, steps // 10) :]).mean())


def main(steps: int = 300) -> dict[str, float]:
    print(muon_groups(GPT(65, context=64, layers=1, heads=2, width=64)))
    losses = {}
    for name, build in {"AdamW": adamw, "Muon and AdamW": muon}.items():
        losses[name] = train(build, steps)
        print(f"{name}: loss {losses[name]:.3f} after {steps} steps")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
