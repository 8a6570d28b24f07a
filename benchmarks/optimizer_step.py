"""Claim: centralise, clip, decay and update in a pipeline cost as much as by hand, twice as much as the update alone.

The shares of the memory bound are those of the bytes an update must move: weights and both moments read and written,
gradients read; a pipeline with clipping reads the gradients once more.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from inference import VOCABULARY, resnet50, small_resnet
from options import Options, as_contestant, parameters_of, parser, run, save_steps
from torch import nn
from torch.nn.utils import clip_grad_norm_

from torchboost.measure.evidence import Contestant
from torchboost.measure.statistics import bootstrap_median
from torchboost.measure.stopwatch import Comparison, compare
from torchboost.optim.pipeline import GradientPipeline
from torchboost.optim.rules.adam import AdamWeightDecay
from torchboost.optim.transforms import Centralize, ClipNorm
from torchboost.workloads.models import GPT

BARE = "torch fused, nothing before it"
NORM = 1.0
SETTINGS = {"lr": 1e-3, "weight_decay": 0.01}
PASSES = {"update": 7, "pipeline": 8}
"""Floats moved per weight."""

Step = Callable[[], object]


def gpt2_small() -> nn.Module:
    return GPT(VOCABULARY, context=1024)


def tiny() -> nn.Module:
    return nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(2000))


def one_matrix() -> nn.Module:
    return nn.Linear(5000, 10_000, bias=False)


CASES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "resnet50": ("ResNet-50", resnet50),
    "gpt2-small": ("GPT, 12 layers, width 768", gpt2_small),
    "tiny": ("2,000 matrices of 8 x 8", tiny),
    "one": ("one matrix of 50 million weights", one_matrix),
}


def weights(make: Callable[[], nn.Module]) -> list[nn.Parameter]:
    """Return parameters with gradients; none of the steps measured here depends on their values."""
    torch.manual_seed(0)
    params = [nn.Parameter(p.detach().clone()) for p in make().parameters()]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def fused(params: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, fused=True, **SETTINGS)


def bare(params: list[nn.Parameter]) -> Step:
    return fused(params).step


def ours(params: list[nn.Parameter]) -> Step:
    return AdamWeightDecay(params, eps=1e-8, bias_correction=True, fused=True, **SETTINGS).step


def by_hand(params: list[nn.Parameter]) -> Step:
    optimizer = fused(params)

    def step() -> None:
        with torch.no_grad():
            for param in params:
                if param.ndim > 1 and param.grad is not None:
                    param.grad.sub_(param.grad.mean(tuple(range(1, param.ndim)), keepdim=True))
        clip_grad_norm_(params, NORM)
        optimizer.step()

    return step


def hooked(params: list[nn.Parameter]) -> Step:
    optimizer = fused(params)
    GradientPipeline(Centralize(), ClipNorm(NORM)).attach(optimizer)
    return optimizer.step


def sgd(params: list[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True)


def bare_sgd(params: list[nn.Parameter]) -> Step:
    return sgd(params).step


def hooked_sgd(params: list[nn.Parameter]) -> Step:
    optimizer = sgd(params)
    GradientPipeline(Centralize(), ClipNorm(NORM)).attach(optimizer)
    return optimizer.step


def inside(params: list[nn.Parameter]) -> Step:
    transforms = (Centralize(), ClipNorm(NORM))
    return AdamWeightDecay(params, eps=1e-8, bias_correction=True, fused=True, transforms=transforms, **SETTINGS).step


def peer(params: list[nn.Parameter]) -> Step:
    centralize = importlib.import_module("pytorch_optimizer.optimizer.gradient_centralization").centralize_gradient
    optimizer = fused(params)

    def step() -> None:
        with torch.no_grad():
            for param in params:
                if param.grad is not None:
                    centralize(param.grad)
        clip_grad_norm_(params, NORM)
        optimizer.step()

    return step


WAYS: dict[str, Callable[[list[nn.Parameter]], Step]] = {
    BARE: bare,
    "torchboost fused, nothing before it": ours,
    "pipeline by hand, torch fused": by_hand,
    "GradientPipeline, torch fused": hooked,
    "transforms of torchboost's fused AdamW": inside,
}
SGD = {"torch fused SGD, nothing before it": bare_sgd, "GradientPipeline, torch fused SGD": hooked_sgd}
BARE_SGD = next(iter(SGD))
PEER = "pytorch_optimizer's centralisation, torch fused"


def ways() -> dict[str, Callable[[list[nn.Parameter]], Step]]:
    """All that can run here; timm has no gradient centralisation."""
    found = importlib.util.find_spec("pytorch_optimizer")
    return {**WAYS, **({} if found is None else {PEER: peer}), **SGD}


def measure(options: Options) -> list[Path]:
    return [measure_case(name, options) for name in CASES]


def measure_case(name: str, options: Options) -> Path:
    title, make = ("small ResNet", small_resnet) if options.smoke else CASES[name]
    chosen = ways()
    found = compare(
        {way: build(weights(make)) for way, build in chosen.items()},
        baselines=[BARE, BARE_SGD],
        pairs=3 if options.smoke else 60,
        progress=options.progress,
    )
    count = parameters_of(make())
    return save_steps(
        options.file("optimizer_step", name),
        [contestant(way, found, count) for way in chosen],
        title=f"One optimizer step: {title}",
        model=title,
        parameters=count,
        notes=["centralise, clip to a global norm of 1, decay, update; AdamW in float32"],
    )


def contestant(way: str, found: Comparison, count: int) -> Contestant:
    seconds = found.step_seconds(way)
    passes = PASSES["update"] if "nothing" in way else PASSES["pipeline"]
    if "SGD" in way:
        passes -= 2  # it keeps one moment
    base = BARE_SGD if way in SGD else BARE
    pairs = zip(found.samples[way], found.samples[base], strict=True)
    times = bootstrap_median([own / bare for own, bare in pairs])
    notes = [f"moves at least {4e-9 * passes * count:.2f} GB, so {4e-9 * passes * count / seconds.mid:.0f} GB/s"]
    if way != base:
        notes.append(f"{times.mid:.2f} times the bare step (95 %: {times.low:.2f} to {times.high:.2f})")
    return as_contestant(found, way, "stock" if way == BARE else "algorithm", notes=notes)


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
