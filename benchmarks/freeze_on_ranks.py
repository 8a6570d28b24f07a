"""Claim: on several ranks freezing saves the communication of the frozen part too, without find_unused_parameters.

Two ranks of gloo on this machine, one thread each, the first half of the blocks of a ResNet frozen. DDP whose reducer
is rebuilt is compared with the other ways of freezing under DDP, and with ``replicate`` of FSDP2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from freeze_savings import frozen_blocks
from gloo_ranks import on_ranks
from options import Options, as_contestant, parameters_of, parser, run, save_steps
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from torchboost.algorithms.grad_freeze.algorithm import GradFreeze, freeze_blocks
from torchboost.algorithms.grad_freeze.checks import rebuild_reducer
from torchboost.distributed.agreement import Agreement
from torchboost.graph.blocks import blocks_of
from torchboost.measure.evidence import AlgorithmRow, Contestant
from torchboost.measure.stopwatch import Comparison, Warmup, compare, environment
from torchboost.workloads.models import Bottleneck, ResNet

BATCH = 16
SHARE = 50
FIGURES = {"updates": 1, "frozen groups": 0, "parameters": 100, "seed": 0, "settings": 2**31}

Step = Callable[[], object]


def network() -> ResNet:
    torch.manual_seed(0)
    return ResNet(Bottleneck, [2, 2, 2, 2], width=32)


def freeze_by_hand(model: nn.Module) -> None:
    for block in blocks_of(model)[: frozen_blocks(network(), SHARE)]:
        for parameter in block.parameters:
            parameter.requires_grad_(False)


def without_frozen_buckets(state, bucket):
    """A communication hook that sends a bucket only if one of its parameters trains.

    DDP refuses annotations that are strings, as all of this file are.
    """
    if any(parameter.requires_grad for parameter in bucket.parameters()):
        return allreduce_hook(state, bucket)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def contestants() -> dict[str, Step]:
    """All ways, each with a network of its own; built in the same order on all ranks."""
    ways: dict[str, nn.Module] = {"ddp": DistributedDataParallel(network())}
    for name, options in {
        "find_unused": {},
        "find_unused+skip": {"skip_all_reduce_unused_params": True},
        "find_unused+hook": {},
    }.items():
        ddp = DistributedDataParallel(network(), find_unused_parameters=True, **options)
        if name == "find_unused+hook":
            ddp.register_comm_hook(None, without_frozen_buckets)
        freeze_by_hand(ddp)
        ways[name] = ddp
    ways |= {name: DistributedDataParallel(network()) for name in ("grad_freeze", "grad_freeze, no check")}
    ways["replicate"] = sharded_by_block(network())
    ways["replicate+grad_freeze"] = sharded_by_block(network())
    return {name: training(model, name) for name, model in ways.items()}


def sharded_by_block(model: ResNet) -> nn.Module:
    for stage in model.stages:
        for block in stage:  # pyright: ignore[reportGeneralTypeIssues]
            replicate(block)
    return replicate(model)


def training(model: nn.Module, name: str) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if "grad_freeze" in name:
        settings = GradFreeze(
            pattern="fixed",
            groups=len(blocks_of(model)),
            frozen=frozen_blocks(network(), SHARE),
            agree_within=0 if "no check" in name else 30,
        )
        freeze_blocks(model, optimizer, settings)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs, targets = torch.randn(BATCH, 3, 32, 32, generator=generator), torch.arange(BATCH) % 10

    def step() -> None:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def gradients_sent(step: Step) -> float:
    """MiB of float32 that this rank hands to reductions in one step, as the profiler saw gloo's collectives."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        step()
    counted = Counter[str]()
    for event in recorded.events() or []:
        if event.name in ("gloo:all_reduce", "gloo:reduce_scatter"):
            for shape, dtype in zip(event.input_shapes, event.input_dtypes, strict=True):
                counted[dtype] += math.prod(shape)
    return 4 * counted["float"] / 2**20


def rebuilding(view: bool) -> float:
    """Median seconds of building a reducer again."""
    ddp = DistributedDataParallel(network(), gradient_as_bucket_view=view)
    for _ in range(2):
        ddp(torch.zeros(2, 3, 32, 32)).sum().backward()
    return median([seconds(lambda: rebuild_reducer(ddp)) for _ in range(10)])


def checking(calls: int) -> float:
    """Median seconds of the check before a pass if all ranks arrive at the same time."""
    agreement = Agreement(range(dist.get_world_size()), subject="a benchmark")
    for _ in range(calls // 5):
        agreement.check(FIGURES, hint="")
    found = median([seconds(lambda: agreement.check(FIGURES, hint="")) for _ in range(calls)])
    agreement.close()
    return found


def seconds(call: Callable[[], object]) -> float:
    begun = perf_counter()
    call()
    return perf_counter() - begun


def steps_on_a_rank(smoke: bool) -> dict[str, object]:
    ways = contestants()
    # A fixed number of calls to warm up: all ranks must make the same ones.
    warmup = Warmup(least=5, limit=5, seconds=math.inf)
    found = compare(ways, baselines=["ddp", "find_unused"], pairs=2 if smoke else 40, warmup=warmup)
    return {
        "samples": dict(found.samples),
        "warmup": dict(found.warmup_seconds),
        "mebibytes": {name: gradients_sent(step) for name, step in ways.items()},
        "rebuilding": [rebuilding(view) for view in (False, True)],
    }


def check_on_a_rank(smoke: bool) -> float:
    return checking(50 if smoke else 2000)


def measure(options: Options) -> list[Path]:
    options.progress("ranks", 0, 3, "check on 2 and 4 ranks")
    checks = {ranks: on_ranks(ranks, check_on_a_rank, options.smoke) for ranks in (2, 4)}
    options.progress("ranks", 2, 3, "steps")
    raw = on_ranks(2, steps_on_a_rank, options.smoke)
    options.progress("ranks", 3, 3)
    found = Comparison(samples=raw["samples"], warmup_seconds=raw["warmup"], baselines=("ddp", "find_unused"))
    plain, views = (1e3 * taken for taken in raw["rebuilding"])
    path = save_steps(
        options.file("freeze_on_ranks", "resnet"),
        [contestant(name, found, raw["mebibytes"]) for name in found.samples],
        title=f"Freezing {SHARE} % of a ResNet on two ranks",
        model="ResNet bottleneck [2, 2, 2, 2], width 32",
        parameters=parameters_of(network()),
        batch=BATCH,
        machine=environment().model_copy(update={"threads": 1}),
        notes=[
            "2 gloo ranks on one machine, 1 thread each, eager float32; bytes of gradients counted by the profiler",
            f"reducer built again: {plain:.1f} ms, {views:.1f} ms with gradient_as_bucket_view=True",
            *(
                f"check of {len(FIGURES)} figures on {n} ranks: {1e6 * taken:.0f} microseconds"
                for n, taken in checks.items()
            ),
        ],
    )
    return [path]


def contestant(name: str, found: Comparison, mebibytes: dict[str, float]) -> Contestant:
    ours = "grad_freeze" in name
    share = mebibytes[name] / mebibytes["ddp"]
    return as_contestant(
        found,
        name,
        "algorithm" if ours else "stock" if name == "ddp" else "hand",
        algorithms=[AlgorithmRow(name="grad_freeze", settings=f"the first {SHARE} % of the blocks")] if ours else [],
        notes=[f"{mebibytes[name]:.1f} MiB of gradients sent per step, {100 * share:.0f} % of plain DDP"],
    )


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
