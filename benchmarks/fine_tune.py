"""Claim: fine-tuning with 75 % frozen is at least four times as fast as stock when the frozen part is cached.

A ResNet learns CIFAR-10's classes 0 to 4 and is then fine-tuned on 5 to 9, without augmentation: the stock loop trains
everything; the others freeze the stem and the first 75 % of the blocks.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from images import of_classes
from options import Options, as_contestant, parameters_of, parser, run
from torch import Tensor, nn

from torchboost.algorithms.grad_freeze.algorithm import GradFreeze, freeze_blocks
from torchboost.bench.contestants import Recipe, build_loop
from torchboost.graph.blocks import blocks_of
from torchboost.measure.evidence import AlgorithmRow, BenchReport, Curve, Quality
from torchboost.measure.statistics import SequentialTest
from torchboost.measure.stopwatch import Clock, compare, environment
from torchboost.workloads.data import Images, cifar10
from torchboost.workloads.named import Workload, accuracy, find_workload

JOB = "cifar10-resnet-bottleneck-small"
FROZEN = 7
"""The stem and 6 of 8 blocks."""

WAYS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "frozen": {},
    "frozen+cache": {"cache_mebibytes": 2048},
}
NOT_WORSE = 0.005

Step = Callable[[Tensor], Tensor]


def trained(job: Workload, data: Images, seed: int, epochs: int) -> nn.Module:
    """A network that has learned ``data``, by the fast loop by hand."""
    steps = epochs * data.steps(job.batch)
    loop = build_loop(Recipe.parse("hand"), job.factory(data), seed=seed, steps=steps)
    for epoch in range(epochs):
        for inputs, targets in data.train(job.batch, seed=seed, epoch=epoch):
            loop.step(inputs, targets)
    return loop.parts.model.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]


def stepper(way: str, job: Workload, network: nn.Module, data: Images, steps: int) -> Step:
    """A training step on the samples of given ids."""
    optimizer = job.optimizer(network.parameters(), lr=0.02)
    schedule = job.schedule(optimizer, steps)
    fast, more = None, WAYS[way]
    if more is not None:
        settings = GradFreeze(pattern="fixed", groups=len(blocks_of(network)), frozen=FROZEN, norms="eval", **more)
        fast = freeze_blocks(network, optimizer, settings).fast
    names_samples = fast is not None and bool(more and "cache_mebibytes" in more)

    def step(ids: Tensor) -> Tensor:
        inputs, targets = data.picked(ids)
        with fast.samples(ids) if fast is not None and names_samples else contextlib.nullcontext():
            loss = job.loss(network(inputs), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def judged(frozen: list[float], cached: list[float]) -> Quality:
    test = SequentialTest(margin=NOT_WORSE, least=len(cached), most=len(cached))
    look = test.look([one - other for one, other in zip(cached, frozen, strict=True)])
    figures = {"seeds": look.pairs, "passed": look.state == "passed", "detectable": look.detectable}
    return Quality(baseline="frozen", difference=look.difference, margin=NOT_WORSE, **figures)


def measure(options: Options) -> list[Path]:
    job = find_workload(JOB)
    every = replace(cifar10(options.data, train_limit=640 if options.smoke else 20_000), shift=0, flip=False)
    if options.smoke:
        every = replace(every, test_inputs=every.test_inputs[:200], test_labels=every.test_labels[:200])
    before, after = of_classes(every, 0, 5), of_classes(every, 5, 5)
    epochs, seeds = (1, 2) if options.smoke else (2, 3)
    curves: dict[str, list[Curve]] = {way: [] for way in WAYS}
    network = nn.Module()
    for seed in range(seeds):
        options.progress("learning classes 0 to 4", seed, seeds)
        network = trained(job, before, seed, epochs)
        for way in WAYS:
            options.progress("fine-tuning", seed, seeds, way)
            curves[way].append(fine_tuned(way, job, copy.deepcopy(network), after, seed, epochs))
    steps = {way: timed(way, job, copy.deepcopy(network), after) for way in WAYS}
    found = compare(steps, baselines=["stock", "frozen"], pairs=2 if options.smoke else 30, progress=options.progress)
    finals = {way: [curve.metric[-1] for curve in runs] for way, runs in curves.items()}
    report = BenchReport(
        title=f"Fine-tuning on CIFAR-10's classes 5 to 9 with 75 % frozen: {job.model_name}",
        workload="fine_tune-cifar10",
        model=job.model_name,
        parameters=parameters_of(network),
        batch=job.batch,
        metric_name="accuracy",
        epochs=epochs,
        train_samples=after.samples,
        environment=environment(),
        contestants=[
            as_contestant(
                found,
                way,
                "stock" if way == "stock" else "algorithm",
                algorithms=[] if WAYS[way] is None else [AlgorithmRow(name="grad_freeze", settings=str(WAYS[way]))],
                curves=curves[way],
                quality=[] if way != "frozen+cache" else [judged(finals["frozen"], finals[way])],
            )
            for way in WAYS
        ],
        notes=["step times with all samples of the timed batches in the cache; accuracies are judged against 'frozen'"],
    )
    return [report.save(options.file("fine_tune", "cifar10"))]


def timed(way: str, job: Workload, network: nn.Module, data: Images) -> Callable[[], object]:
    count = min(8, data.steps(job.batch)) * job.batch
    supply = cycle(torch.arange(count).split(job.batch))
    step = stepper(way, job, network, data, 10_000)
    return lambda: step(next(supply))


def fine_tuned(way: str, job: Workload, network: nn.Module, data: Images, seed: int, epochs: int) -> Curve:
    per_epoch = data.steps(job.batch)
    network.train()
    step = stepper(way, job, network, data, epochs * per_epoch)
    curve = Curve(seed=seed, epochs=[], seconds=[], train_loss=[], metric=[])
    clock, seconds = Clock.of("cpu"), 0.0
    for epoch in range(epochs):
        order = torch.randperm(data.samples, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        start = clock()
        losses = [step(ids) for ids in order[: per_epoch * job.batch].split(job.batch)]
        seconds += clock() - start
        network.eval()
        curve.epochs.append(epoch + 1.0)
        curve.seconds.append(seconds)
        curve.train_loss.append(float(torch.stack(losses).mean()))
        curve.metric.append(accuracy(network, data))
        network.train()
    return curve


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
