"""The candidates of a tuning: levers that pay here, optimizers, algorithms of the levels. How a tuning trains."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from torchboost.bench.contestants import averaged, check_scale
from torchboost.bench.digests import fingerprint_of
from torchboost.bench.factory import (
    Parts,
    check_fresh,
    has_diverged,
    kept,
    loop_body,
    made_by,
    metric_of,
    one_epoch,
    score_of,
    streams_restored,
)
from torchboost.bench.schedules import LEAST_STEPS, boosted_as, check_schedule, of_boosted
from torchboost.core.algorithm import Algorithm
from torchboost.core.hardware import ProcessSettings
from torchboost.core.torch_private import compiled_graphs, forget_compiled
from torchboost.errors import ConfigError, IncompatibleError, NoEffectWarning
from torchboost.front import Boosted, boost
from torchboost.measure.machine import PeakMemory
from torchboost.measure.stopwatch import Clock
from torchboost.optim.named import ADAMW_LR, MUON_LR
from torchboost.registry import LEVELS, REGISTRY
from torchboost.tuning.report import BLOCK, STOCK, Candidate, Finding, Run
from torchboost.tuning.runs import Watch

Make = Callable[[int], object]

_CPU = torch.device("cpu")
UNWATCHED = Watch()
"""Nothing ends a training early, and its metric comes from ``evaluate``."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Trains candidates from a factory.

    Args:
        make: ``make(seed) -> (model, optimizer, loss, batches, evaluate[, schedule[, validate[, before_step]]])``.
        steps: Updates of a run of stock.
        device: Where model and batches go.
        told: Called with the candidate and the seed after every 20 steps.
    """

    make: Callable[[int], object]
    steps: int
    device: torch.device
    told: Callable[[Candidate, int], None] = lambda candidate, seed: None

    def __call__(self, candidate: Candidate, seed: int, watch: Watch = UNWATCHED, /) -> Run:
        """Train once. The random generators and the settings of the process are restored at the end.

        Compiled code of an earlier training is forgotten, so that each one pays for its own compilation. The compiler's
        cache on disk is kept. An error of a candidate is part of the run, as its ``failure``. An error of stock is
        raised.
        """
        started = time.perf_counter()
        forget_compiled()
        with streams_restored(), ProcessSettings().in_force():
            try:
                with PeakMemory(self.device) as peak:
                    run = self._run(candidate, seed, watch)
                spent = time.perf_counter() - started
                return run.model_copy(update={"peak_bytes": peak.bytes, "wall_seconds": spent})
            except Exception as error:
                if not candidate.extra and not candidate.recipe:
                    raise
                spent = time.perf_counter() - started
                return Run(
                    name=candidate.label,
                    seed=seed,
                    steps=self.steps,
                    metric=math.nan,
                    setup_seconds=spent,
                    seconds=0.0,
                    wall_seconds=spent,
                    failure=f"{type(error).__name__}: {error}".splitlines()[0][:200],
                )

    def _run(self, candidate: Candidate, seed: int, watch: Watch) -> Run:
        clock = Clock.of(self.device)
        began = clock()
        parts = placed(self.make, seed, self.device)
        model, optimizer, steps = parts.model, parts.optimizer, self.steps
        if candidate.section or any(value is not False for value in candidate.extra.values()):
            boosted = boosted_by(parts, candidate, steps)
            model, optimizer, steps = boosted.model, boosted.optimizer, max(LEAST_STEPS, boosted.steps or 0)
            parts = of_boosted(parts, boosted)
        step = loop_body(parts, model, optimizer, steps)
        batches = _batches(parts.batches, seed, self.device, self.steps)
        first = loss = step(*next(batches))
        ready = clock()
        block, means, metric, too_slow, diverged, hopeless = [first], [], math.nan, False, False, False
        # Steps in which something was compiled, such as the first one with inputs of another shape, are set-up too.
        compiling, compiled_steps = 0.0, 0
        for done in range(1, steps):
            graphs, start = compiled_graphs(), clock.read()
            loss = step(*next(batches))
            block.append(loss)
            if compiled_graphs() != graphs:
                compiling, compiled_steps = compiling + clock() - start, compiled_steps + 1
            ends = done % BLOCK == BLOCK - 1
            too_slow = clock.read() - ready - compiling > watch.seconds
            if ends:
                self.told(candidate, seed)
                mean, sound = _mean_of(block)
                means += [] if mean is None else [mean]
                block, diverged = [], not sound and has_diverged(parts.model)
                hopeless = _is_hopeless(float(first), means, watch.losses, steps)
            if too_slow or diverged or hopeless:
                break
        trained, last = clock() - ready, float(loss)
        if not (too_slow or diverged or hopeless or (not math.isfinite(last) and has_diverged(parts.model))):
            with averaged(optimizer):
                metric = (score_of if watch.chooses else metric_of)(parts, parts.model, seed=seed)
        left = steps - 1 - compiled_steps
        return Run(
            name=candidate.label,
            seed=seed,
            steps=steps,
            metric=metric,
            losses=means,
            first_loss=float(first),
            last_loss=last,
            setup_seconds=ready - began + compiling,
            seconds=(trained - compiling) * (steps - 1) / left if left > 0 else trained,
            wall_seconds=clock() - began,
            too_slow=too_slow,
            hopeless=hopeless,
        )


def placed(make: Make, seed: int, device: torch.device) -> Parts:
    """Return the result of a factory with its model on a device, and in training mode."""
    parts = made_by(make, seed)
    parts.model.to(device).train()
    return parts


def boosted_by(parts: Parts, candidate: Candidate, steps: int) -> Boosted:
    """Boost model and optimizer with the choices of a candidate and nothing else, for a share of the steps of stock.

    Raises:
        ConfigError, IncompatibleError, ValueError: It cannot work on this pair.
    """
    boosted = boosted_as(parts, {"extra": candidate.extra, "recipe": candidate.section}, steps)
    check_scale(boosted.plan)
    return boosted


def _is_hopeless(first: float, means: Sequence[float], best: Sequence[float], steps: int) -> bool:
    """Return whether, after a third of the steps, the loss has fallen less than a third as far as in the best run."""
    third = steps // 3 // BLOCK
    if not third or len(means) != third or len(best) < third:
        return False
    return best[third - 1] < first and 3 * (first - means[-1]) < first - best[third - 1]


def _batches(epoch: Iterable[Any], seed: int, device: torch.device, most: int) -> Iterator[tuple[Any, Any]]:
    """Yield batches without end. All candidates get the same ones in the same order.

    A generator can be read only once, so its first ``most`` batches are kept.
    """
    batches = kept(islice(epoch, most), seed) if isinstance(epoch, Iterator) else epoch
    for number in count():
        yield from one_epoch(batches, seed=seed, epoch=number, device=device)


def _mean_of(block: list[Tensor]) -> tuple[float | None, bool]:
    """Return the mean of the finite losses of a block, if there are any, and whether all are finite."""
    values = torch.stack(block).double()
    finite = values[values.isfinite()]
    return float(f"{float(finite.mean()):.6g}") if len(finite) else None, len(finite) == len(values)


LEVERS = tuple(name for name, entry in REGISTRY.items() if entry.lever)


def standard_recipes(levers: Sequence[str], optimizer: Optimizer) -> list[Candidate]:
    """Return the standard recipes: stock, other optimizers, LessBN as in O2 and milder, freezing, dropping of tokens.

    All have the ``levers``, which a trial kept, and the first one nothing else.
    """
    on = dict.fromkeys(levers, True)
    stock = Candidate(name=f"switches: {', '.join(levers)}", extra=on) if levers else Candidate(name=STOCK)
    own = max(float(group["lr"]) for group in optimizer.param_groups) if isinstance(optimizer, (Adam, AdamW)) else 0.0
    optimizers = {
        "Muon": {"optimizer": "muon", "lr": MUON_LR},
        "schedule-free AdamW": {"optimizer": "schedule_free_adamw", "lr": own or ADAMW_LR},
    }
    fused = {name: value for name, value in on.items() if name != "fused_optimizer"}  # they are not torch's
    level = {name: dict(settings) for name, settings in LEVELS["O2"].items()}
    centralized = {"gradient_centralization": level["gradient_centralization"]}
    milder = {name: value for name, value in level["less_bn"].items() if name != "blocks_per_norm"}
    algorithms = {
        "less_bn and gradient_centralization as in O2": {"less_bn": level["less_bn"], **centralized},
        "less_bn and gradient_centralization, milder": {"less_bn": milder, **centralized},
        "grad_freeze as in O2": {"grad_freeze": level["grad_freeze"]},
        "grad_freeze from 30 % on": {"grad_freeze": {"full_share": 0.3}},
        "token_drop": {"token_drop": {}},
    }
    return [
        stock,
        *(Candidate(name=name, extra=fused, recipe=recipe) for name, recipe in optimizers.items()),
        *(Candidate(name=name, extra={**on, **extra}) for name, extra in algorithms.items()),
    ]


class TriedLevers(NamedTuple):
    """The result of the trial of the levers.

    Args:
        kept: Those that make a step faster.
        exact: Those of them whose step is the plain one but for rounding, at the precision of the plain one.
        reasons: The reason against each of the others.
    """

    kept: list[str]
    exact: list[str]
    reasons: dict[str, str]


def try_levers(make: Make, *, steps: int, seconds: float, device: torch.device = _CPU) -> TriedLevers:
    """Make the trial of :func:`torchboost.boost`, of some ``seconds``, for a run of so many ``steps``."""
    parts = placed(make, 0, device)
    boosted = boost(parts.model, parts.optimizer, level="O1", total_steps=steps, calibrate=seconds)
    with streams_restored():
        batches = one_epoch(parts.batches, seed=0, epoch=0, device=device)
        loop_body(parts, boosted.model, boosted.optimizer, steps)(*next(batches))
    on = {one.name: one for one in boosted.attached.algorithms}
    kept = [name for name in LEVERS if name in on]
    exact = [name for name in kept if not on[name].rounding and not REGISTRY[name].once]
    reasons = {one.name: one.reason for one in boosted.plan.dropped}
    boosted.remove()
    return TriedLevers(kept, exact, {name: reasons.get(name, "left out") for name in LEVERS if name not in kept})


def named_candidates(extras: Mapping[str, Mapping[str, Any]]) -> list[Candidate]:
    """Return candidates from names and sections ``extra``. ``ValueError`` if one cannot be used."""
    candidates = []
    for name, extra in extras.items():
        on = [key for key, value in extra.items() if value is not False] if isinstance(extra, Mapping) else []
        free = isinstance(name, str) and bool(name) and not name.startswith(STOCK) and "," not in name
        if not free or not on:
            raise ValueError(
                f"candidates: found {name!r}: {extra!r}; give a name without a comma that does not begin with "
                f"{STOCK!r}, and a section extra with what it turns on, such as {{'autocast': True}}."
            )
        candidates.append(Candidate(name=name, extra=dict(extra)))
    return candidates


def fresh(make: Make) -> Parts:
    """Return the result of a factory for seed 0. ``FactoryError`` if another call shares a parameter with it."""
    parts = made_by(make, 0)
    check_fresh(parts, made_by(make, 0))
    return parts


def looked_at(
    candidates: Sequence[Candidate], make: Make, steps: int, levers: Sequence[str] = (), *, device: torch.device = _CPU
) -> list[Finding]:
    """Return a finding for each candidate, with an outcome for those that are not trained.

    These are candidates of which an algorithm cannot work here, and candidates whose training would repeat an earlier
    one. A candidate may lack ``levers`` although it turns them on.

    Raises:
        ConfigError: The settings of a candidate are wrong.
    """
    known: dict[str, str] = {}
    return [_looked_at(one, placed(make, 0, device), steps, known, levers) for one in candidates]


def _looked_at(candidate: Candidate, parts: Parts, steps: int, known: dict[str, str], levers: Sequence[str]) -> Finding:
    try:
        with warnings.catch_warnings():
            if candidate.recipe:  # such as a Muon without a matrix
                warnings.simplefilter("error", NoEffectWarning)
            boosted = boosted_by(parts, candidate, steps)
        if candidate.recipe.get("optimizer") == "muon":
            check_schedule(parts, boosted)
    except ConfigError:
        raise  # the settings are at fault, not the model
    except (IncompatibleError, ValueError, NoEffectWarning) as error:
        return Finding(candidate=candidate, outcome="not usable", reason=str(error))
    plan = boosted.plan
    # If an algorithm only transforms modules, these tell what it did, and its settings do not count.
    on = [one.name if type(one).attach is Algorithm.attach else repr(one) for one in plan.algorithms]
    training = "; ".join([*on, repr(candidate.recipe), fingerprint_of(parts)])
    boosted.remove()
    running = {one.name for one in plan.algorithms}
    asked = [name for name, value in candidate.extra.items() if value is not False and name not in levers]
    absent = [name for name in asked if name not in running]
    if absent:
        missing = [f"{one.name}: {one.reason}" for one in plan.dropped if one.name in absent]
        return Finding(candidate=candidate, outcome="not usable", reason="; ".join(missing) or "it changes nothing")
    same = known.setdefault(training, candidate.name)
    if same != candidate.name:
        return Finding(candidate=candidate, outcome="duplicate", reason=f"on this model it is the same as {same!r}")
    return Finding(candidate=candidate)
