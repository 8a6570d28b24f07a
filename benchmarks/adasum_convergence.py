"""Claim: the steps to a target with the mean and with AdaSum for growing batches, with tuned learning rates.

Ranks are simulated in one process with ``combined``, which gives what ``adasum_`` gives on real ranks. A rank always
has 32 images, so the batch grows with the ranks. Steps are counted, not seconds.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from images import endless
from options import Options, parameters_of, parser, run_own, save_result
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.measure.statistics import paired_ratio
from torchboost.workloads.data import Images, digits

BATCH = 32  # images per rank
RANKS = (1, 4, 16)
TARGET, RUNNING = 0.97, 3  # held-out accuracy, in so many evaluations running; there is one after every step
LIMIT = 800  # steps
BEYOND = 2  # points of the grid that must be worse than the best one, on either side
TUNING_SEEDS = range(3)
SEEDS = range(100, 110)
Batch = tuple[Tensor, Tensor]
Step = Callable[[list[Batch]], object]


def combined(vectors: list[Tensor]) -> Tensor:
    """Return what ``adasum_`` gives to a power of two of ranks that hold these vectors."""
    sides = [vector.double() for vector in vectors]
    while len(sides) > 1:
        sides = [_pair(a, b) for a, b in zip(sides[::2], sides[1::2], strict=True)]
    return sides[0].to(vectors[0].dtype)


def _pair(a: Tensor, b: Tensor) -> Tensor:
    product, left, right = (a * b).sum(), (a * a).sum(), (b * b).sum()
    weights = [1 - torch.where(square > 0, product / (2 * square), 0.0) for square in (left, right)]
    return weights[0] * a + weights[1] * b


def network() -> nn.Sequential:
    """Return a small network without normalisation, so that a rank's gradient depends on its own images alone."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def gradients(model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
    return torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), list(model.parameters()))


def whole(batches: list[Batch]) -> Batch:
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def of_the_mean(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Step with the gradient of all images, which is the mean over ranks of equal size."""

    def step(batches: list[Batch]) -> None:
        for param, grad in zip(model.parameters(), gradients(model, whole(batches)), strict=True):
            param.grad = grad
        optimizer.step()

    return step


def of_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Step with the adaptive sum of the gradients of the ranks."""

    def step(batches: list[Batch]) -> None:
        of_ranks = [gradients(model, batch) for batch in batches]
        for param, *grads in zip(model.parameters(), *of_ranks, strict=True):
            param.grad = combined(grads)
        optimizer.step()

    return step


def of_deltas(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Step:
    """Let the optimizer of every rank step on its own, and add the adaptive sum of the changes."""
    params = list(model.parameters())

    def delta(optimizer: torch.optim.Optimizer, batch: Batch) -> list[Tensor]:
        own = optimizer.param_groups[0]["params"]
        for mine, param, grad in zip(own, params, gradients(model, batch), strict=True):
            mine.data.copy_(param)
            mine.grad = grad
        optimizer.step()
        return [(mine - param).detach() for mine, param in zip(own, params, strict=True)]

    def step(batches: list[Batch]) -> None:
        of_ranks = [delta(optimizer, batch) for optimizer, batch in zip(optimizers, batches, strict=True)]
        for param, *deltas in zip(params, *of_ranks, strict=True):
            param.data.add_(combined(deltas))

    return step


def sgd_mean(model: nn.Module, ranks: int, lr: float) -> Step:
    return of_the_mean(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))


def sgd_adasum(model: nn.Module, ranks: int, lr: float) -> Step:
    return of_gradients(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))


def adamw_mean(model: nn.Module, ranks: int, lr: float) -> Step:
    return of_the_mean(model, torch.optim.AdamW(model.parameters(), lr=lr))


def adamw_adasum(model: nn.Module, ranks: int, lr: float) -> Step:
    copies = [[nn.Parameter(p.detach().clone()) for p in model.parameters()] for _ in range(ranks)]
    return of_deltas(model, [torch.optim.AdamW(params, lr=lr) for params in copies])


@dataclass(frozen=True)
class Way:
    """How the ranks are combined, and the learning rate at which the search starts."""

    build: Callable[[nn.Module, int, float], Step]
    start: float


WAYS = {
    "SGD": {"mean": Way(sgd_mean, 0.08), "AdaSum of gradients": Way(sgd_adasum, 0.08)},
    "AdamW": {"mean": Way(adamw_mean, 0.004), "AdaSum of deltas": Way(adamw_adasum, 0.004)},
}


def curve(data: Images, way: Way, ranks: int, lr: float, seed: int, limit: int) -> list[float]:
    """Return the held-out accuracy after every step, up to the one that reaches the target, at most ``limit``."""
    torch.manual_seed(seed)
    model = network()
    step = way.build(model, ranks, lr)
    images, labels = next(data.test(len(data.test_inputs)))
    found: list[float] = []
    for inputs, targets in endless(data, BATCH * ranks, seed):
        step(list(zip(inputs.split(BATCH), targets.split(BATCH), strict=True)))
        with torch.no_grad():
            found.append(float((model(images).argmax(1) == labels).float().mean()))
        if len(found) >= limit or steps_to_target(found) < math.inf:
            return found
    raise AssertionError("batches never end")


