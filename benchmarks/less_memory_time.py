"""Claim: what a step of AdamW costs with stochastic rounding and with moments in 8 bits, on ResNet-50."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from optimizer_rules import weights
from optimizer_step import resnet50
from options import Options, parser, run, timed_contestants

from torchboost.measure.evidence import BenchReport
from torchboost.measure.stopwatch import compare, environment
from torchboost.optim import AdamW

BARE = "float32"
WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    BARE: (torch.float32, {}),
    "float32, moments in 8 bits": (torch.float32, {"moments_8bit": True}),
    "bfloat16, float32 masters": (torch.bfloat16, {"master_weights": True}),
    "bfloat16, stochastic rounding": (torch.bfloat16, {"master_weights": "stochastic"}),
    "bfloat16, both": (torch.bfloat16, {"master_weights": "stochastic", "moments_8bit": True}),
}


def optimizer(dtype: torch.dtype, options: dict[str, Any]) -> AdamW:
    params = weights(resnet50)
    for param in params:
        grad = param.grad
        assert grad is not None
        param.grad = None
        param.data = param.data.to(dtype)
        param.grad = grad.to(dtype)
    return AdamW(params, lr=1e-3, **options)


def measure(options: Options) -> list[Path]:
    steps = {way: optimizer(dtype, given).step for way, (dtype, given) in WAYS.items()}
    found = compare(steps, baselines=[BARE], pairs=2 if options.smoke else 20)
    report = BenchReport(
        title="A step of AdamW that keeps less: ResNet-50",
        workload="less_memory_time-resnet50",
        model="ResNet-50",
        parameters=sum(param.numel() for param in resnet50().parameters()),
        batch=1,
        metric_name="none",
        environment=environment(),
        contestants=timed_contestants(found, WAYS, BARE),
    )
    return [report.save(options.file("less_memory_time", "resnet50"))]


if __name__ == "__main__":
    run([measure], parser(__doc__).parse_args())
