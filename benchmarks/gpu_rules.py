"""A step of every rule on a GPU next to torch's, on GPT-2 small's weights: time, time of the host, waits, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from gpu_record import DEVICE, Results, Row, Task, Turn, figures, host
from inference import small_resnet
from optimizer_rules import Case, cases, missing, of, table, torch_forms, weights
from optimizer_step import by_hand, gpt2_small
from torch import nn

from torchboost import optim
from torchboost.measure.machine import PeakMemory
from torchboost.measure.stopwatch import Clock, compare

OURS = "torchboost"
ON_THE_CPU = ("AdamOffload, on the CPU",)
CALLS = 5
FIRST_STEPS = 3
Params = list[nn.Parameter]


def halved(params: Params) -> Params:
    made = []
    for param in params:
        half = nn.Parameter(param.detach().bfloat16())
        assert param.grad is not None
        half.grad = param.grad.bfloat16()
        made.append(half)
    return made


def matrices(params: Params) -> Params:
    """Return those that Muon takes: matrices other than the two embeddings, which come first."""
    return [param for param in params[2:] if param.ndim == 2] or [p for p in params if p.ndim == 2]


def device_cases() -> dict[str, Case]:
    """Return the forms that matter on a GPU; ``optimizer_rules.cases`` has all others."""
    decay: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
    moving: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9}
    adamw = torch_forms(torch.optim.AdamW, ("fused", "foreach"), **decay)
    transforms = (optim.Centralize(), optim.ClipNorm(1.0))

    def halves(**options: Any) -> Callable[[Params], Any]:
        return lambda params: optim.AdamW(halved(params), **decay, **options)

    return {
        "AdamW, fused, centralise and clip": Case(
            ours=of(optim.AdamW, **decay, fused=True, transforms=transforms),
            peers={"torch fused, both by hand": lambda params: SimpleNamespace(step=by_hand(params)), **adamw},
        ),
        "AdamW, bfloat16 with masters": Case(ours=halves(master_weights=True), peers=adamw),
        "AdamOffload": Case(ours=of(optim.AdamOffload, **decay), peers=adamw),
        "AdamOffload, buffers of 256 MiB": Case(ours=of(optim.AdamOffload, **decay, chunk_mebibytes=256), peers=adamw),
        "Muon": Case(
            ours=lambda params: optim.Muon(matrices(params), lr=0.02),
            peers={"torch Muon": lambda params: torch.optim.Muon(matrices(params), lr=0.02)},
        ),
        "ScheduleFreeAdamW": Case(ours=of(optim.ScheduleFreeAdamW, **decay), peers=adamw),
        "ScheduleFreeSGD": Case(
            ours=of(optim.ScheduleFreeSGD, lr=0.1), peers=torch_forms(torch.optim.SGD, ("fused", "foreach"), **moving)
        ),
    }


def rules(task: Task, results: Results) -> Mapping[str, Turn]:
    found = {**device_cases(), **{name: case for name, case in cases().items() if name not in ON_THE_CPU}}
    absent = missing(found)
    return {name: Turn(partial(measure, case, absent, task), 6) for name, case in found.items()}


def measure(case: Case, absent: set[str], task: Task) -> Row:
    """Time a rule and its peers in the same rounds; for each also the host, its waits and the memory it adds."""
    peers = {way: build for way, build in case.peers.items() if case.wants.get(way) not in absent}
    clock, steps, memory = Clock.of(DEVICE), {}, {}
    for way, build in {OURS: case.ours, **peers}.items():
        with torch.device(DEVICE):
            params = table() if case.sparse else weights(small_resnet if task.tiny else gpt2_small)
        with PeakMemory(DEVICE) as peak:
            steps[way] = build(params).step
            for _ in range(FIRST_STEPS):
                steps[way]()
        memory[way] = peak.bytes
    found = compare(steps, baselines=list(peers), pairs=task.pairs, calls=CALLS, clock=clock)
    rows = {way: {**figures(found, way), **host(steps[way], clock), "peak_bytes": memory[way]} for way in steps}
    return {**rows.pop(OURS), "peers": rows}