def steps_to_target(accuracies: list[float]) -> float:
    reached = len(accuracies) >= RUNNING and min(accuracies[-RUNNING:]) >= TARGET
    return len(accuracies) if reached else math.inf


def tuned(data: Images, way: Way, ranks: int, seeds: range, limit: int) -> dict[float, list[float]]:
    """Return the steps per seed on a grid of factor 2 that grows until the best lies inside it.

    A learning rate is abandoned at twice the steps of the best one so far, since it cannot become the best.
    """
    grid: dict[float, list[float]] = {}
    low = high = way.start
    while True:
        lr = low if low not in grid else high
        best = min((statistics.median(steps) for steps in grid.values()), default=math.inf)
        most = int(min(limit, 2 * best))
        grid[lr] = [steps_to_target(curve(data, way, ranks, lr, seed, most)) for seed in seeds]
        say(f"  lr {lr:g}: {grid[lr]}")
        order = sorted(grid)
        at = order.index(best_of(grid))
        if at < BEYOND:
            low = order[0] / 2
        elif len(order) - 1 - at < BEYOND:
            high = order[-1] * 2
        else:
            return dict(sorted(grid.items()))
        if len(grid) >= 14:
            raise RuntimeError(f"no best learning rate inside {order[0]:g} to {order[-1]:g}: {grid}")


def best_of(grid: dict[float, list[float]]) -> float:
    """Return the learning rate with the fewest steps in the median, then in the mean."""
    return min(grid, key=lambda lr: (statistics.median(grid[lr]), statistics.mean(grid[lr])))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measured(data: Images, smoke: bool) -> dict[str, dict[str, dict[str, object]]]:
    found: dict[str, dict[str, dict[str, object]]] = {}
    tuning, seeds = (range(1), range(100, 102)) if smoke else (TUNING_SEEDS, SEEDS)
    for family, ways in WAYS.items():
        for ranks in RANKS[:2] if smoke else RANKS:
            case = found.setdefault(f"{family}, {ranks} x {BATCH} images", {})
            # One rank has nothing to combine: both ways are the same.
            for name, way in list(ways.items())[: 1 if ranks == 1 else None]:
                began = time.monotonic()
                grid = tuned(data, way, ranks, tuning, LIMIT)
                lr = best_of(grid)
                curves = {seed: curve(data, way, ranks, lr, seed, LIMIT) for seed in seeds}
                steps = [steps_to_target(points) for points in curves.values()]
                case[name] = {
                    "learning rate": lr,
                    "grid": {f"{tried:g}": finite(tuning) for tried, tuning in grid.items()},
                    "steps": finite(steps),
                    "curves": {seed: [round(point, 4) for point in points] for seed, points in curves.items()},
                }
                say(f"{family} {ranks} {name}: lr {lr:g}, {steps} ({time.monotonic() - began:.0f} s)")
    return found


def finite(steps: list[float]) -> list[float | None]:
    """Return the steps for JSON: null if the target was not reached."""
    return [None if math.isinf(count) else count for count in steps]


def rows(found: dict[str, dict[str, dict]]) -> Iterator[tuple[str, ...]]:
    """Return a line per case and way: learning rate, steps, and how many times fewer than those of the mean."""
    for case, ways in found.items():
        for name, result in ways.items():
            steps = [LIMIT if count is None else count for count in result["steps"]]
            reached = sum(count is not None for count in result["steps"])
            base = [LIMIT if count is None else count for count in ways["mean"]["steps"]]
            times = paired_ratio(base, steps)
            against = "" if name == "mean" else f"{times.mid:.2f} ({times.low:.2f} to {times.high:.2f})"
            spread = f"{min(steps)} to {max(steps)}"
            share = f"{reached} of {len(steps)}"
            yield case, name, f"{result['learning rate']:g}", f"{statistics.median(steps):g}", spread, share, against


HEADINGS = ("workload", "ranks combined by", "learning rate", "steps", "range", "reached", "times fewer than the mean")


def measure(options: Options) -> Path:
    torch.set_num_threads(1)
    found = measured(digits(8), options.smoke)
    for row in rows(found):
        print(" | ".join(row))
    return save_result(
        options.file("adasum_convergence"),
        title=f"Steps to a held-out accuracy of {TARGET:.0%} in {RUNNING} evaluations running, one after each step",
        model=f"three convolutions, {parameters_of(network()):,} parameters; digits of 8 x 8, 1,437 to train on, 360 "
        f"held out; constant learning rate, at most {LIMIT} steps",
        tuning=f"grid of factor 2, widened until {BEYOND} points on either side are worse; seeds {[*TUNING_SEEDS]}, "
        "others than those of the steps reported",
        found=found,
    )


if __name__ == "__main__":
    run_own(measure, parser(__doc__).parse_args())
