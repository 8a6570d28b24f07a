"""``torchboost doctor``: what is installed here, how fast the machine is, and where the time of a step goes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, get_args

import torch
import typer
from torch.utils.data import DataLoader

from torchboost.bench.workloads.factory import Parts, parts_from
from torchboost.cli.device import usable_device
from torchboost.cli.environment import examine
from torchboost.cli.output import fail, print_json, print_table, user_errors
from torchboost.cli.progress import display
from torchboost.cli.small_compile import small_compile
from torchboost.core.hardware import half_precision
from torchboost.measure.machine import LOADING, Kind, Products, StepParts, copy_bandwidth, products, time_step_parts
from torchboost.measure.stopwatch import Clock, Progress

__all__ = ["doctor", "measure_machine", "measure_step", "verdict"]

GIGA = 1e9
SECONDS = 3.0
"""Time limit of a kind of product. A machine that is not busy needs a tenth of it."""


def doctor(
    factory: Annotated[
        str | None, typer.Argument(help="Also time the parts of this training's step.", metavar="[TRAIN.PY:MAKE]")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the factory's training to time.")] = 20,
    device: Annotated[str, typer.Option(help="Where the factory's model trains: cpu, cuda, ...")] = "cpu",
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Whether to time the machine; about half a minute.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Show what is installed, how fast this machine computes, and where the time of a training step goes."""
    found = examine()
    with user_errors(), display() as shown:
        try:
            parts = None if factory is None else parts_from(factory)
            where = usable_device(device)
        except ValueError as error:
            fail(str(error))
        found["measured"] = measure_machine(shown) if measure else None
        found["step"] = None if parts is None else measure_step(parts, steps=steps, device=where, progress=shown)
    if json:
        print_json(found)
        return
    print_table(["what", "found"], [*_installed(found), *_measured(found["measured"])])
    if found["step"] is not None:
        _print_step(found["step"])


def measure_machine(progress: Progress) -> dict[str, Any]:
    """Time products, copies and a small compilation, and return the figures.

    Cost: about a second on a CPU that is not busy, 0.25 GiB of memory (2 GiB on a GPU), and the compilation.
    """
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    kinds: tuple[Kind, ...] = get_args(Kind)
    total = len(devices) * (len(kinds) + 2) + 1
    done = 0

    def tell(what: str) -> None:
        nonlocal done
        progress("machine", done, total, what)
        done += 1

    figures: dict[str, Any] = {"bfloat16": {}, "products": {}, "copy_gb_per_s": {}}
    for device in devices:
        tell(f"bfloat16 in plans, {device}")
        figures["bfloat16"][device] = asdict(half_precision(device))
        figures["products"][device] = {}
        for kind in kinds:
            tell(f"{kind}, {device}")
            figures["products"][device][kind] = _figures(products(kind, device, seconds=SECONDS))
        tell(f"copy, {device}")
        figures["copy_gb_per_s"][device] = copy_bandwidth(device) / GIGA
    progress("machine", done, total, "small compilation")
    figures["small_compile"] = asdict(small_compile())
    progress("machine", total, total)
    return figures


def measure_step(
    parts: Parts,
    *,
    steps: int,
    device: torch.device,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Train the first steps of a factory's training, time their parts, and say what they mean.

    Raises:
        IncompatibleError: There are too few batches.
    """
    parts.model.to(device).train()

    def load(batch: Any) -> tuple[Any, Any]:
        inputs, targets = batch
        return inputs.to(device), targets.to(device)

    def update() -> None:
        parts.optimizer.step()
        parts.optimizer.zero_grad()

    timed = time_step_parts(
        parts.batches,
        load=load,
        forward=lambda batch: parts.loss(parts.model(batch[0]), batch[1]),
        update=update,
        steps=steps,
        clock=clock if clock is not None else Clock.of(device),
        progress=progress,
    )
    workers = parts.batches.num_workers if isinstance(parts.batches, DataLoader) else None
    return {
        "steps": timed.steps,
        "device": str(device),
        "num_workers": workers,
        "parts": {name: {"median_ms": 1e3 * timed.median(name), "share": timed.share(name)} for name in timed.seconds},
        "verdict": verdict(timed, workers),
    }


def verdict(timed: StepParts, workers: int | None) -> str:
    """Say in one sentence whether a level can help.

    Args:
        timed: The times of the parts.
        workers: ``num_workers`` of the ``DataLoader``; None if the batches are of another kind.
    """
    loading = timed.share(LOADING)
    if loading > 0.5:
        remedy = (
            "load the batches with a DataLoader and num_workers, or do less work per sample"
            if workers is None
            else f"raise num_workers (found {workers}), or do less work per sample"
        )
        return f"The loader is the bottleneck: it takes {loading:.0%} of a step, and no level helps; {remedy}."
    limit = f" If they took no time, a step would be {1 / loading:.1f} times as fast." if loading > 0.01 else ""
    return f"A level acts on forward, backward and optimizer, which take {1 - loading:.0%} of a step.{limit}"


def _figures(found: Products) -> dict[str, Any]:
    return {
        "size": found.size,
        "float32_gflop_per_s": found.float32 / GIGA,
        "bfloat16_gflop_per_s": found.bfloat16 / GIGA,
        "ratio": found.ratio,
        "pairs": found.pairs,
        "fault": found.fault,
    }


def _installed(found: dict[str, Any]) -> list[list[str]]:
    rows = [[name, version or "not installed"] for name, version in found["versions"].items()]
    rows += [
        ["python", found["python"]],
        ["platform", found["platform"]],
        ["cores", str(found["cores"])],
        ["threads of torch", str(found["threads"])],
        ["load, last minute", "not known" if found["load"] is None else f"{found['load']:.1f} programs"],
        ["GPUs", ", ".join(found["gpus"]) or "none"],
    ]
    rows += [[name, "yes" if found[key] else "no"] for name, key in _BACKENDS.items()]
    rows += [["torch.compile", found["compile"]], ["C++ compiler", found["cpp_compiler"] or "not found"]]
    for extra, missing in found["extras"].items():
        rows.append([f"extra {extra}", f"missing {', '.join(missing)}" if missing else "complete"])
    return rows


_BACKENDS = {"torch.distributed": "distributed", "gloo": "gloo", "NCCL": "nccl"}


def _measured(figures: dict[str, Any] | None) -> list[list[str]]:
    if figures is None:
        return []
    rows = []
    for device, kinds in figures["products"].items():
        for kind, speed in kinds.items():
            text = f"float32 {speed['float32_gflop_per_s']:.3g}, bfloat16 {speed['bfloat16_gflop_per_s']:.3g} GFLOP/s"
            rows.append([f"{kind}, {device}", speed["fault"] or f"{text} ({speed['size']})"])
        half = figures["bfloat16"][device]
        rows.append([f"fast bfloat16, {device}", f"{'yes' if half['fast'] else 'no'}: {half['reason']}"])
        rows.append([f"copy, {device}", f"{figures['copy_gb_per_s'][device]:.1f} GB/s, read and written bytes"])
    compiled = figures["small_compile"]
    took = compiled["fault"] if compiled["seconds"] is None else f"{compiled['seconds']:.1f} s"
    rows.append(["small compilation", took])
    return rows


def _print_step(step: dict[str, Any]) -> None:
    rows = [[name, f"{part['median_ms']:.2f}", f"{part['share']:.0%}"] for name, part in step["parts"].items()]
    typer.echo()
    print_table([f"part of a step ({step['steps']} steps, {step['device']})", "median, ms", "share"], rows)
    typer.echo(step["verdict"])
