"""Question: is leaving out well-learned samples for a while worth more than training fewer steps?

InfoBatch (Z. Qin et al., ICLR 2024, arXiv 2303.04947): in every epoch a half of the samples whose last loss is below
the mean is left out at random, and the other half counts twice, so the expected gradient stays. The last eighth of the
run has all samples. The rival is the same loop with as many steps, its schedule fitted. Both train 0.7 of the steps of
stock. Each way gets three learning rates on validation data and then five seeds of its own on test data. No way has
augmentation. Each run is saved when it ends; ``--resume`` keeps them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from options import Options, run_each
from torch import Tensor
from torch.nn import functional as F

from torchboost.bench.report.table import Table
from torchboost.measure.statistics import mean_of, paired_difference
from torchboost.measure.stopwatch import environment
from torchboost.workloads.data import Images
from torchboost.workloads.named import find_workload

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

Run = dict[str, Any]


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


class Runs:
    """The runs of one workload, in a file that grows with each."""

    def __init__(self, name: str, options: Options) -> None:
        samples, epochs = CASES[name]
        self.job = find_workload(name)
        data = self.job.load(options.path_for(name), 4 * self.job.batch if options.smoke else samples)
        assert isinstance(data, Images)
        assert data.validation is not None
        self.data, self.validation = data, data.validation
        self.steps = (1 if options.smoke else epochs) * data.steps(self.job.batch)
        self.file = options.file("prune_data", name)
        about = {"name": name, "title": f"{self.job.model_name}: {self.job.title}", "steps": self.steps}
        self.result: dict[str, Any] = {**about, "environment": environment().model_dump(), "runs": []}
        if options.resume and self.file.is_file():
            self.result["runs"] = json.loads(self.file.read_text(encoding="utf-8"))["runs"]

    def get(self, way: str, rate: float, seed: int) -> Run:
        wanted = {"way": way, "rate": rate, "seed": seed}
        for run in self.result["runs"]:
            if run.items() >= wanted.items():
                return run
        run = {**wanted, **self._train(way, rate, seed)}
        self.result["runs"].append(run)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({"workload": self.result["name"], **run}), flush=True)
        return run

    def _train(self, way: str, rate: float, seed: int) -> Run:
        job, data = self.job, self.data
        steps = self.steps if way == STOCK else max(2, round(SHARE * self.steps))
        model = job.model(data, seed).train()
        optimizer = job.optimizer(model.parameters())
        for group in optimizer.param_groups:
            group["lr"] *= rate
        schedule = job.schedule(optimizer, steps)
        draws = torch.Generator().manual_seed(seed)
        samples = Samples(data.samples, job.batch, steps, draws, way == PRUNED)
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
        scores = {part: job.evaluate(model, of) for part, of in (("score", self.validation), ("metric", data))}
        return {"steps": steps, "samples": seen, **scores}


def measure(name: str, options: Options) -> Path:
    runs = Runs(name, options)
    best = {way: max(RATES, key=lambda rate, way=way: runs.get(way, rate, 0)["score"]) for way in WAYS}
    runs.result["chosen"] = best
    for seed, way in itertools.product(range(FRESH, FRESH + (1 if options.smoke else SEEDS)), WAYS):
        runs.get(way, best[way], seed)
    runs.file.write_text(json.dumps(runs.result, indent=1) + "\n", encoding="utf-8")
    return runs.file


def table(folder: Path) -> tuple[Table, str]:
    """Return the metric of each way at its best rate, and a sentence about the runs."""
    files = [folder / f"prune_data-{name}.json" for name in CASES]
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    rows = []
    for result in results:
        final = {
            way: [run["metric"] for run in result["runs"] if run["way"] == way and run["seed"] >= FRESH] for way in WAYS
        }
        gain = paired_difference(final[FEWER], final[PRUNED])
        points = [100 * value for value in (gain.mid, gain.low, gain.high)]
        means = [f"{100 * mean_of(final[way]):.2f} % at {result['chosen'][way]:g}" for way in WAYS]
        row = (f"{result['title']}, {result['steps']} steps", *means)
        rows.append((*row, f"{points[0]:+.2f} points ({points[1]:+.2f} to {points[2]:+.2f})"))
    head = ("workload", "stock", "0.7 of the steps", "0.7 of the steps, pruned", "pruned against fewer steps")
    about = results[0]["environment"] if results else {"processor": "", "torch": ""}
    said = (
        f"Accuracy on test data, the mean of {SEEDS} seeds, each way at its best multiple of the learning rate. Each "
        f"bound of the difference holds with 95 %. {about['processor']}, torch {about['torch']}. All runs: "
        "`benchmarks/results/prune_data-*.json`."
    )
    return Table(headings=head, rows=tuple(rows)), said


if __name__ == "__main__":
    run_each(__doc__, "workload", CASES, measure)
