"""What a tuning tries on a model: the levers that pay here, and the algorithms of the levels."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torchboost.bench.factory import Parts, check_fresh, loop_body, made_by, one_epoch
from torchboost.core.algorithm import Algorithm
from torchboost.errors import ConfigError, IncompatibleError
from torchboost.front import boost
from torchboost.registry import LEVELS, REGISTRY
from torchboost.tuning.report import STOCK, Candidate, Finding
from torchboost.tuning.training import boosted_by

__all__ = [
    "TriedLevers",
    "fingerprint_of",
    "fresh",
    "looked_at",
    "named_candidates",
    "standard_candidates",
    "try_levers",
]

Make = Callable[[int], object]

LEVERS = tuple(name for name, entry in REGISTRY.items() if entry.lever)


class TriedLevers(NamedTuple):
    """The levers that a trial kept, and the reason against each of the others."""

    kept: list[str]
    left_out: dict[str, str]


def standard_candidates(levers: Sequence[str]) -> list[Candidate]:
    """Return the levers that a trial kept, LessBN as in the levels with centralised gradients, and freezing."""
    exact = [name for name in levers if name != "autocast"]
    sets = [list(levers), exact] if "autocast" in levers else [exact]
    levered = [Candidate(name="levers: " + ", ".join(one), extra=dict.fromkeys(one, True)) for one in sets if one]
    gentle, strong = LEVELS["O1"], LEVELS["O2"]
    centralized = {"gradient_centralization": dict(gentle["gradient_centralization"])}
    algorithms = {
        "less_bn and gradient_centralization as in O1": {"less_bn": dict(gentle["less_bn"]), **centralized},
        "less_bn and gradient_centralization as in O2": {"less_bn": dict(strong["less_bn"]), **centralized},
        "grad_freeze as in O2": {"grad_freeze": dict(strong["grad_freeze"])},
        "grad_freeze from 30 % on": {"grad_freeze": {"full_share": 0.3}},
    }
    return levered + [Candidate(name=name, extra=extra, skips_work=True) for name, extra in algorithms.items()]


def try_levers(make: Make, *, steps: int, seconds: float) -> TriedLevers:
    """Make the trial of :func:`torchboost.boost`, which takes one training step.

    Args:
        make: The factory.
        steps: Updates of the run over which the levers must pay.
        seconds: Length of the trial.
    """
    parts = made_by(make, 0)
    others = {name: False for name in LEVELS["O1"] if name not in LEVERS}
    model, optimizer = parts.model, parts.optimizer
    boosted = boost(model, optimizer, level="O1", config={"extra": others}, total_steps=steps, calibrate=seconds)
    batches = one_epoch(parts.batches, seed=0, epoch=0, device=next(model.parameters()).device)
    loop_body(parts, boosted.model, boosted.optimizer, steps)(*next(batches))
    kept = [name for name in LEVERS if name in boosted.attached]
    reasons = {one.name: one.reason for one in boosted.plan.dropped}
    boosted.remove()
    return TriedLevers(kept, {name: reasons.get(name, "left out") for name in LEVERS if name not in kept})


def named_candidates(extras: Mapping[str, Mapping[str, Any]]) -> list[Candidate]:
    """Return candidates from names and sections ``extra``.

    A candidate skips work unless all of its algorithms are levers, which compute the same in less time.

    Raises:
        ValueError: A name cannot be used, or a section turns nothing on.
    """
    candidates = []
    for name, extra in extras.items():
        on = [key for key, value in extra.items() if value is not False] if isinstance(extra, Mapping) else []
        free = isinstance(name, str) and bool(name) and not name.startswith(STOCK) and " + " not in name
        if not free or not on:
            raise ValueError(
                f"candidates: found {name!r}: {extra!r}; give a name without ' + ' that does not begin with "
                f"{STOCK!r}, and a section extra with what it turns on, such as {{'autocast': True}}."
            )
        candidates.append(Candidate(name=name, extra=dict(extra), skips_work=not set(on) <= set(LEVERS)))
    return candidates


def fresh(make: Make) -> Parts:
    """Return what a factory makes of seed 0.

    Raises:
        FactoryError: A parameter is one of another call, so that one run would continue the training of the other.
    """
    parts = made_by(make, 0)
    check_fresh(parts, made_by(make, 0))
    return parts


def fingerprint_of(parts: Parts) -> str:
    """Return a text that tells trainings apart by the optimizer's settings, the modules, the start weights and buffers.

    It sees no change of the loss, the data or ``evaluate``.
    """
    digest = hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", repr(parts.model)).encode())
    for group in parts.optimizer.param_groups:
        digest.update(repr(sorted((key, str(value)) for key, value in group.items() if key != "params")).encode())
    digest.update(type(parts.optimizer).__name__.encode())
    for tensor in (*parts.model.parameters(), *parts.model.buffers()):
        real = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
        digest.update(f"{float(real.double().abs().sum()):.12e}".encode())
    return digest.hexdigest()[:16]


def looked_at(candidates: Sequence[Candidate], make: Make, steps: int) -> list[Finding]:
    """Return a finding for each candidate, with an outcome for those that are not trained.

    These are candidates of which an algorithm cannot work here, and those whose training would be that of an earlier
    one.

    Raises:
        ConfigError: The settings of a candidate are wrong.
    """
    known: dict[str, str] = {}
    return [_looked_at(one, make, steps, known) for one in candidates]


def _looked_at(candidate: Candidate, make: Make, steps: int, known: dict[str, str]) -> Finding:
    parts = made_by(make, 0)
    try:
        boosted = boosted_by(parts, candidate.extra, steps)
    except ConfigError:
        raise  # it is not the model that this cannot work on
    except (IncompatibleError, ValueError) as error:
        return Finding(candidate=candidate, outcome="not usable", reason=str(error))
    plan = boosted.plan
    # If an algorithm only transforms modules, these tell what it did, and its settings do not count.
    on = [one.name if type(one).attach is Algorithm.attach else repr(one) for one in plan.algorithms]
    training = "; ".join([*on, fingerprint_of(parts)])
    boosted.remove()
    running = {one.name for one in plan.algorithms}
    absent = [name for name, value in candidate.extra.items() if value is not False and name not in running]
    if absent:
        missing = [f"{one.name}: {one.reason}" for one in plan.dropped if one.name in absent]
        return Finding(candidate=candidate, outcome="not usable", reason="; ".join(missing) or "it changes nothing")
    same = known.setdefault(training, candidate.name)
    if same != candidate.name:
        return Finding(candidate=candidate, outcome="duplicate", reason=f"on this model it is the same as {same!r}")
    return Finding(candidate=candidate)
