"""One training of a candidate: build, train, evaluate, and take the times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.bench.factory import Parts, loss_of, made_by, metric_of, one_epoch, scheduled
from torchboost.core.torch_private import compiled_graphs, forget_compiled
from torchboost.distributed.agreement import mean_over_ranks, several
from torchboost.front import Boosted, boost
from torchboost.measure.machine import PeakMemory
from torchboost.measure.stopwatch import Clock, Stopwatch
from torchboost.tuning.report import BLOCK, Candidate, Run

__all__ = ["LEAST_STEPS", "Training", "boosted_by"]

LEAST_STEPS = 2
"""The first step of a run is its set-up, so the time of a step is known from the second on."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Trains candidates from a factory.

    Args:
        make: ``make(seed) -> (model, optimizer, loss, batches, evaluate[, schedule])``.
        recipes: The factories of candidates that have their own, by name.
        steps: Updates of a run of stock.
        device: Where the batches go; the factory puts the model there.
        told: Called with the candidate, the seed, and the share of the run that is done.
    """

    make: Callable[[int], object]
    recipes: Mapping[str, Callable[[int], object]] = field(default_factory=dict)
    steps: int
    device: torch.device
    told: Callable[[Candidate, int, float], None] = lambda candidate, seed, share: None

    def __call__(self, candidate: Candidate, seed: int, limit: float = math.inf, /) -> Run:
        """Train once. The random generators are as before afterwards; ranks get the numbers of the first one.

        What an earlier training compiled is forgotten, so that each one pays for its own compilation; the compiler's
        cache on disk stays. If the steps after the first one take longer than ``limit`` seconds, without compilation,
        the training is stopped: in one process after that step, on several ranks on all of them at the end of a block
        of 20 steps. An error of a candidate is part of the run: its ``failure``. An error of stock is raised.
        """
        started = time.perf_counter()
        forget_compiled()
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            try:
                with PeakMemory(self.device) as peak:
                    run = self._run(candidate, seed, limit)
            except Exception as error:
                if not (candidate.extra or candidate.recipe):
                    raise
                return _agreed(_failed(candidate, seed, self.steps, error, time.perf_counter() - started))
            return _agreed(run.model_copy(update={"peak_bytes": peak.bytes}))

    def _run(self, candidate: Candidate, seed: int, limit: float) -> Run:
        clock = Clock.of(self.device)
        steps = max(LEAST_STEPS, round(candidate.share * self.steps))
        whole, setup, rest = Stopwatch(clock), Stopwatch(clock), Stopwatch(clock)
        compiling = _Compiling(clock)
        metric, too_slow, diverged = math.nan, False, False
        with whole:
            with setup:
                parts = made_by(self.recipes[candidate.name] if candidate.recipe else self.make, seed)
                step = _stepper(parts, candidate, steps)
                batches = _batches(parts.batches, seed, self.device)
                curve = _Curve(step(*next(batches)))
            with rest:
                for done in range(1, steps):
                    with compiling:
                        curve.add(step(*next(batches)))
                    ends = done % BLOCK == BLOCK - 1
                    if ends or (limit < math.inf and not several()):
                        too_slow = curve.seconds(without=compiling.seconds) > limit
                    if ends:
                        self.told(candidate, seed, done / steps)
                        diverged = not curve.close_block() and _has_diverged(parts.model)
                    if too_slow or diverged:
                        break
            diverged = diverged or (not math.isfinite(curve.last()) and _has_diverged(parts.model))
            if not (too_slow or diverged):
                metric = _evaluated(parts)
        return Run(
            name=candidate.name,
            seed=seed,
            steps=steps,
            metric=metric,
            losses=curve.means,
            first_loss=curve.first(),
            last_loss=curve.last(),
            setup_seconds=setup.seconds + compiling.seconds,
            seconds=compiling.spread(rest.seconds, steps - 1),
            wall_seconds=whole.seconds,
            too_slow=too_slow,
        )


class _Compiling:
    """Adds up the steps in which something was compiled, such as the first one with inputs of another shape."""

    def __init__(self, clock: Clock) -> None:
        self.seconds, self.steps = 0.0, 0
        self._clock, self._began, self._graphs = clock, 0.0, 0

    def __enter__(self) -> None:
        self._graphs, self._began = compiled_graphs(), self._clock.read()

    def __exit__(self, *_: object) -> None:
        if compiled_graphs() != self._graphs:
            self.seconds += self._clock() - self._began
            self.steps += 1

    def spread(self, seconds: float, steps: int) -> float:
        """Return the seconds that so many steps take without compilation, from those that they took with it."""
        left = steps - self.steps
        return (seconds - self.seconds) * steps / left if left > 0 else seconds


class _Curve:
    """The mean training loss of every block of steps, over all ranks, which thus end a diverged run together."""

    def __init__(self, loss: Tensor) -> None:
        self.means: list[float] = []
        self._first, self._last, self._block = loss, loss, [loss]
        self._began = time.perf_counter()

    def add(self, loss: Tensor) -> None:
        self._last = loss
        self._block.append(loss)

    def close_block(self) -> bool:
        """Note the mean of the finite losses of the block, if there are any, and return whether all are finite."""
        values = torch.stack(self._block).double()
        finite = values.isfinite()
        share = mean_over_ranks(finite.double().mean())
        mean = mean_over_ranks(values.where(finite, 0.0).sum() / finite.sum().clamp(min=1))
        self._block = []
        if share > 0:
            self.means.append(float(f"{mean:.6g}"))
        return share == 1.0

    def seconds(self, *, without: float) -> float:
        """Return how long ago the first loss was known, without some of these seconds, the mean over all ranks."""
        return mean_over_ranks(torch.tensor(time.perf_counter() - self._began - without, device=self._last.device))

    def first(self) -> float:
        return mean_over_ranks(self._first)

    def last(self) -> float:
        return mean_over_ranks(self._last)


def _has_diverged(model: nn.Module) -> bool:
    """Return whether a weight or a buffer of any rank is not finite; a single loss that is not may be harmless."""
    found = (t.detach() for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() or t.is_complex())
    tensors = [getattr(t, "to_local", lambda t=t: t)() for t in found]
    local = any(not bool(t.isfinite().all()) for t in tensors)
    device = tensors[0].device if tensors else torch.device("cpu")
    return mean_over_ranks(torch.tensor(float(local), device=device)) > 0


def _failed(candidate: Candidate, seed: int, steps: int, error: Exception, seconds: float) -> Run:
    said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return Run(
        name=candidate.name,
        seed=seed,
        steps=steps,
        metric=math.nan,
        setup_seconds=seconds,
        seconds=0.0,
        wall_seconds=seconds,
        failure=said,
    )


def boosted_by(parts: Parts, extra: dict[str, Any], steps: int) -> Boosted:
    """Boost model and optimizer with the algorithms of a section ``extra`` and nothing else.

    Raises:
        ConfigError, IncompatibleError, ValueError: They cannot work on this pair.
    """
    return boost(parts.model, parts.optimizer, level="O0", config={"extra": extra}, total_steps=steps, calibrate=False)


def _stepper(parts: Parts, candidate: Candidate, steps: int) -> Callable[[Any, Any], Tensor]:
    model: nn.Module = parts.model
    optimizer: Optimizer = parts.optimizer
    if any(value is not False for value in candidate.extra.values()):
        model, optimizer = boosted_by(parts, candidate.extra, steps)
    schedule = scheduled(parts, optimizer, steps)
    model.train()

    def step(inputs: Any, targets: Any) -> Tensor:
        loss = loss_of(parts.loss, model(inputs), targets)
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _batches(epoch: Iterable[Any], seed: int, device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Yield batches without end. All candidates get the same ones in the same order."""
    batches = list(epoch) if isinstance(epoch, Iterator) else epoch  # a generator can be read only once
    for number in count():
        yield from one_epoch(batches, seed=seed, epoch=number, device=device)


def _evaluated(parts: Parts) -> float:
    """Compute the metric without another compilation of the model."""
    parts.model.eval()
    with torch.compiler.set_stance("force_eager"):
        return metric_of(parts, parts.model)


def _agreed(run: Run) -> Run:
    """Return the run of the first rank, with the times of the slowest one."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return run
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, run)
    times = ("setup_seconds", "seconds", "wall_seconds")
    return found[0].model_copy(update={name: max(getattr(one, name) for one in found) for name in times})
