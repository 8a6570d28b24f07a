"""Claim: on the CPU, choosing a backend of scaled_dot_product_attention by hand makes it no faster.

torch chooses a kernel for each call. Against this choice stand the fused kernel ("flash") and the plain operations
("math"), forward and backward, in three shapes and two precisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from options import Options, parser, run, save_steps, timed_contestants
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from torchboost.measure.evidence import Contestant
from torchboost.measure.stopwatch import compare

SHAPES = {
    "64 images, 3 heads, 65 tokens, width 64": ((64, 3, 65, 64), False),
    "16 texts, 4 heads, 128 tokens, width 32, causal": ((16, 4, 128, 32), True),
    "2 texts, 8 heads, 1,024 tokens, width 64, causal": ((2, 8, 1024, 64), True),
}
PRECISIONS = (torch.float32, torch.bfloat16)
CHOICES = {
    "torch's choice": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "math": [SDPBackend.MATH],
}


def step_of(shape: tuple[int, ...], causal: bool, dtype: torch.dtype, backends: list[SDPBackend]) -> Callable[[], None]:
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(shape, dtype=dtype)

    def step() -> None:
        with sdpa_kernel(backends):
            found = scaled_dot_product_attention(*inputs, is_causal=causal)
        torch.autograd.grad(found, inputs, gradient)

    return step


def measure(options: Options) -> list[Path]:
    made: list[Contestant] = []
    for title, (shape, causal) in SHAPES.items():
        for dtype in PRECISIONS:
            case = f"{title}, {str(dtype).removeprefix('torch.')}"
            ways = {f"{case}: {name}": step_of(shape, causal, dtype, order) for name, order in CHOICES.items()}
            base = next(iter(ways))
            found = compare(ways, baselines=[base], pairs=3 if options.smoke else 40, progress=options.progress)
            made += timed_contestants(found, ways, base)
    path = save_steps(
        options.file("attention", "cpu"),
        made,
        title="Backends of scaled_dot_product_attention on the CPU, forward and backward",
        model="scaled_dot_product_attention",
        parameters=sum(3 * math.prod(shape) for shape, _ in SHAPES.values()),
    )
    return [path]


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
