"""Claim: on 2 cores a whole training step with Muon takes at most 1.15 times as long as with fused AdamW.

Steps of the workloads of ``fewer_steps.py``, forward and backward passes included, timed in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fewer_steps_workloads import WORKLOADS, Workload
from options import Options, parameters_of, parser, run, save_steps, timed_contestants
from torch import nn
from torch.optim import Optimizer

from torchboost.measure.stopwatch import compare
from torchboost.optim import SGD, AdamW, MixedOptimizer, ScheduleFreeAdamW, muon_groups

TIMED = ("gpt-characters", "gpt-pieces", "resnet-basic", "resnet-bottleneck", "vit", "speakers", "fine-tuning")
BASELINE = "AdamW, fused"


def muon(model: nn.Module, sample: Any) -> Optimizer:
    return MixedOptimizer(muon_groups(model, muon={"lr": 0.02}, adamw={"lr": 1e-3, "fused": True}, sample=sample))


class Pair:
    """torch's Muon for the matrices and torch's fused AdamW for the rest, as two optimizers."""

    def __init__(self, model: nn.Module, sample: Any) -> None:
        groups = muon_groups(model, sample=sample)
        chosen = {param for group in groups if group["rule"] == "muon" for param in group["params"] if param.ndim == 2}
        rest = [param for param in model.parameters() if param not in chosen]
        self.parts = torch.optim.Muon(list(chosen), lr=0.02), torch.optim.AdamW(rest, fused=True)

    def step(self) -> None:
        for part in self.parts:
            part.step()


WAYS: dict[str, Callable[[nn.Module, Any], Any]] = {
    BASELINE: lambda model, sample: torch.optim.AdamW(model.parameters(), fused=True),
    "AdamW of torchboost, fused": lambda model, sample: AdamW(model.parameters(), fused=True),
    "SGD, fused": lambda model, sample: SGD(model.parameters(), momentum=0.9, fused=True),
    "Muon and fused AdamW": muon,
    "torch's Muon and fused AdamW": Pair,
    "schedule-free AdamW": lambda model, sample: ScheduleFreeAdamW(model.parameters()),
}
ONLY_MATRICES = "torch's Muon and fused AdamW"


def stepper(work: Workload, way: str) -> Callable[[], object]:
    model = work.model(0)
    inputs, targets = next(work.batches(0))
    optimizer = WAYS[way](model, inputs)

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=work.autocast):
            loss = work.loss(model(inputs).float(), targets)
        loss.backward()
        optimizer.step()

    return step


def measure(options: Options, names: Sequence[str] = TIMED) -> list[Path]:
    return [measure_workload(WORKLOADS[name](options), options) for name in names if name != "speakers" or options.text]


def measure_workload(work: Workload, options: Options) -> Path:
    filters = any(param.ndim > 2 for param in work.model(0).parameters())
    ways = [way for way in WAYS if way != ONLY_MATRICES or not filters]
    steps = {way: stepper(work, way) for way in ways}
    pairs = 2 if options.smoke else 30
    found = compare(steps, baselines=[BASELINE], pairs=pairs, progress=options.progress)
    precision = "under bfloat16 autocast" if work.autocast else "in float32"
    return save_steps(
        options.file("fewer_steps_time", work.name),
        timed_contestants(found, ways, BASELINE, "a whole step"),
        title=f"A whole training step: {work.title}",
        model=work.title,
        parameters=parameters_of(work.model(0)),
        batch=work.batch,
        notes=[f"forward pass, backward pass and update {precision}"],
    )


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("workload", nargs="*", default=TIMED, help=f"any of {', '.join(TIMED)}; all without one")
    arguments = made.parse_args()
    run([partial(measure, names=arguments.workload)], arguments)
