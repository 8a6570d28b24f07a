"""Claim: with Muon, or without a schedule, the final metric of the stock optimizer is reached in fewer steps.

Every optimizer gets five learning rates, chosen on validation data apart from the test data, with one seed. Then five
seeds are trained at the chosen rate; Muon also with its schedule fitted to shares of the steps. Each run is saved when
it ends, and the script continues where it stopped. Times are not taken here: ``fewer_steps_time.py`` takes them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fewer_steps_workloads import WORKLOADS, Workload
from options import Options, parser
from torch import nn
from torch.optim import Optimizer

from torchboost.bench.workloads.jobs import one_cycle
from torchboost.measure.stopwatch import environment
from torchboost.optim import SGD, AdamW, MixedOptimizer, ScheduleFreeAdamW, muon_groups

SEEDS = 5
SHARES = (0.4, 0.5, 0.6)
"""Shares of the steps to which Muon's schedule is also fitted."""

Build = Callable[[nn.Module, Workload, float, Any], Optimizer]


@dataclass(frozen=True)
class Way:
    """An optimizer: how it is built, its learning rates, and whether its rate follows a schedule."""

    build: Build
    rates: tuple[float, ...]
    scheduled: bool = True


def adamw(model: nn.Module, work: Workload, rate: float, sample: Any) -> Optimizer:
    return AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=work.weight_decay)


def sgd(model: nn.Module, work: Workload, rate: float, sample: Any) -> Optimizer:
    return SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4)


def schedule_free(model: nn.Module, work: Workload, rate: float, sample: Any) -> Optimizer:
    warmup = round(work.warmup * work.steps)
    decay = work.weight_decay
    return ScheduleFreeAdamW(model.parameters(), lr=rate, weight_decay=decay, warmup_steps=warmup)


def muon(model: nn.Module, work: Workload, rate: float, sample: Any) -> Optimizer:
    rest = {"lr": work.rest_rate, "betas": (0.9, 0.95), "weight_decay": work.weight_decay}
    groups = muon_groups(
        model, muon={"lr": rate, "weight_decay": 0.01, "ns_dtype": torch.float32}, adamw=rest, sample=sample
    )
    return MixedOptimizer(groups)


ADAM_RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
WAYS = {
    "AdamW": Way(adamw, ADAM_RATES),
    "SGD": Way(sgd, (0.025, 0.05, 0.1, 0.2, 0.4)),
    "schedule-free AdamW": Way(schedule_free, ADAM_RATES, scheduled=False),
    "Muon": Way(muon, (0.005, 0.01, 0.02, 0.04, 0.08)),
}


def trained(work: Workload, name: str, rate: float, seed: int, steps: int, split: str) -> dict[str, Any]:
    """Train once, and return the metrics on a split of the data."""
    way = WAYS[name]
    torch.manual_seed(seed)
    model = work.model(seed)
    stream = work.batches(seed)
    first = next(stream)
    optimizer = way.build(model, work, rate, first[0])
    schedule = None
    if way.scheduled:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: one_cycle(t, steps, warmup=work.warmup))
    start, losses = time.perf_counter(), []
    model.train()
    for step in range(steps):
        inputs, targets = first if step == 0 else next(stream)
        loss = work.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.detach())
        if not math.isfinite(float(losses[-1])):
            break
    if isinstance(optimizer, ScheduleFreeAdamW):
        optimizer.eval()
        work.reestimate(model, seed)
    metrics = work.evaluate(model, split) if math.isfinite(float(losses[-1])) else {"loss": math.inf, "accuracy": 0.0}
    seconds = time.perf_counter() - start
    last = float(torch.stack(losses[-20:]).mean())
    return {"way": name, "rate": rate, "seed": seed, "steps": steps, "split": split, "training_loss": last} | (
        metrics | {"seconds": round(seconds, 1)}
    )


def trained_model(work: Workload, rate: float = 0.1) -> dict[str, torch.Tensor]:
    """Return the weights of a network that SGD has trained, for fine-tuning."""
    model, stream = work.model(0), work.batches(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for step in range(work.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * one_cycle(step, work.steps)
        inputs, targets = next(stream)
        optimizer.zero_grad()
        work.loss(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


def measure_workload(work: Workload, options: Options, out: Path) -> Path:
    file = out / f"fewer_steps-{work.name}{'-smoke' if options.smoke else ''}.json"
    saved = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"runs": []}
    runs: list[dict[str, Any]] = saved["runs"]
    keys = ("way", "rate", "seed", "steps", "split")

    def result(**run: Any) -> dict[str, Any]:
        known = next((one for one in runs if all(one[key] == run[key] for key in keys)), None)
        if known is not None:
            return known
        made = trained(work, run["way"], run["rate"], run["seed"], run["steps"], run["split"])
        runs.append(made)
        about = {key: getattr(work, key) for key in ("name", "title", "steps", "batch", "metric")}
        about["parameters"] = sum(p.numel() for p in work.model(0).parameters())
        text = json.dumps({**about, "environment": environment().model_dump(), "runs": runs}, indent=1)
        file.write_text(text + "\n", encoding="utf-8")
        print(json.dumps(made), flush=True)
        return made

    for ways in ([n for n in work.ways if WAYS[n].scheduled], [n for n in work.ways if not WAYS[n].scheduled]):
        best = {}
        for name in ways:
            tried = [result(way=name, rate=r, seed=100, steps=work.steps, split="validation") for r in WAYS[name].rates]
            best[name] = min(tried, key=work.badness)["rate"]
        for seed in range(2 if options.smoke else SEEDS):
            for name in ways:
                result(way=name, rate=best[name], seed=seed, steps=work.steps, split="test")
                for share in SHARES if name == "Muon" else ():
                    result(way=name, rate=best[name], seed=seed, steps=round(share * work.steps), split="test")
    return file


def main(argv: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("workload", nargs="*", default=[], help=f"any of {', '.join(WORKLOADS)}; all without one")
    arguments = made.parse_args(argv)
    run_all(arguments)


def run_all(arguments: argparse.Namespace) -> None:
    options = Options(out=arguments.out, data=arguments.data, text=arguments.text, smoke=arguments.smoke)
    for name in arguments.workload or WORKLOADS:
        measure_workload(WORKLOADS[name](options), options, options.out)


if __name__ == "__main__":
    main()
