"""One training of a candidate: build, train, evaluate, and take the times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchboost.bench.factory import Parts, loop_body, made_by, metric_of, one_epoch
from torchboost.core.torch_private import compiled_graphs, forget_compiled
from torchboost.distributed.agreement import mean_over_ranks, several
from torchboost.front import Boosted, boost
from torchboost.measure.machine import PeakMemory
from torchboost.measure.stopwatch import Clock
from torchboost.tuning.report import BLOCK, Candidate, Run

__all__ = ["LEAST_STEPS", "Training", "boosted_by"]

LEAST_STEPS = 2
"""The first step of a run is its set-up, so the time of a step is known from the second on."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Trains candidates from a factory.

    Args:
        make: ``make(seed) -> (model, optimizer, loss, batches, evaluate[, schedule])``.
        steps: Updates of a run of stock.
        device: Where the batches go; the factory puts the model there.
        told: Called with the candidate and the seed after every 20 steps.
    """

    make: Callable[[int], object]
    steps: int
    device: torch.device
    told: Callable[[Candidate, int], None] = lambda candidate, seed: None

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
                run = run.model_copy(update={"peak_bytes": peak.bytes})
            except Exception as error:
                if not candidate.extra:
                    raise
                spent = time.perf_counter() - started
                run = Run(
                    name=candidate.name,
                    seed=seed,
                    steps=self.steps,
                    metric=math.nan,
                    setup_seconds=spent,
                    seconds=0.0,
                    wall_seconds=spent,
                    failure=f"{type(error).__name__}: {error}".splitlines()[0][:200],
                )
            return _agreed(run)

    def _run(self, candidate: Candidate, seed: int, limit: float) -> Run:
        clock, steps = Clock.of(self.device), max(LEAST_STEPS, round(candidate.share * self.steps))
        began = clock()
        parts = made_by(self.make, seed)
        step, batches = _stepper(parts, candidate, steps), _batches(parts.batches, seed, self.device)
        first = loss = step(*next(batches))
        ready = clock()
        block, means, metric, too_slow, diverged = [first], [], math.nan, False, False
        # Steps in which something was compiled, such as the first one with inputs of another shape, are set-up too.
        compiling, compiled_steps = 0.0, 0
        for done in range(1, steps):
            graphs, start = compiled_graphs(), clock.read()
            loss = step(*next(batches))
            block.append(loss)
            if compiled_graphs() != graphs:
                compiling, compiled_steps = compiling + clock() - start, compiled_steps + 1
            ends = done % BLOCK == BLOCK - 1
            if ends or (limit < math.inf and not several()):
                spent = torch.tensor(clock.read() - ready - compiling, device=loss.device)
                too_slow = mean_over_ranks(spent) > limit
            if ends:
                self.told(candidate, seed)
                mean, sound = _mean_of(block)
                means += [] if mean is None else [mean]
                block, diverged = [], not sound and _has_diverged(parts.model)
            if too_slow or diverged:
                break
        trained, last = clock() - ready, mean_over_ranks(loss)
        if not (too_slow or diverged or (not math.isfinite(last) and _has_diverged(parts.model))):
            metric = metric_of(parts, parts.model)
        left = steps - 1 - compiled_steps
        return Run(
            name=candidate.name,
            seed=seed,
            steps=steps,
            metric=metric,
            losses=means,
            first_loss=mean_over_ranks(first),
            last_loss=last,
            setup_seconds=ready - began + compiling,
            seconds=(trained - compiling) * (steps - 1) / left if left > 0 else trained,
            wall_seconds=clock() - began,
            too_slow=too_slow,
        )


def boosted_by(parts: Parts, extra: dict[str, Any], steps: int) -> Boosted:
    """Boost model and optimizer with the algorithms of a section ``extra`` and nothing else.

    Raises:
        ConfigError, IncompatibleError, ValueError: They cannot work on this pair.
    """
    return boost(parts.model, parts.optimizer, level="O0", config={"extra": extra}, total_steps=steps, calibrate=False)


def _stepper(parts: Parts, candidate: Candidate, steps: int) -> Callable[[Any, Any], Tensor]:
    model, optimizer = parts.model, parts.optimizer
    if any(value is not False for value in candidate.extra.values()):
        model, optimizer = boosted_by(parts, candidate.extra, steps)
    body = loop_body(parts, model, optimizer, steps)
    model.train()
    return body


def _batches(epoch: Iterable[Any], seed: int, device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Yield batches without end. All candidates get the same ones in the same order."""
    batches = list(epoch) if isinstance(epoch, Iterator) else epoch  # a generator can be read only once
    for number in count():
        yield from one_epoch(batches, seed=seed, epoch=number, device=device)


def _mean_of(block: list[Tensor]) -> tuple[float | None, bool]:
    """Return the mean of the finite losses of a block over all ranks, if there are any, and whether all are finite."""
    values = torch.stack(block).double()
    finite = values.isfinite()
    share = mean_over_ranks(finite.double().mean())
    mean = mean_over_ranks(values.where(finite, 0.0).sum() / finite.sum().clamp(min=1))
    return float(f"{mean:.6g}") if share > 0 else None, share == 1.0


def _has_diverged(model: nn.Module) -> bool:
    """Return whether a weight or a buffer of any rank is not finite; a single loss that is not may be harmless."""
    states = (t.detach() for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() or t.is_complex())
    tensors = [getattr(t, "to_local", lambda t=t: t)() for t in states]
    local = any(not bool(t.isfinite().all()) for t in tensors)
    device = tensors[0].device if tensors else torch.device("cpu")
    return mean_over_ranks(torch.tensor(float(local), device=device)) > 0


def _agreed(run: Run) -> Run:
    """Return the run of the first rank, with the times of the slowest one."""
    if not several():
        return run
    runs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(runs, run)
    times = ("setup_seconds", "seconds", "wall_seconds")
    return runs[0].model_copy(update={name: max(getattr(one, name) for one in runs) for name in times})
