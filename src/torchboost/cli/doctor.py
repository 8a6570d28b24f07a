"""``torchboost doctor``: installed versions, the speed of the machine, the parts of a step's time, and its waste."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import shlex
import shutil
import sys
from dataclasses import asdict
from statistics import median
from typing import Any, get_args

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.utils.collect_env import get_env_info
from torch.utils.data import DataLoader

from torchboost.bench.factory import Factory, Parts, check_step, one_epoch, outputs_of
from torchboost.bench.report.table import print_table
from torchboost.calibration.waste import waste_of
from torchboost.cli.shared import EXTRAS, Display, answer_only, print_json, usable_device, user_errors
from torchboost.core.algorithm import Target
from torchboost.core.hardware import half_precision
from torchboost.core.torch_private import compiler_follows_flags
from torchboost.errors import in_a_line
from torchboost.measure.machine import Kind, products
from torchboost.measure.stopwatch import Clock, Progress, package_version
from torchboost.sheet import percent

SECONDS = 3.0
"""Time limit of a kind of product. A machine that is not busy needs a tenth of it."""
PARTS = ("data loading", "forward", "backward", "optimizer")
WARMUP = 3
PACKAGES = ("torchboost", "torch", "pydantic", "numpy", "safetensors")


def show_doctor(factory: str | None, *, steps: int, device: str, json: bool) -> None:
    """Print installed versions, the speed of this machine, and the parts and the waste of a factory's step."""
    progress = Display(sys.stderr)
    with user_errors(progress), answer_only(json):
        parts = None if factory is None else Factory.at(factory).build(0)
        place = usable_device(device)
        facts = examine()
        figures = measure_machine(progress)
        step = None if parts is None else measure_step(parts, steps=steps, device=place, progress=progress)
        waste = None if parts is None or step is None else measure_waste(parts, step, device=place)
    if json:
        print_json({**facts, "measured": figures, "step": step, "waste": waste})
        return
    print_table(["what", "found"], [*_installed(facts), *_measured(figures)])
    if step is not None:
        rows = [[name, f"{part['median_ms']:.2f}", percent(part["share"])] for name, part in step["parts"].items()]
        typer.echo()
        print_table([f"part of a step ({step['steps']} steps, {step['device']})", "median, ms", "share"], rows)
        typer.echo(step["verdict"])
    if waste is not None:
        typer.echo()
        _print_waste(waste)


