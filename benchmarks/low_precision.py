"""Claim: moments in 8 bits, and bfloat16 weights rounded stochastically, reach the loss of full precision.

A GPT on text by characters is trained by AdamW at its best rate, with five seeds: in float32, with moments in 8 bits,
and with bfloat16 weights with masters, with stochastic rounding, and with neither. An eighth of that rate is also run,
with updates that are small for bfloat16. Each run is saved when it ends, and the script continues where it stopped.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from fewer_steps_workloads import Workload, gpt_characters
from options import Options, parser, run_own
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.bench.report.table import Table
from torchboost.measure.statistics import paired_difference
from torchboost.measure.stopwatch import environment
from torchboost.optim import AdamW
from torchboost.workloads.named import one_cycle

SEEDS, STEPS = 5, 600
BEST, SMALL = 0.008, 0.001
BASELINE = "float32"
WAYS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "float32, moments in 8 bits": {"moments_8bit": True},
    "bfloat16, float32 masters": {"master_weights": True},
    "bfloat16, stochastic rounding": {"master_weights": "stochastic"},
    "bfloat16, stochastic rounding, moments in 8 bits": {"master_weights": "stochastic", "moments_8bit": True},
    "bfloat16, rounded to nearest": {},
}
CASES = [(way, BEST) for way in WAYS] + [
    (way, SMALL) for way in (BASELINE, "bfloat16, stochastic rounding", "bfloat16, rounded to nearest")
]


def trained(work: Workload, way: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    model, stream = work.model(seed), work.batches(seed)
    if way.startswith("bfloat16"):
        model.bfloat16()
    optimizer = AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=work.weight_decay, **WAYS[way])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: one_cycle(t, steps, warmup=work.warmup))
    model.train()
    for _ in range(steps):
        inputs, targets = next(stream)
        work.loss(model(inputs).float(), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    metrics = work.evaluate(model, "test")
    loss = metrics["loss"] if math.isfinite(metrics["loss"]) else math.inf
    about = {"way": way, "rate": rate, "seed": seed, "steps": steps}
    return {**about, "loss": loss, "bytes": bytes_per_weight(model, optimizer)}


def bytes_per_weight(model: nn.Module, optimizer: Optimizer) -> float:
    """Return the bytes of weights and state, without gradients."""
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    total = sum(one.numel() * one.element_size() for one in (*held, *model.parameters()))
    return total / sum(param.numel() for param in model.parameters())


def measure(options: Options) -> Path:
    work, file = gpt_characters(options), options.file("low_precision", "gpt-characters")
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.is_file() else []
    steps = 8 if options.smoke else STEPS
    for seed in range(2 if options.smoke else SEEDS):
        for way, rate in CASES:
            if any((one["way"], one["rate"], one["seed"]) == (way, rate, seed) for one in runs):
                continue
            runs.append(trained(work, way, rate, seed, steps))
            about = {"title": work.title, "steps": steps, "environment": environment().model_dump()}
            file.write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n", encoding="utf-8")
            print(json.dumps(runs[-1]), flush=True)
    return file


def table(file: Path) -> tuple[Table, str]:
    """Return the table of the runs and a sentence about them."""
    result = json.loads(file.read_text(encoding="utf-8"))
    losses = {
        case: {one["seed"]: one["loss"] for one in result["runs"] if (one["way"], one["rate"]) == case}
        for case in CASES
    }
    lines = []
    for (way, rate), found in losses.items():
        if len(found) < 2:
            continue
        full = losses[BASELINE, rate]
        seeds = sorted(found.keys() & full.keys())
        mean = sum(found.values()) / len(found)
        gap = paired_difference([full[s] for s in seeds], [found[s] for s in seeds])
        difference = "" if way == BASELINE else f"{gap.low:+.3f} to {gap.high:+.3f}"
        held = next(one["bytes"] for one in result["runs"] if one["way"] == way)
        lines.append((way, f"{rate}", f"{held:.1f}", f"{mean:.3f}", difference))
    head = ("weights", "rate", "bytes per weight", "loss", "difference, 95 %")
    where = result["environment"]
    said = (
        f"{result['title']}, {result['steps']} steps of AdamW, loss on test data, "
        f"{len(losses[BASELINE, BEST])} seeds. Bytes are those of weights and state, without gradients. "
        f"{where['processor']}, torch {where['torch']}. All runs: `benchmarks/results/{file.name}`."
    )
    return Table(headings=head, rows=tuple(lines)), said


if __name__ == "__main__":
    run_own(measure, parser(__doc__).parse_args())
