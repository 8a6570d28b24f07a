"""Question: is ``boost(..., task="fine_tune")`` worth more than full fine-tuning with fewer steps, and than LoRA?

A ResNet learns CIFAR-10's classes 0 to 4 and is then fine-tuned on few images of 5 to 9, without augmentation. All ways
get the same search over the learning rate, on images that are held out, with a seed of its own: three rates, and up to
two more while the best one is at an edge. Then each way runs with its own rate and fresh seeds, which draw head and
order. Times are those of one thread's processor time, of boosting and training, without evaluation. Levers are off.

Each run is saved when it ends; ``--resume`` continues. ``--trunk FILE`` keeps the weights of the first training.
"""

from __future__ import annotations

import copy
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from images import of_classes
from options import Options, options_of, parameters_of, parser, save_result
from torch import nn
from torch.optim import Optimizer

import torchboost
from torchboost.bench.report.table import Table
from torchboost.front import boosted_of
from torchboost.measure.statistics import paired_difference
from torchboost.optim import layer_wise_decay, param_groups
from torchboost.workloads.data import Images, cifar10
from torchboost.workloads.named import Workload, accuracy, find_workload

JOB = "cifar10-resnet-basic"
FILE = "fine_tune_rivals"
IMAGES, HELD_OUT, TESTS, EPOCHS, BATCH = 2_000, 1_000, 2_500, 6, 32
RATES, MOST_RATES, FACTOR = (0.01, 0.03, 0.1), 5, 3
SEARCH_SEED, SEEDS = 100, 3
DECAY, RANK = 0.75, 8


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to fine-tune.

    Args:
        steps: Share of the steps.
        frozen: Number of blocks that ``task="fine_tune"`` freezes; None boosts nothing.
        dtype: In which it keeps their outputs.
        layer_wise: Whether the rate falls towards the input.
        lora: Whether adapters and the head are trained alone.
    """

    steps: float = 1.0
    frozen: int | None = None
    dtype: str | None = None
    layer_wise: bool = False
    lora: bool = False


EVERYTHING = "everything"
WAYS: dict[str, Way] = {
    EVERYTHING: Way(),
    "everything, 1/2 of the steps": Way(steps=1 / 2),
    "everything, 1/4 of the steps": Way(steps=1 / 4),
    "everything, 1/8 of the steps": Way(steps=1 / 8),
    "task, 5 of 10 blocks frozen": Way(frozen=5),
    "task, 7 of 10 blocks frozen": Way(frozen=7),
    "task, head only": Way(frozen=9),
    "LoRA, rank 8, 1/2 of the steps": Way(lora=True, steps=1 / 2),
    "task, 7 frozen, twice the steps": Way(frozen=7, steps=2),
    "task, 5 frozen, twice the steps": Way(frozen=5, steps=2),
    "task, 5 frozen, bfloat16": Way(frozen=5, dtype="bfloat16"),
    "task, 5 frozen, rates by layer": Way(frozen=5, layer_wise=True),
}


def learned(job: Workload, data: Images, epochs: int) -> nn.Module:
    """A network that has learned ``data``."""
    network = job.model(data, 0)
    optimizer = job.optimizer(network.parameters())
    schedule = job.schedule(optimizer, epochs * data.steps(job.batch))
    for epoch in range(epochs):
        for inputs, targets in data.train(job.batch, seed=0, epoch=epoch):
            job.loss(network(inputs), targets).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return network


def prepared(way: Way, network: Any, job: Workload, lr: float, steps: int) -> tuple[nn.Module, Optimizer]:
    if way.lora:
        import peft

        convolutions = [name for name, module in network.named_modules() if isinstance(module, nn.Conv2d)]
        settings = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=convolutions, modules_to_save=["fc"])
        network = peft.get_peft_model(network, settings)
        return network, job.optimizer([p for p in network.parameters() if p.requires_grad], lr=lr)
    groups: Any = network.parameters()
    if way.layer_wise:
        groups = param_groups(network, layer_wise_decay(network, lr, factor=DECAY))
    optimizer = job.optimizer(groups, lr=lr)
    if way.frozen is not None:
        config = {"extra": torchboost.fine_tuning(network, frozen=way.frozen, dtype=way.dtype)}
        torchboost.boost(network, optimizer, level="O0", config=config, total_steps=steps)
    return network, optimizer


def fine_tuned(
    way: Way, job: Workload, network: Any, data: Images, lr: float, seed: int, epochs: int
) -> dict[str, Any]:
    """One run, with the accuracy on the test images of ``data``."""
    network = copy.deepcopy(network)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network.fc = nn.Linear(network.fc.in_features, data.classes)
    network.train()
    steps = max(1, round(way.steps * epochs * data.steps(BATCH)))
    began = time.process_time()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network, optimizer = prepared(way, network, job, lr, steps)
    schedule, done, epoch = job.schedule(optimizer, steps), 0, 0
    while done < steps:
        for inputs, targets in data.train(BATCH, seed=seed, epoch=epoch):
            if done == steps:
                break
            job.loss(network(inputs), targets).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done += 1
        epoch += 1
    seconds = time.process_time() - began
    boosted = boosted_of(optimizer)
    freezing: Any = None if boosted is None else boosted.attached["grad_freeze"]
    kept = 0 if freezing is None else freezing.fast.report().bytes
    network.eval()
    return {
        "lr": lr,
        "seed": seed,
        "steps": steps,
        "seconds": seconds,
        "accuracy": accuracy(network, data),
        "bytes": kept,
    }


def searched(run: Callable[[float], dict[str, Any]], known: list[dict[str, Any]], save: Callable[[], object]) -> None:
    """Run three rates, and more while the best one is at an edge."""
    rates = list(RATES)
    while True:
        for lr in rates:
            if not any(one["lr"] == lr for one in known):
                known.append(run(lr))
                save()
        best, tried = best_rate(known), sorted(one["lr"] for one in known)
        if len(tried) >= MOST_RATES or tried[0] < best < tried[-1]:
            return
        rates = [round(best / FACTOR if best == tried[0] else best * FACTOR, 6)]


def best_rate(runs: list[dict[str, Any]]) -> float:
    return max(runs, key=lambda one: one["accuracy"])["lr"]


def measure(options: Options, trunk: Path | None) -> Path:
    torch.set_num_threads(1)
    job, path = find_workload(JOB), options.file(FILE, "cifar10")
    few = (96, 32, 32, 1, 1) if options.smoke else (IMAGES, HELD_OUT, TESTS, EPOCHS, 4)
    images, held_out, tests, epochs, first_epochs = few
    every = cifar10(options.data, train_limit=640 if options.smoke else 40_000)
    if trunk is not None and trunk.is_file():
        network: Any = job.model(of_classes(every, 0, 5), 0)
        network.load_state_dict(torch.load(trunk))
    else:
        network = learned(job, of_classes(every, 0, 5), first_epochs)
        if trunk is not None:
            torch.save(network.state_dict(), trunk)
    after = replace(of_classes(every, 5, 5), shift=0, flip=False)
    end = images + held_out
    train = {"train_inputs": after.train_inputs[:images], "train_labels": after.train_labels[:images]}
    held = {"test_inputs": after.train_inputs[images:end], "test_labels": after.train_labels[images:end]}
    validation = replace(after, **train, **held)
    data = replace(after, **train, test_inputs=after.test_inputs[:tests], test_labels=after.test_labels[:tests])
    found: dict[str, Any] = json.loads(path.read_text())["ways"] if options.resume and path.is_file() else {}
    about = {"parameters": parameters_of(network), "model": job.model_name}
    about |= {"images": images, "held_out": held_out, "tests": tests, "epochs": epochs, "batch": BATCH}
    save = functools.partial(save_result, path, **about, ways=found)
    for name, way in WAYS.items():
        runs = found.setdefault(name, {"way": asdict(way), "search": [], "runs": []})

        def search(lr: float, way: Way = way, name: str = name) -> dict[str, Any]:
            options.progress(f"rate {lr}", 0, 1, name)
            return fine_tuned(way, job, network, validation, lr, SEARCH_SEED, epochs)

        searched(search, runs["search"], save)
        for seed in range(len(runs["runs"]), 1 if options.smoke else SEEDS):
            options.progress("seed", seed, SEEDS, name)
            runs["runs"].append(fine_tuned(way, job, network, data, best_rate(runs["search"]), seed, epochs))
            save()
    return path


def table(folder: Path) -> tuple[Table, str]:
    """The table of the pages."""
    path = folder / f"{FILE}-cifar10.json"
    report = json.loads(path.read_text())
    env = report["environment"]
    stock, rows = report["ways"][EVERYTHING]["runs"], []

    def time_of(found: dict[str, Any]) -> float:
        return statistics.median(run["seconds"] for run in (*found["search"], *found["runs"]))

    base = time_of(report["ways"][EVERYTHING])
    for name, found in report["ways"].items():
        runs = found["runs"]
        seconds = time_of(found)
        points = [100 * (one["accuracy"] - other["accuracy"]) for one, other in zip(runs, stock, strict=True)]
        against = paired_difference([0.0] * len(points), points) if name != EVERYTHING and len(points) > 1 else None
        span = "" if against is None else f"{against.mid:+.1f} ({against.low:+.1f} to {against.high:+.1f})"
        memory = f"{runs[0]['bytes'] / 2**20:.0f} MiB" if runs[0]["bytes"] else ""
        mean = 100 * statistics.mean(run["accuracy"] for run in runs)
        rows.append(
            (name, f"{runs[0]['lr']:g}", f"{seconds:.1f} s", f"{seconds / base:.2f}", f"{mean:.1f}", span, memory)
        )
    headings = ("way", "rate", "a run", "of the time", "accuracy, %", "points against everything", "cache")
    sizes = f"{report['images']:,} images, {report['epochs']} epochs, batch {report['batch']}, {len(stock)} seeds"
    said = (
        f"{report['model']}, {report['parameters']:,} parameters, {sizes}, {report['tests']:,} test images. "
        f"{env['processor']}, 1 thread, median processor time of all runs of a way, torch {env['torch']}. "
        f"Raw figures: `benchmarks/results/{path.name}`."
    )
    return Table(headings=headings, rows=tuple(rows)), said


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--trunk", type=Path, help="file for the weights of the first training; read if it exists")
    arguments = made.parse_args()
    print(f"wrote {measure(options_of(arguments), arguments.trunk)}")
