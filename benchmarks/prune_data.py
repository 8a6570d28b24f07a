"""Question: is leaving out well-learned samples for a while worth more than training fewer steps?

InfoBatch (Z. Qin et al., ICLR 2024, arXiv 2303.04947): in every epoch a half of the samples whose last loss is below
the mean is left out at random, and the other half counts twice, so the expected gradient stays. The last eighth of the
run has all samples. The rival is the same loop with as many steps, its schedule fitted. Both train 0.7 of the steps of
stock. Each way gets three learning rates on validation data and then five seeds of its own on test data. No way has
augmentation. Each run is saved when it ends; ``--resume`` keeps them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from options import Options, run_each
from saved_runs import Run, SavedRuns
from torch import Tensor
from torch.nn import functional as F

from torchboost.workloads.data import Images
from torchboost.workloads.named import Workload, find_workload

SHARE, WHOLE = 0.7, 0.125
"""Share of the steps of both ways, and share of these at the end that has all samples."""
LEFT_OUT = 0.5
"""Share of the well-learned samples that an epoch leaves out."""
RATES, SEEDS = (0.5, 1.0, 2.0), 5
STOCK, FEWER, PRUNED = "stock", "fewer steps", "pruned"
WAYS = (STOCK, FEWER, PRUNED)
FRESH = 3_000
CASES = {"digits-resnet": (None, 10), "cifar10-vgg": (6_400, 6)}
"""Training samples and epochs of stock."""


@dataclass
class Samples:
    """The order of samples, and what each of them counts.

    Args:
        count: Of all samples.
        batch: Of a step.
        steps: Of the run.
        draws: Generator of the order.
        prunes: Whether well-learned samples are left out.
    """

    count: int
    batch: int
    steps: int
    draws: torch.Generator
    prunes: bool

    def __post_init__(self) -> None:
        self.losses = torch.full((self.count,), torch.inf)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield numbers of samples, and their weights, for each step."""
        done, border = 0, round((1 - WHOLE) * self.steps)
        while done < self.steps:
            chosen, weights = self._epoch(prunes=self.prunes and done < border)
            order = chosen[torch.randperm(len(chosen), generator=self.draws)]
            end = border if self.prunes and done < border else self.steps
            for picked in order.split(self.batch):
                if len(picked) < self.batch or done == end:
                    break
                done += 1
                yield picked, weights[picked]

    def _epoch(self, *, prunes: bool) -> tuple[Tensor, Tensor]:
        everything, weights = torch.arange(self.count), torch.ones(self.count)
        if not prunes or not self.losses.isfinite().any():
            return everything, weights
        learned = self.losses < self.losses[self.losses.isfinite()].mean()
        gone = learned & (torch.rand(self.count, generator=self.draws) < LEFT_OUT)
        weights[learned] = 1 / (1 - LEFT_OUT)
        return everything[~gone], weights


def trained(job: Workload, data: Images, way: str, rate: float, seed: int, steps: int) -> Run:
    model = job.model(data, seed).train()
    optimizer = job.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] *= rate
    schedule = job.schedule(optimizer, steps)
    samples = Samples(data.samples, job.batch, steps, torch.Generator().manual_seed(seed), way == PRUNED)
    seen = 0
    for picked, weights in samples:
        inputs, targets = data.picked(picked)
        losses = F.cross_entropy(model(inputs), targets, reduction="none")
        (losses * weights).mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        samples.losses[picked], seen = losses.detach(), seen + len(picked)
    model.eval()
    return {"steps": steps, "samples": seen, "score": job.validate(model, data), "metric": job.evaluate(model, data)}


def measure(name: str, options: Options) -> Path:
    samples, epochs = CASES[name]
    job = find_workload(name)
    data = job.load(options.path_for(name), 4 * job.batch if options.smoke else samples)
    assert isinstance(data, Images)
    whole = (1 if options.smoke else epochs) * data.steps(job.batch)
    about = {"name": name, "title": f"{job.model_name}: {job.title}", "steps": whole}
    runs = SavedRuns(options.file("prune_data", name), about, resume=options.resume)

    def run(way: str, rate: float, seed: int) -> Run:
        steps = whole if way == STOCK else max(2, round(SHARE * whole))
        key = {"way": way, "rate": rate, "seed": seed}
        return runs.get(key, lambda: trained(job, data, way, rate, seed, steps))

    best = {way: max(RATES, key=lambda rate, way=way: run(way, rate, 0)["score"]) for way in WAYS}
    runs.note("chosen", best)
    for seed, way in itertools.product(range(FRESH, FRESH + (1 if options.smoke else SEEDS)), WAYS):
        run(way, best[way], seed)
    return runs.file


if __name__ == "__main__":
    run_each(__doc__, "workload", CASES, measure)
