"""Claim: accumulated gradients equal those of the full batch for any ragged split; equal weights are far off."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from options import Options, parser, run_own, save_result
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.algorithms.grad_accumulation.algorithm import Accumulator
from torchboost.workloads.models import GPT

VOCABULARY, CONTEXT, IGNORED = 64, 64, -100
STEPS = 4
Batch = tuple[Tensor, Tensor]


def sequences(rows: int, generator: torch.Generator, *, ragged: bool) -> Batch:
    """Return tokens and targets. If ragged, every row is valid up to a random length."""
    tokens = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    if ragged:
        lengths = torch.randint(1, CONTEXT + 1, (rows, 1), generator=generator)
        targets[torch.arange(CONTEXT) >= lengths] = IGNORED
    return inputs, targets


def windows(generator: torch.Generator) -> dict[str, list[Batch]]:
    """Return one window of each kind, with micro-batches of different weights."""
    lengths = [sequences(8, generator, ragged=True) for _ in range(STEPS)]
    sizes = [sequences(rows, generator, ragged=False) for rows in (8, 8, 8, 1)]
    return {"sequences of random length": lengths, "a last batch of 1 among 8": sizes, "half a window": lengths[:2]}


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED)


def exact(model: nn.Module, window: Sequence[Batch]) -> Tensor:
    accumulator = Accumulator(STEPS, model)
    for batch in window:
        with accumulator.micro_step():
            accumulator.share(loss_of(model, batch), (batch[1] != IGNORED).sum()).backward()
    accumulator.flush()
    return gradient(model)


def naive(model: nn.Module, window: Sequence[Batch]) -> Tensor:
    for batch in window:
        (loss_of(model, batch) / STEPS).backward()
    return gradient(model)


def full(model: nn.Module, window: Sequence[Batch]) -> Tensor:
    loss_of(model, (torch.cat([x for x, _ in window]), torch.cat([y for _, y in window]))).backward()
    return gradient(model)


def errors(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return relative errors of the gradient against the full batch in float64, per kind of window and method."""
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(rounds):
        torch.manual_seed(seed)
        model = GPT(VOCABULARY, context=CONTEXT, layers=2, heads=4, width=64)
        for kind, window in windows(torch.Generator().manual_seed(seed)).items():
            wanted = full(copy.deepcopy(model).double(), window)
            for name, method in (("exact", exact), ("divided by steps", naive), ("full batch in float32", full)):
                error = (method(copy.deepcopy(model), window).double() - wanted).norm() / wanted.norm()
                found.setdefault(kind, {}).setdefault(name, []).append(float(error))
    return found


def measure(options: Options) -> Path:
    torch.set_num_threads(1)
    found = errors(2 if options.smoke else 30)
    for kind, methods in found.items():
        for name, values in methods.items():
            print(f"{kind:28} {name:22} median {statistics.median(values):.1e}  largest {max(values):.1e}")
    return save_result(
        options.file("accumulation"),
        title="Relative error of an accumulated gradient, float32, against the full batch in float64",
        model="GPT, 2 layers, width 64, context 64; windows of 4 micro-steps",
        errors=found,
    )


if __name__ == "__main__":
    run_own(measure, parser(__doc__).parse_args())
