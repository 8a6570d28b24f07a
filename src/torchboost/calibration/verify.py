"""Let only those levers stay that the certificate finds right on a real call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchboost.calibration.certificate import Certificate, Finding
from torchboost.calibration.passes import Passes
from torchboost.calibration.snapshot import Snapshot, Streams
from torchboost.calibration.trial import optimizer_over, restride
from torchboost.core.algorithm import Algorithm, Target, attach_all
from torchboost.registry import REGISTRY

__all__ = ["Checked", "verified"]

_PART = 2**20
"""Entries of parameters on which the update is compared."""
_STEPS = 2
"""The first update of an optimizer often makes its state only."""
_UPDATE = 1e-4
"""Tolerance of an update relative to its norm, in addition to the rounding of the parameters."""
_MAGNIFIED = 1e-3
_RATE = 1e-3
"""Learning rate of the comparison if that of the loop is still 0."""


@dataclass(slots=True)
class Checked:
    """What the certificate says.

    Attributes:
        kept: Names of the levers that may stay.
        said: Lever -> how far its run is from the plain one, or why it must not stay.
    """

    kept: list[str] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)


def verified(
    levers: Sequence[Algorithm],
    passes: Passes,
    snapshot: Snapshot,
    optimizer: Optimizer,
    *,
    scaler: Any = None,
    others: Sequence[Optimizer] = (),
) -> Checked:
    """Compare the plain step with that of the levers together. If it differs too much, find out which one does it.

    Levers that are exact up to rounding are compared among themselves, then all together. A compiled model is compared
    in the form in which it runs, so lower precision under a compiler is held to the bound of lower precision.

    Args:
        levers: Those that are to stay, in any order.
        passes: Passes of the plain model, under ``snapshot``.
        snapshot: From before any lever.
        optimizer: Of the loop; copies of it are stepped.
        scaler: Scaler of the loop, for levers that ask for one.
        others: More optimizers of the loop.

    Cost: three passes; one or two more with lower precision or a compiler, and one for each lever if a comparison
    fails. With dropout, compiling once more, since it is compared at zero.
    """
    ordered = sorted(levers, key=lambda lever: (REGISTRY[lever.name].once, lever.rounding))
    result = Checked()
    of_model = [lever for lever in ordered if not REGISTRY[lever.name].of_optimizer]
    if of_model:
        certificate = Certificate(passes.model, passes, snapshot, scaler=scaler)
        unchecked = [lever for lever in of_model if certificate.is_random and REGISTRY[lever.name].once]
        result = _of_model([lever for lever in of_model if lever not in unchecked], certificate)
        result.kept += [lever.name for lever in unchecked]
        result.said |= dict.fromkeys([lever.name for lever in unchecked], "not checked: it draws other random numbers")
    kept = [lever for lever in ordered if lever.name in result.kept or REGISTRY[lever.name].of_optimizer]
    for name, text in _of_updates(kept, passes, (optimizer, *others), scaler):
        result.said[name] = text or result.said.get(name, "")
    result.kept = [lever.name for lever in kept if not result.said.get(lever.name, "").startswith(_NOT)]
    return result


_NOT = "left out: "


def _of_model(levers: Sequence[Algorithm], certificate: Certificate) -> Checked:
    result = Checked()
    if not levers:
        return result
    exact = [lever for lever in levers if not lever.rounding and not REGISTRY[lever.name].once]
    groups = [exact, list(levers)] if exact and len(exact) < len(levers) else [list(levers)]
    for group in groups:
        finding = _try(certificate, group)
        if finding.reason:
            return _one_by_one(levers, certificate)
        for lever in group:
            result.said.setdefault(lever.name, _words(finding, lower=_rounding(group) > 0))
    result.kept = [lever.name for lever in levers]
    return result


def _one_by_one(levers: Sequence[Algorithm], certificate: Certificate) -> Checked:
    """Add the levers one after the other, and leave out each one with which the comparison fails."""
    result, kept = Checked(), []
    for lever in levers:
        group = [*kept, lever]
        finding = _try(certificate, group)
        if finding.reason:
            result.said[lever.name] = f"{_NOT}{finding.reason}"
            continue
        kept.append(lever)
        result.said[lever.name] = _words(finding, lower=_rounding(group) > 0)
    result.kept = [lever.name for lever in kept]
    return result


def _try(certificate: Certificate, levers: Sequence[Algorithm]) -> Finding:
    try:
        return certificate.check(levers, rounding=_rounding(levers))
    except Exception as error:  # levers may raise anything; training continues without them
        text = (str(error).splitlines() or [""])[0]
        return Finding(reason=f"it raised {type(error).__name__}: {text}"[:300], gradient=math.inf, outputs=math.inf)


def _rounding(levers: Sequence[Algorithm]) -> float:
    return max(lever.rounding for lever in levers)


def _words(finding: Finding, *, lower: bool) -> str:
    if lower:
        return f"checked: the gradient differs by {finding.gradient:.2g}, outputs by {finding.outputs:.2g}"
    said = "exact here" if finding.gradient < _MAGNIFIED else "as near as rounding lets this network be"
    return f"{said}: gradient {finding.gradient:.0e}"


def _of_updates(
    levers: Sequence[Algorithm], passes: Passes, optimizers: Sequence[Optimizer], scaler: Any
) -> Iterator[tuple[str, str]]:
    """Yield each lever of the optimizer, and what the comparison of updates says of it."""
    ours = [lever for lever in levers if REGISTRY[lever.name].of_optimizer]
    if not ours:
        return
    try:
        text = _difference_of_updates(levers, passes, optimizers, scaler)
    except Exception as error:  # an optimizer that cannot be copied, or asks for a closure
        line = (str(error).splitlines() or [""])[0]
        text = f"not checked: {type(error).__name__}: {line}"[:300]
    for lever in ours:
        yield lever.name, text


def _difference_of_updates(
    levers: Sequence[Algorithm], passes: Passes, optimizers: Sequence[Optimizer], scaler: Any
) -> str:
    """Step two copies of each optimizer on equal gradients, one of them with the levers, and compare."""
    streams = Streams(passes.model)
    plain, other = ([optimizer_over(one, passes.parameters, _PART)[:2] for one in optimizers] for _ in range(2))
    first, *more = (made for made, _ in other)
    of_model = [lever for lever in levers if not REGISTRY[lever.name].of_optimizer]
    stand_in = torch.optim.SGD(passes.parameters, lr=0.0)  # is never stepped, so that no lever misses its forward
    with (
        attach_all(Target(passes.model, stand_in, scaler), of_model),
        attach_all(
            Target(passes.model, first, scaler, others=tuple(more)),
            [lever for lever in levers if lever not in of_model],
        ),
    ):
        for made, pairs in other:
            for parameter, copied in pairs:
                restride(copied, made.state.get(copied, {}), parameter)
        for made, pairs in (*plain, *other):
            streams.restore()
            _move(made, [copied for _, copied in pairs])
    streams.restore()
    rows = (row for one, two in zip(plain, other, strict=True) for row in zip(one[1], two[1], strict=True))
    worst = max((_excess(start, a, b) for (start, a), (_, b) in rows), default=0.0)
    return "exact here" if worst <= 1 else f"{_NOT}its update differs by {worst * _UPDATE:.1e} of its size"


def _move(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    for group in optimizer.param_groups:
        rate = group.get("lr", _RATE)
        if not float(rate):
            group["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, Tensor) else _RATE
    generator = torch.Generator("cpu").manual_seed(0)
    for _ in range(_STEPS):
        for parameter in parameters:
            numbers = torch.randn(parameter.shape, generator=generator, device="cpu").mul_(1e-2)
            parameter.grad = torch.empty_like(parameter).copy_(numbers)
        type(optimizer).step(optimizer)


def _excess(start: Tensor, plain: Tensor, other: Tensor) -> float:
    """Return the difference of two updates as a multiple of what is allowed."""
    base = start.detach().double()
    moved = float(torch.linalg.vector_norm(plain.detach().double() - base))
    rounding = 4 * torch.finfo(start.dtype).eps * float(torch.linalg.vector_norm(base))
    distance = float(torch.linalg.vector_norm(other.detach().double() - plain.detach().double()))
    if not math.isfinite(moved):
        return 0.0
    return distance / max(_UPDATE * moved + rounding, 1e-30) if math.isfinite(distance) else math.inf