def examine() -> dict[str, Any]:
    """Return versions, processor, devices, backends, the state of the compilers and the extras.

    ``environment`` is the output of ``torch.utils.collect_env``, as in reports of bugs in torch. Cost: some seconds.
    """
    return {
        "versions": {name: package_version(name) for name in PACKAGES},
        "environment": get_env_info()._asdict(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "gpus": [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())],
        "distributed": dist.is_available(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        # pytorch issues 139476 and 162174
        "compile": "good: recompiles when requires_grad changes"
        if compiler_follows_flags()
        else "careful: older than 2.12, may reuse an old graph after requires_grad changes, so layers that were frozen "
        "once never train again; what torchboost compiles recompiles",
        "cpp_compiler": cpp_compiler(),
        "extras": {
            extra: [module for module in modules if importlib.util.find_spec(module) is None]
            for extra, modules in EXTRAS.items()
        },
    }


def cpp_compiler() -> str | None:
    """Return the path of the C++ compiler that ``torch.compile`` calls on the CPU, or None if it is not installed.

    The environment variable ``CXX`` names it. Otherwise it is g++ (clang++ on macOS, cl on Windows).
    """
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    words = shlex.split(os.environ.get("CXX", usual), posix=sys.platform != "win32")
    return shutil.which(words[0]) if words else None


def measure_machine(progress: Progress) -> dict[str, Any]:
    """Time products, and return the figures.

    Cost: about a second on a CPU that is not busy.
    """
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    kinds: tuple[Kind, ...] = get_args(Kind)
    names = [name for device in devices for name in (f"bfloat16 in plans, {device}", *kinds)]
    steps = enumerate(names)

    def tell() -> None:
        done, name = next(steps)
        progress("machine", done, len(names), name)

    figures: dict[str, Any] = {"bfloat16": {}, "products": {}}
    for device in devices:
        tell()
        figures["bfloat16"][device] = half_precision(device)._asdict()
        figures["products"][device] = {}
        for kind in kinds:
            tell()
            speed = products(kind, device, seconds=SECONDS)
            figures["products"][device][kind] = {
                "size": speed.size,
                "float32_gflop_per_s": speed.float32 / 1e9,
                "bfloat16_gflop_per_s": speed.bfloat16 / 1e9,
                "ratio": speed.ratio,
                "pairs": speed.pairs,
                "fault": speed.fault,
            }
    progress("machine", len(names), len(names))
    return figures


def measure_step(
    parts: Parts, *, steps: int, device: torch.device, progress: Progress | None = None, clock: Clock | None = None
) -> dict[str, Any]:
    """Train the first steps of a factory's training, time their parts, and say what they mean.

    The device is waited for after each part. The steps of the warm-up are not timed. To move a batch is to load it,
    and ``before_step`` is a part of the optimizer.

    Raises:
        FactoryError: There is no batch, one is neither a pair nor a dict, or the optimizer needs a closure.
    """
    check_step(parts.optimizer)
    clock = clock if clock is not None else Clock.of(device)
    parts.model.to(device).train()
    passes = itertools.count()  # without copies of what is on the device already, which a loop would not make
    epochs = (one_epoch(parts.batches, seed=0, epoch=number, device=device, copy=False) for number in passes)
    batches = itertools.chain.from_iterable(epochs)
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    for done in range(WARMUP + steps):
        marks = [clock()]
        inputs, targets = next(batches)
        marks.append(clock())
        loss = parts.loss(outputs_of(parts, parts.model, inputs), targets)
        marks.append(clock())
        loss.backward()
        marks.append(clock())
        if parts.before_step is not None:
            parts.before_step(parts.model)
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        marks.append(clock())
        if done >= WARMUP:
            for part, start, end in zip(PARTS, marks, marks[1:], strict=False):
                seconds[part].append(end - start)
        if progress is not None:
            progress("steps", done + 1, WARMUP + steps)
    # Totals are compared and not medians: workers deliver several batches at once, and then let the loop wait.
    total = sum(map(sum, seconds.values())) or 1.0
    shares = {part: sum(times) / total for part, times in seconds.items()}
    workers = parts.batches.num_workers if isinstance(parts.batches, DataLoader) else None
    return {
        "steps": steps,
        "device": str(device),
        "num_workers": workers,
        "parts": {part: {"median_ms": 1e3 * median(seconds[part]), "share": shares[part]} for part in PARTS},
        "verdict": verdict(shares[PARTS[0]], workers),
    }


class _WithLoss(nn.Module):
    """The model of a factory with its loss, so that a pass sees the labels."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.model, self._parts = parts.model, parts
        named: Any = (getattr(module, "get_output_embeddings", None) for module in parts.model.modules())
        heads = [each for each in named if callable(each) and isinstance(each(), nn.Linear)]
        if heads:
            self.get_output_embeddings = heads[0]

    def forward(self, inputs: Any, targets: Any) -> Any:
        """Return the loss of a batch."""
        return self._parts.loss(outputs_of(self._parts, self.model, inputs), targets)


def measure_waste(
    parts: Parts, step: dict[str, Any], *, device: torch.device, clock: Clock | None = None
) -> dict[str, Any]:
    """Measure on one batch what a step of a training wastes, of which ``step`` is the :func:`measure_step`."""
    call = next(one_epoch(parts.batches, seed=0, epoch=0, device=device))
    target = Target(_WithLoss(parts).train(), parts.optimizer)
    try:
        report = waste_of(target, (call, {}), clock=clock, root="")
    except Exception as error:  # earlier measurements are still shown
        return {"fault": in_a_line(error), "step_ms": None, "kinds": []}
    loading = min(step["parts"][PARTS[0]]["share"], 0.999)
    report = report.with_waiting(
        report.step_seconds * loading / (1 - loading),
        "timed with the steps above",
        "torchboost.loader(loader) loads ahead in workers if that pays; or do less work per sample",
    )
    return {"fault": "", "step_ms": 1e3 * report.step_seconds, "kinds": [asdict(waste) for waste in report.kinds]}


def _print_waste(waste: dict[str, Any]) -> None:
    if waste["fault"]:
        typer.echo(f"The waste of a step was not measured: {waste['fault']}")
        return
    rows, notes = [], []
    for kind in waste["kinds"]:
        known = kind["seconds"] is not None
        figures = [f"{1e3 * kind['seconds']:.2f}", percent(kind["share"])] if known else ["not known", ""]
        rows.append([kind["kind"], *figures])
        remedy = f" Remedy: {kind['remedy']}." if kind["remedy"] else ""
        notes.append(f"{kind['kind']}: {kind['found']}.{remedy}")
    print_table(["waste of a step", "ms", "share"], rows)
    typer.echo("\n".join(notes))


def verdict(loading: float, workers: int | None) -> str:
    """Say in one sentence whether a level can help, given the share of data loading and ``num_workers``, if any."""
    if loading > 0.5:
        remedy = (
            "load the batches with a DataLoader and num_workers, or do less work per sample"
            if workers is None
            else f"raise num_workers (found {workers}), or do less work per sample"
        )
        share = percent(loading)
        return f"The loader is the bottleneck: it takes {share} of a step, and no level helps; {remedy}."
    limit = f" If they took no time, a step would be {1 / loading:.1f} times as fast." if loading > 0.01 else ""
    return f"A level acts on forward, backward and optimizer, which take {percent(1 - loading)} of a step.{limit}"


def _installed(facts: dict[str, Any]) -> list[list[str]]:
    environment, load = facts["environment"], facts["load"]
    return [
        *(list(entry) for entry in facts["versions"].items()),
        ["python", environment["python_version"]],
        ["system", f"{environment['os']}, {environment['python_platform']}"],
        ["cores", str(facts["cores"])],
        ["threads of torch", str(facts["threads"])],
        ["load, last minute", "not known" if load is None else f"{load:.1f} programs"],
        ["GPUs", ", ".join(facts["gpus"]) or "none"],
        ["GPU driver", environment["nvidia_driver_version"] or "none"],
        *(
            [n, "yes" if facts[k] else "no"]
            for n, k in (("torch.distributed", "distributed"), ("gloo", "gloo"), ("NCCL", "nccl"))
        ),
        ["torch.compile", facts["compile"]],
        ["C++ compiler", facts["cpp_compiler"] or "not found"],
        *([f"extra {e}", f"missing {', '.join(gone)}" if gone else "complete"] for e, gone in facts["extras"].items()),
    ]


def _measured(figures: dict[str, Any]) -> list[list[str]]:
    rows = []
    for device, kinds in figures["products"].items():
        for kind, speed in kinds.items():
            text = f"float32 {speed['float32_gflop_per_s']:.3g}, bfloat16 {speed['bfloat16_gflop_per_s']:.3g} GFLOP/s"
            rows.append([f"{kind}, {device}", speed["fault"] or f"{text} ({speed['size']})"])
        half = figures["bfloat16"][device]
        rows.append([f"fast bfloat16, {device}", f"{'yes' if half['fast'] else 'no'}: {half['reason']}"])
    return rows
