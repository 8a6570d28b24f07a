"""The number of threads that compute on the CPU: one per core, within the quota of a container."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import check_count
from torchboost.core.hardware import cpu_quota, device_of
from torchboost.distributed.topology import Topology

_SYSTEM = Path("/")
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def compute_with_threads(count: int) -> Attachment:
    """Let this process compute with ``count`` threads on the CPU.

    Calls ``torch.set_num_threads``, which holds for the whole process. Sums in kernels may be added in another order.

    Args:
        count: At least 1.

    Returns:
        Its ``remove()`` restores the number from before, unless the program has set another one since.

    Raises:
        ValueError: ``count`` is below 1.

    Example:
        >>> import torch
        >>> before = torch.get_num_threads()
        >>> with compute_with_threads(1):
        ...     torch.get_num_threads()
        1
        >>> torch.get_num_threads() == before
        True
    """
    check_count("count", count, of="threads")
    before = torch.get_num_threads()

    def restore() -> None:
        if torch.get_num_threads() == count:
            torch.set_num_threads(before)

    torch.set_num_threads(count)
    return Attachment(undo=restore)


@dataclass(frozen=True, kw_only=True)
class Threads(Algorithm):
    """Applies :func:`compute_with_threads`.

    Args:
        count: None takes the first of these that torch does not use already: the quota of the container, the cores
            without hyper-threads, all hyper-threads.
    """

    name: ClassVar[str] = "threads"
    traits: ClassVar[Traits] = Traits(order=5, each_optimizer=True)

    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            check_count("count", self.count, of="threads")

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that the model is not on the CPU, that ranks share the cores, or that there is no other number."""
        device = device_of(model)
        if device.type != "cpu":
            return f"the model is on {device.type}"
        if self.count is not None:
            return None
        if Topology.current().world_size > 1:
            return "the ranks share the cores"
        chosen = next((f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ), None)
        if chosen is not None:
            return f"the program has chosen {chosen}"
        if not counts():
            return f"{torch.get_num_threads()} threads are as many as there are cores, or the program has set them"
        return None

    def attach(self, target: Target) -> Attachment:
        """Set the number of threads of the process."""
        count = self.count or next(iter(counts()), None)
        return Attachment() if count is None else compute_with_threads(count)


def counts(root: Path = _SYSTEM) -> list[int]:
    """Return the numbers of threads that may be better than torch's, the likeliest first.

    Args:
        root: Of the file system.
    """
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    logical = len(available) or os.cpu_count() or 1
    cores = {_siblings(root, cpu) for cpu in available}
    physical = logical if "" in cores or not cores else len(cores)
    quota, current = cpu_quota(root / "sys/fs/cgroup"), torch.get_num_threads()
    if current not in (physical, logical):
        return []  # the program has set it
    within = [number if quota == math.inf else min(number, math.ceil(quota)) for number in (physical, logical)]
    return [number for number in dict.fromkeys(within) if number != current]


def _siblings(root: Path, cpu: int) -> str:
    """Return the hyper-threads of the core of a processor, as the system writes them, empty if it does not."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return ""
