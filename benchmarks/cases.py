"""The networks and data on which levels and freezing are tried: about 1,000 steps a run, those of the digits 140."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from images import of_classes
from options import Options
from torch import nn

from torchboost.bench.factory import made_by
from torchboost.workloads.data import Images, cifar10
from torchboost.workloads.named import Workload, find_workload


@dataclass(frozen=True)
class Case:
    """A job with its data.

    Args:
        title: For the table.
        job: The job; ``epochs`` passes over the data are a run.
        data: Its data.
    """

    title: str
    job: Workload
    data: Any


def images(options: Options, job: Workload) -> Case:
    job = replace(job, batch=32, epochs=2)
    data = job.load(options.data, 320 if options.smoke else 16_000)
    return Case(f"{job.model_name} on CIFAR-10", job, data)


def digits(options: Options) -> Case:
    job = find_workload("digits-resnet")
    return Case(f"{job.model_name} on digits", job, job.load(None, None))


def fine_tuning(options: Options) -> Case:
    """A network that has learned classes 0 to 4 learns classes 5 to 9, of which it has seen none."""
    job = replace(find_workload("cifar10-resnet-basic"), batch=32, epochs=2)
    every = cifar10(options.data).held_out().limited(320 if options.smoke else 32_000)
    before, after = of_classes(every, 0, 5), of_classes(every, 5, 5)
    network = _trained(replace(job, batch=64), before)

    def build(data: Any) -> nn.Module:
        made = copy.deepcopy(network)
        nn.init.normal_(made.fc.weight, std=0.01)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        return made

    slower = replace(job, name="fine-tuning", build=build, optimizer=lambda p, **k: job.optimizer(p, lr=0.02, **k))
    return Case(f"fine-tuning a {job.model_name} on five classes of CIFAR-10", slower, after)


def _trained(job: Workload, data: Images) -> nn.Module:
    parts = made_by(job.factory(data).make, 0)
    steps = data.steps(job.batch)
    assert parts.schedule is not None
    schedule = parts.schedule(parts.optimizer, steps)
    for inputs, targets in parts.batches:
        parts.loss(parts.model(inputs), targets).backward()
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        schedule.step()
    return parts.model


WORKLOADS: dict[str, Callable[[Options], Case]] = {
    "digits": digits,
    "resnet-basic": lambda options: images(options, find_workload("cifar10-resnet-basic")),
    "resnet-bottleneck": lambda options: images(options, find_workload("cifar10-resnet-bottleneck-small")),
    "vgg": lambda options: images(options, find_workload("cifar10-vgg")),
    "fine-tuning": fine_tuning,
}


def job_of(name: str) -> Workload:
    """Return a job with the metric and the drops of a case."""
    return find_workload("digits-resnet" if name == "digits" else "cifar10-resnet-basic")
