"""Claim: on the CPU, flat buffers for weights, gradients and moments make a step no faster if tensors are large.

A flat buffer makes the update one kernel over one tensor, clipping one norm, the exchange one all-reduce. Against it
stands that gradients must be *added* into a buffer that was zeroed, where a backward pass otherwise hands over
the tensors that it made. The update is measured with and without that; the exchange on two gloo processes of this
machine, against buckets of 25 MiB as DDP sends them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from gloo_ranks import on_ranks
from inference import small_resnet
from optimizer_step import CASES, SETTINGS, Step
from options import Options, as_contestant, parser, run, save_steps
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from torchboost.measure.evidence import Contestant
from torchboost.measure.statistics import paired_ratio
from torchboost.measure.stopwatch import Comparison, Warmup, compare
from torchboost.optim.rules.adam import AdamWeightDecay

LIST, FLAT, FILLED = "a tensor each", "flat buffers", "flat buffers, gradients zeroed and added"
BUCKETS, ONE = "buckets of 25 MiB", "one flat buffer"
BUCKET = 25 * 2**20 // 4
NORM = 1.0


def shapes_of(make: Callable[[], nn.Module]) -> list[tuple[int, ...]]:
    return [tuple(param.shape) for param in make().parameters()]


def cases(smoke: bool) -> dict[str, list[tuple[int, ...]]]:
    if smoke:
        return {"small ResNet": shapes_of(small_resnet)}
    found = {title: shapes_of(make) for title, make in CASES.values()}
    return found | {"2,000 tensors of 64": [(64,)] * 2000, "2,000 tensors of 4,096": [(64, 64)] * 2000}


def filled(shapes: list[tuple[int, ...]], *, flat: bool) -> list[nn.Parameter]:
    """Return parameters with gradients: as many tensors, or one over all entries."""
    torch.manual_seed(0)
    sizes = [(sum(map(math.prod, shapes)),)] if flat else shapes
    params = [nn.Parameter(torch.randn(size)) for size in sizes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def step_of(params: list[nn.Parameter]) -> Step:
    """Return a step of the update alone, behind clipping."""
    optimizer = AdamWeightDecay(params, eps=1e-8, bias_correction=True, fused=True, **SETTINGS)

    def step() -> None:
        clip_grad_norm_(params, NORM)
        optimizer.step()

    return step


def with_filling(params: list[nn.Parameter], fresh: list[Tensor], step: Step) -> Step:
    """Zero the buffer and add to it what a backward pass makes, tensor by tensor."""
    buffer = params[0].grad
    assert buffer is not None
    views = buffer.split([tensor.numel() for tensor in fresh])

    def whole() -> None:
        buffer.zero_()
        for view, tensor in zip(views, fresh, strict=True):
            view.add_(tensor)
        step()

    return whole


def updates(shapes: list[tuple[int, ...]]) -> dict[str, Step]:
    apart, flat, filling = filled(shapes, flat=False), filled(shapes, flat=True), filled(shapes, flat=True)
    fresh = [torch.randn(math.prod(shape)) for shape in shapes]
    return {
        LIST: step_of(apart),
        FLAT: step_of(flat),
        FILLED: with_filling(filling, fresh, step_of(filling)),
    }


def exchanges(shapes: list[tuple[int, ...]]) -> dict[str, Step]:
    flat = torch.randn(sum(map(math.prod, shapes)))
    buckets = flat.clone().split(BUCKET)

    def in_buckets() -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            assert work is not None
            work.wait()

    return {BUCKETS: in_buckets, ONE: lambda: dist.all_reduce(flat)}


def on_a_rank(smoke: bool) -> dict[str, object]:
    """Time both exchanges in turn."""
    # Every rank makes the same number of calls, which a warm-up that ends by its own times would not.
    fixed = Warmup(least=2, window=2, limit=2, seconds=math.inf)
    found: dict[str, object] = {}
    for name, shapes in cases(smoke).items():
        timed = compare(exchanges(shapes), baselines=[BUCKETS], pairs=3 if smoke else 12, warmup=fixed)
        found[name] = [timed.samples, timed.warmup_seconds]
    return found


def contestants(case: str, found: Comparison, base: str) -> list[Contestant]:
    made = [as_contestant(found, base, "stock", case=case)]
    for way in (way for way in found.samples if way != base):
        times = paired_ratio(found.samples[way], found.samples[base])
        said = f"{times.mid:.2f} times {base} (95 %: {times.low:.2f} to {times.high:.2f})"
        made.append(as_contestant(found, way, case=case, notes=[said]))
    return made


def measure(options: Options) -> list[Path]:
    made: list[Contestant] = []
    for case, shapes in cases(options.smoke).items():
        found = compare(updates(shapes), baselines=[LIST], pairs=3 if options.smoke else 40, progress=options.progress)
        made += contestants(f"{case}, fused", found, LIST)
    for case, (samples, warmup) in on_ranks(2, on_a_rank, options.smoke).items():
        found = Comparison(samples=samples, warmup_seconds=warmup, baselines=(BUCKETS,))
        made += contestants(f"{case}, exchange on 2 ranks", found, BUCKETS)
    path = save_steps(
        options.file("flat_buffers", "all"),
        made,
        title="Flat buffers against a tensor each: clipping and AdamW, and the exchange of gradients",
        model="lists of tensors",
        parameters=sum(math.prod(shape) for shapes in cases(options.smoke).values() for shape in shapes),
    )
    return [path]


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
