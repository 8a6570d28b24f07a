"""What the check of the speed levers at the first training call costs, as a share of a run of 1,000 steps.

The first call of a boosted model with the check, against the first call without it; in turns, on new models.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from options import Options, parser, run_own, save_result
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.bench.report.table import Table
from torchboost.front import boost
from torchboost.workloads.models import Bottleneck, ResNet

STEPS = 1_000
LEVERS = {"channels_last": True, "autocast": True, "fused_optimizer": True}


def resnet() -> nn.Module:
    return ResNet(Bottleneck, [2, 2, 2, 2], width=16)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Flatten(), nn.Linear(128 * 32, 10))


def perceptron() -> nn.Module:
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet of 26 layers, 64 images of 32 x 32": (resnet, (64, 3, 32, 32)),
    "transformer encoder of 4 layers, 32 x 32 tokens": (encoder, (32, 32, 128)),
    "perceptron of 3 layers, 128 images of 28 x 28": (perceptron, (128, 784)),
}


def seconds(make: Callable[[], nn.Module], inputs: Tensor, labels: Tensor, *, verify: bool) -> tuple[float, float]:
    """Return the seconds of the first step, and of a later one."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    extra = {name: on for name, on in LEVERS.items() if name != "channels_last" or inputs.ndim == 4}
    boost(model, optimizer, total_steps=STEPS, calibrate=False, verify=verify, config={"extra": extra})
    times = []
    for _ in range(6):
        began = time.perf_counter()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    return times[0], median(times[2:])


def measure(options: Options) -> Path:
    rounds = 2 if options.smoke else 9
    found = {}
    for title, (make, shape) in CASES.items():
        generator = torch.Generator().manual_seed(0)
        inputs, labels = torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator)
        rows = []
        for number in range(rounds):
            order = (True, False) if number % 2 else (False, True)
            both = {verify: seconds(make, inputs, labels, verify=verify) for verify in order}
            rows.append([both[True][0] - both[False][0], both[True][1]])
        passes = median(check / step for check, step in rows)
        found[title] = {"samples": rows, "passes": passes, "share": passes / STEPS}
        print(f"{title}: {passes:.1f} steps, {passes / STEPS:.2%} of {STEPS} steps", flush=True)
    return save_result(options.file("certificate", "price"), steps=STEPS, cases=found)


def table(file: Path) -> Table:
    """Return the price of the check in steps, and as a share of a run."""
    content = json.loads(file.read_text(encoding="utf-8"))
    lines = [(title, f"{one['passes']:.1f}", f"{one['share']:.2%}") for title, one in content["cases"].items()]
    headings = ("network and batch", "steps that the check takes", f"share of {content['steps']:,} steps")
    return Table(headings=headings, rows=tuple(lines))


if __name__ == "__main__":
    run_own(measure, parser(__doc__).parse_args())
