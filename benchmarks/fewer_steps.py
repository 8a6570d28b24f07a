"""Claim: with Muon, or without a schedule, the final metric of the stock optimizer is reached in fewer steps.

Every optimizer gets five learning rates, chosen on validation data apart from the test data, with one seed; if the best
is the lowest or the highest, up to two more in that direction. Muon's are for the matrices, with a momentum of 0.9 as
that of the others; the rest of the weights has AdamW's best rate. Then five seeds are trained at the chosen rate, Muon
also with its schedule fitted to shares of the steps. Muon takes each parameter as one matrix: ``muon_split.py``
compares that with split ones. "Muon, AdamW's rate" is not tuned: it takes the rate and the decay of AdamW for all
weights. Each run is saved when it ends, and the script continues where it stopped. Times are not taken here:
``fewer_steps_time.py`` takes them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from fewer_steps_workloads import WORKLOADS, Workload
from options import Options, options_of, parameters_of, parser
from saved_runs import Run, SavedRuns
from torch import nn
from torch.optim import Optimizer

from torchboost.optim import SGD, AdamW, MixedOptimizer, ScheduleFreeAdamW, muon_groups
from torchboost.workloads.named import one_cycle

SEEDS = 5
SHARES = (0.5, 0.6)
"""Shares of the steps to which Muon's schedule is also fitted."""

MOST_RATES = 7
"""Learning rates that are tried at most."""

Build = Callable[[nn.Module, Workload, float, Any], Optimizer]


@dataclass(frozen=True)
class Way:
    """An optimizer: how it is built, its learning rates, and when it is run.

    Args:
        build: From a model, a workload, a rate and an input.
        rates: To choose from; empty for the best rate of AdamW.
        phase: All workloads are run with the optimizers of one phase before those of the next.
        scheduled: Whether the rate follows a schedule.
    """

    build: Build
    rates: tuple[float, ...]
    phase: int = 0
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
    return _muon(model, work, sample, {"lr": rate, "weight_decay": 0.01})


def muon_at_the_rate_of_adamw(model: nn.Module, work: Workload, rate: float, sample: Any) -> Optimizer:
    return _muon(
        model, work, sample, {"lr": rate, "weight_decay": work.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    )


def _muon(model: nn.Module, work: Workload, sample: Any, options: dict[str, Any]) -> Optimizer:
    rest = {"lr": work.rest_rate, "betas": (0.9, 0.95), "weight_decay": work.weight_decay}
    own = {"momentum": 0.9, "ns_dtype": torch.float32, **options}
    return MixedOptimizer(muon_groups(model, muon=own, adamw=rest, sample=sample, split=False))


ADAM_RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
WAYS = {
    "AdamW": Way(adamw, ADAM_RATES),
    "SGD": Way(sgd, (0.0125, 0.025, 0.05, 0.1, 0.2)),
    "Muon": Way(muon, (0.01, 0.02, 0.04, 0.08, 0.16)),
    "Muon, AdamW's rate": Way(muon_at_the_rate_of_adamw, (), phase=1),
    "schedule-free AdamW": Way(schedule_free, ADAM_RATES, phase=2, scheduled=False),
}


def trained(work: Workload, way: Way, rate: float, seed: int, steps: int, split: str) -> Run:
    """Train once, and return the metrics on a split of the data."""
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
        with torch.autocast("cpu", torch.bfloat16, enabled=work.autocast):
            loss = work.loss(model(inputs).float(), targets)
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
    return {"rest_rate": work.rest_rate, "training_loss": last, **metrics, "seconds": round(seconds, 1)}


class Runs(SavedRuns):
    """The runs of one workload with several optimizers, and the rates that were chosen for them."""

    def __init__(self, work: Workload, file: Path, ways: Mapping[str, Way] = WAYS, *, resume: bool = True) -> None:
        self.work, self.ways = work, ways
        about = {key: getattr(work, key) for key in ("name", "title", "steps", "batch", "metric")}
        super().__init__(file, {**about, "parameters": parameters_of(work.model(0))}, resume=resume)
        self.chosen: dict[str, dict[str, float]] = self.result.setdefault("chosen", {})

    def run(self, *, way: str, rate: float, seed: int, steps: int, split: str, **fixed: float) -> Run:
        """Return a run that was made before, or make it."""
        key = {"way": way, "rate": rate, "seed": seed, "steps": steps, "split": split, **fixed}
        work = replace(self.work, rest_rate=fixed.get("rest_rate", 0.0))
        return self.get(key, lambda: trained(work, self.ways[way], rate, seed, steps, split))

    def best(self, name: str, **fixed: float) -> float:
        """Return the best rate of an optimizer on the validation data."""
        steps, rates = self.work.steps, sorted(self.ways[name].rates)
        while True:
            tried = [
                self.run(way=name, rate=rate, seed=100, steps=steps, split="validation", **fixed) for rate in rates
            ]
            found = min(tried, key=self.work.badness)["rate"]
            if rates[0] < found < rates[-1] or len(rates) == MOST_RATES:
                return found
            rates = [found / 2, *rates] if found == rates[0] else [*rates, 2 * found]

    def choose(self, name: str, rates: dict[str, float]) -> None:
        """Note the rates with which an optimizer is run on the test data."""
        self.chosen[name] = rates
        self.save()


def measure_workload(work: Workload, options: Options, phase: int) -> Path:
    """Make the runs of one phase."""
    made = Runs(work, options.file("fewer_steps", work.name))
    of_adamw = made.best("AdamW")
    chosen: dict[str, dict[str, float]] = {}
    for name in (name for name, way in WAYS.items() if way.phase == phase):
        fixed = {"rest_rate": of_adamw} if name.startswith("Muon") else {}
        chosen[name] = {"rate": made.best(name, **fixed) if WAYS[name].rates else of_adamw, **fixed}
        made.choose(name, chosen[name])
    for seed in range(2 if options.smoke else SEEDS):
        for name, rates in chosen.items():
            for share in (*(SHARES if name == "Muon" else ()), 1.0):
                made.run(way=name, seed=seed, steps=round(share * work.steps), split="test", **rates)
    return made.file


def main() -> None:
    made = parser(__doc__)
    made.add_argument("workload", nargs="*", default=[], help=f"any of {', '.join(WORKLOADS)}; all without one")
    arguments = made.parse_args()
    options = options_of(arguments)
    workloads = [WORKLOADS[name](options) for name in arguments.workload or WORKLOADS]
    for phase in sorted({way.phase for way in WAYS.values()}):
        for work in workloads:
            measure_workload(work, options, phase)


if __name__ == "__main__":
    main()
