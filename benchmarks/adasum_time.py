"""Claim: AdaSum sends as many bytes as an all-reduce; the time that its exchanges and its dot products add.

The ranks are gloo processes of this machine, so that all of them share its cores and the loopback device. The bound is
an all-reduce of one flat vector: it sends as many bytes per rank, ``2 (1 - 1/n)`` times the vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from gloo_ranks import on_ranks
from inference import resnet50
from options import Options, as_contestant, parser, run, save_steps
from torch import Tensor

from torchboost.algorithms.adaptive_sum import adasum_
from torchboost.distributed.topology import NodeGroups, Topology
from torchboost.measure.evidence import Contestant
from torchboost.measure.statistics import paired_ratio
from torchboost.measure.stopwatch import Comparison, Warmup, compare, environment

BARE = "all-reduce"
LIST = "mean of the list"
ADASUM = "AdaSum of the list"
PLACED = "AdaSum of parts of one vector"
NODES = "AdaSum of the list over nodes of 2"
RANKS = (2, 4)
COUNTS = (10_000, 100_000, 1_000_000, 10_000_000)
TENSORS = 20
RESNET = "ResNet-50, 161 tensors"
Shapes = list[tuple[int, ...]]


def cases(smoke: bool) -> dict[str, Shapes]:
    if smoke:
        return {"1,000 numbers": [(50,)] * TENSORS}
    found: dict[str, Shapes] = {f"{count:,} numbers": [(count // TENSORS,)] * TENSORS for count in COUNTS}
    with torch.device("meta"):
        found[RESNET] = [tuple(param.shape) for param in resnet50().parameters()]
    return found


def mean_(tensors: list[Tensor]) -> None:
    """The extra work for a list compared with one vector: a flat copy, and the copy back."""
    flat = torch.cat([tensor.view(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def ways(shapes: Shapes, groups: NodeGroups | None) -> dict[str, Callable[[], object]]:
    torch.manual_seed(dist.get_rank())
    flat = torch.randn(sum(map(math.prod, shapes)))
    lists = {name: [torch.randn(shape) for shape in shapes] for name in (LIST, ADASUM, NODES)}

    def bare() -> None:
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())

    parts = list(torch.randn_like(flat).split([math.prod(shape) for shape in shapes]))
    found: dict[str, Callable[[], object]] = {
        BARE: bare,
        PLACED: lambda: adasum_(parts),
        LIST: lambda: mean_(lists[LIST]),
        ADASUM: lambda: adasum_(lists[ADASUM]),
    }
    if groups is not None:
        found[NODES] = lambda: adasum_(lists[NODES], groups.across, groups.inside)
    return found


def on_a_rank(smoke: bool) -> dict[str, object]:
    """Time all ways in turn in one process group."""
    rank, ranks, found = dist.get_rank(), dist.get_world_size(), dict[str, object]()
    groups = NodeGroups.of(Topology.current(2)) if ranks > 2 else None
    # Every rank makes the same number of calls, which a warm-up that ends by its own times would not.
    fixed = Warmup(least=3, window=3, limit=3, seconds=math.inf)
    for name, shapes in cases(smoke).items():
        count = sum(map(math.prod, shapes))
        pairs = 3 if smoke else 12 if count > 5_000_000 else 60
        timed = compare(ways(shapes, groups), baselines=[BARE], pairs=pairs, warmup=fixed)
        found[name] = [count, timed.samples, timed.warmup_seconds]
        if rank == 0:
            Options().progress(f"{ranks} ranks", len(found), len(cases(smoke)), name)
    return found


def contestants(ranks: int, case: str, count: int, found: Comparison) -> list[Contestant]:
    megabytes, made = 4e-6 * 2 * (1 - 1 / ranks) * count, []
    for way, samples in found.samples.items():
        notes = [f"a rank sends {megabytes:.3g} MB, so {megabytes / 1000 / found.step_seconds(way).mid:.2g} GB/s"]
        if way != BARE:
            times = paired_ratio(samples, found.samples[BARE])
            notes.append(f"{times.mid:.2f} times the all-reduce (95 %: {times.low:.2f} to {times.high:.2f})")
        kind = "stock" if way == BARE else "algorithm"
        made.append(as_contestant(found, way, kind, case=f"{ranks} ranks, {case}", notes=notes))
    return made


def measure(options: Options) -> list[Path]:
    machine = environment().model_copy(update={"threads": 1})
    made: list[Contestant] = []
    for ranks in RANKS:
        for case, (count, samples, warmup) in on_ranks(ranks, on_a_rank, options.smoke).items():
            found = Comparison(samples=samples, warmup_seconds=warmup, baselines=(BARE,))
            made += contestants(ranks, case, count, found)
    path = save_steps(
        options.file("adasum_time"),
        made,
        title="AdaSum against an all-reduce of as many numbers",
        model=f"{TENSORS} tensors of equal size; the weights of ResNet-50",
        parameters=max(COUNTS),
        machine=machine,
        notes=[
            f"float32 over gloo, all ranks on one machine of {machine.cores} cores, one thread each; more ranks than "
            "cores take turns on them"
        ],
    )
    return [path]


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
