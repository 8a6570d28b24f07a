"""What several commands take: a workload or a user's factory, and a device."""

from __future__ import annotations

from pathlib import Path

import torch

from torchboost.bench.factory import Factory
from torchboost.core.hardware import device_fault
from torchboost.measure.stopwatch import Progress
from torchboost.workloads.named import Workload, find_workload

__all__ = ["chosen", "loaded", "usable_device"]


def usable_device(device: str) -> torch.device:
    """Return the device that the user named.

    Raises:
        ValueError: torch does not know it, or it cannot hold a tensor here.
    """
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"--device: {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    fault = device_fault(place)
    if fault is not None:
        raise ValueError(f"--device: {device!r} cannot be used here: {fault}")
    return place


def chosen(workload: str, *, model: str | None, accuracy: bool = False, **options: object) -> Workload | Factory:
    """Return the workload with a name, or the factory that ``path/to/train.py:make`` names. No data is loaded.

    Args:
        workload: As given on the command line.
        model: Which model of a named workload.
        accuracy: Whether a factory's metric is an accuracy.
        options: What a factory makes itself, by the name of the option; None without a value.

    Raises:
        ValueError: There is no such workload or function, or an option does not fit.
    """
    if workload.endswith(".py"):
        raise ValueError(f"found {workload!r} without a function; needed: {workload}:make.")
    if not workload.rpartition(":")[0].endswith(".py"):
        if accuracy:
            raise ValueError("--accuracy: leave it out; the metric of a named workload is known.")
        return find_workload(workload if model is None else f"{workload}-{model}")
    for name, value in {"model": model, **options}.items():
        if value is not None:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: found {str(value)!r}; leave it out, since a factory builds model and data.")
    return Factory.at(workload, accuracy=accuracy)


def loaded(
    choice: Workload | Factory, data: Path | None, train_limit: int | None, device: torch.device, progress: Progress
) -> Factory:
    """Return what was chosen as a factory, with its data on a device.

    Args:
        choice: The result of :func:`chosen`.
        data: Path of the data of a named workload.
        train_limit: Number of training samples; None for all.
        device: Where to train.
        progress: Called before and after the data are loaded.
    """
    if isinstance(choice, Factory):
        return choice.limited(train_limit)
    progress("data", 0, 1, choice.title)
    samples = choice.load(data, train_limit).to(device)
    progress("data", 1, 1, choice.title)
    return choice.factory(samples, device)
