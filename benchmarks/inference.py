"""Claim: the copy for inference is at least as fast as the network in eval mode, and compiles as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from options import Options, as_contestant, parameters_of, parser, run, save_steps
from torch import Tensor, nn

from torchboost.compat.auto_boost import AutoBoost
from torchboost.measure.evidence import Contestant
from torchboost.measure.stopwatch import Clock, Comparison, compare, environment
from torchboost.workloads.models import GPT, Bottleneck, ResNet

VOCABULARY = 50257
STOCK = "network.eval()"
COMPILED = "torch.compile(network.eval())"
COPY = "fast copy"
CHOSEN = "fast copy with sample="
BOTH = "torch.compile(fast copy)"

Case = tuple[str, Callable[[], nn.Module], Callable[[], Tensor]]


class InvertedResidual(nn.Module):
    """Widen, filter each channel alone, narrow again; adds its input if the shapes allow."""

    def __init__(self, inside: int, outside: int, stride: int, widen: int) -> None:
        super().__init__()
        wide = inside * widen
        layers = [] if widen == 1 else norm_act(inside, wide, 1)
        narrow = [nn.Conv2d(wide, outside, 1, bias=False), nn.BatchNorm2d(outside)]
        self.layers = nn.Sequential(*layers, *norm_act(wide, wide, 3, stride, wide), *narrow)
        self.skips = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.skips else self.layers(x)


def norm_act(inside: int, outside: int, side: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inside, outside, side, stride, side // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outside), nn.ReLU6(inplace=True)]


def mobilenet(stages: Sequence[tuple[int, int, int, int]]) -> nn.Module:
    """MobileNetV2; every stage is (widening, channels, blocks, stride)."""
    layers, width = norm_act(3, 32, 3, 2), 32
    for widen, channels, count, stride in stages:
        for block in range(count):
            layers.append(InvertedResidual(width, channels, stride if block == 0 else 1, widen))
            width = channels
    layers += [*norm_act(width, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)]
    return nn.Sequential(*layers)


MOBILENET = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]


def images(batch: int, side: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(batch, 3, side, side)


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(vocabulary, (batch, length))


def resnet50() -> nn.Module:
    return ResNet(Bottleneck, [3, 4, 6, 3], classes=1000, stem="imagenet")


def small_resnet() -> nn.Module:
    return ResNet(Bottleneck, [1, 1], classes=10, width=8)


GPT_TITLE = "GPT, 12 layers, width 768, 128 tokens"
CASES: dict[str, Case] = {
    "resnet50": ("ResNet-50 at 224 pixels", resnet50, images(8, 224)),
    "resnet50-single": ("ResNet-50 at 224 pixels, one image", resnet50, images(1, 224)),
    "mobilenet": ("MobileNetV2 at 224 pixels", lambda: mobilenet(MOBILENET), images(8, 224)),
    "mobilenet-single": ("MobileNetV2 at 224 pixels, one image", lambda: mobilenet(MOBILENET), images(1, 224)),
    "gpt": (GPT_TITLE, lambda: GPT(VOCABULARY, context=128), tokens(1, 128, VOCABULARY)),
}
SMOKE: dict[str, Case] = {
    "resnet50": ("small ResNet", small_resnet, images(2, 32)),
    "mobilenet": ("small MobileNet", lambda: mobilenet(MOBILENET[:2]), images(2, 32)),
    "gpt": ("small GPT", lambda: GPT(64, context=16, layers=1, heads=2, width=32), tokens(1, 16, 64)),
}


def measure(options: Options) -> list[Path]:
    return [measure_case(name, case, options) for name, case in (SMOKE if options.smoke else CASES).items()]


def measure_case(name: str, case: Case, options: Options) -> Path:
    title, make, draw = case
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, sample = make().to(device), draw().to(device)
    if not isinstance(network, GPT):
        with torch.no_grad():
            network(sample)  # so that the statistics are not the initial ones
    forms = ways(network.eval(), sample, compiled=options.compiled and not options.smoke)
    with torch.inference_mode():
        found = compare(
            {way: lambda form=form: form(sample) for way, form in forms.items()},
            baselines=[way for way in (STOCK, COMPILED) if way in forms],
            pairs=3 if options.smoke else 40,
            clock=Clock.of(device),
            progress=options.progress,
        )
    return save_steps(
        options.file("inference", name),
        [contestant(way, found, forms[way]) for way in forms],
        title=f"Inference: {title}",
        model=title,
        parameters=parameters_of(network),
        batch=len(sample),
        machine=environment(device),
        notes=["float32, in torch.inference_mode(); compiling is in the time of warming up"],
    )


def ways(network: nn.Module, sample: Tensor, *, compiled: bool) -> dict[str, nn.Module]:
    booster = AutoBoost("O1")
    copy = booster.network_auto_process_eval(network)
    with torch.inference_mode():
        copy(sample)  # its check
    forms = {STOCK: network, COPY: copy, CHOSEN: booster.network_auto_process_eval(network, sample=sample)}
    if compiled:
        forms |= {COMPILED: compile_(network), BOTH: compile_(copy)}
    return forms


def compile_(network: nn.Module) -> nn.Module:
    made = torch.compile(network)
    assert isinstance(made, nn.Module)
    return made


def contestant(way: str, found: Comparison, form: nn.Module) -> Contestant:
    norms = sum(isinstance(module, nn.BatchNorm2d) for module in form.modules())
    last = any(
        p.ndim == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last)
        for p in form.parameters()
    )
    chosen = f"chose {'channels-last' if last else 'contiguous'} memory, {norms} BatchNorms left"
    kind = "stock" if way == STOCK else "hand" if way == COMPILED else "level"
    return as_contestant(found, way, kind, notes=[chosen] if way == CHOSEN else [])


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
