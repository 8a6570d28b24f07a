"""Watch the loss of a boosted run, and withdraw algorithms that hurt."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor

from torchboost.core.algorithm import Algorithm
from torchboost.core.arguments import check_count, check_number, is_number
from torchboost.core.hardware import device_of
from torchboost.distributed.agreement import mean_over_ranks
from torchboost.front import Boosted
from torchboost.measure.statistics import ChangeTest

T = TypeVar("T")

_LOG = logging.getLogger("torchboost")

TOLERANCE, TOLERANCE_OF_TREND = 0.05, 0.25

PAUSE = 50
"""Blocks that are ignored after a withdrawal."""

_TINY = 1e-12
_WINDOW, _MEMORY, _SPREADS = 5, 50, 2.0
_EARLIER = ("metric_test", "metric_trend", "metric_pause")
"""Keys of earlier checkpoints, of a test of the metric. They are ignored."""
_NORMAL = 2 / math.sqrt(math.pi)
"""How much two normal values differ on average, in units of their standard deviation."""


class Guard:
    """Compares the training loss with a reference, and withdraws algorithms while the run is worse.

    The loss is averaged over blocks of steps. Each block gives its excess over a reference, as a share of the absolute
    loss there or of its mean over the whole reference, whichever is larger, minus ``tolerance``, at most 1 and at least
    -1. If a test that is valid at every look finds that the mean is above 0, one algorithm is withdrawn: gradient
    freezing and dropped tokens first, then reduced precision, then centralised gradients. Changes that cannot be
    withdrawn, such as removed BatchNorm layers, are named in the log. Further tests begin during the run, first after
    every 25 blocks and later at intervals of about a tenth of the run so far, so harm that comes late is found too. The
    k-th has 1 / (k * (k + 1)) of the error.

    After a withdrawal, 50 blocks are ignored, because the loss needs time to return. Then the tests begin again, with
    half of the error rate. A loss that is not finite withdraws at the end of its block, even during this pause. If no
    algorithm remains, this is logged once, and the tests end.

    The excesses of blocks are assumed to vary independently, about a mean that is at most the tolerance. If they are
    correlated over several blocks, false alarms become frequent. Larger blocks help. For ``"trend"`` the error is
    simulated, not proven. An excess that is small against the mean loss of a whole reference is not seen, even if it is
    large against a loss that has become tiny.

    Under ``torch.distributed`` all ranks of the default group make the same calls. The loss is averaged over them.

    Cost: per step, an addition on the device of the loss. Per block, one synchronisation, and across ranks one
    collective of a single number.

    Args:
        boosted: The result of :func:`torchboost.boost`.
        reference: The loss of the stock loop at every step, from a run or a prefix of one with the same seed and data,
            for at least one block. After its end nothing is compared. :meth:`TuneReport.stock_losses` has the losses of
            a tuning, whose runs must have been as long as this one. Or ``"trend"``: the lowest mean of five blocks in a
            row of this run so far. Two standard deviations of a block, estimated from the differences of the last 50,
            are accepted in addition to the tolerance. This finds runs that get worse by more than their noise, not runs
            that learn slowly, and not runs that were bad from the beginning.
        tolerance: Excess that is accepted, as a share of the loss of ``reference`` as above, or of the lowest mean.
            None takes 0.05, and 0.25 for ``"trend"``.
        error: Largest probability of a false alarm in the whole run. All tests together get half of it until the first
            withdrawal, then a quarter, and so on.
        block: Steps per block.
        log: Called with every decision as text. By default the logger ``"torchboost"``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, or ``reference`` is not finite, shorter than a block, or only zeros.

    Warns:
        UserWarning: ``reference`` is of a longer run than this one.

    Example:
        >>> import torch, torchboost
        >>> model = torch.nn.Linear(4, 2)
        >>> boosted = torchboost.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O0")
        >>> guard = torchboost.Guard(boosted)
        >>> for _ in range(3):
        ...     loss = boosted.model(torch.randn(8, 4)).square().mean()
        ...     loss.backward()
        ...     boosted.optimizer.step()
        ...     boosted.optimizer.zero_grad()
        ...     withdrawn = guard.update(loss)
    """

    def __init__(
        self,
        boosted: Boosted,
        reference: Sequence[float] | Literal["trend"] = "trend",
        *,
        tolerance: float | None = None,
        error: float = 0.01,
        block: int = 20,
        log: Callable[[str], object] | None = None,
    ) -> None:
        if not isinstance(boosted, Boosted):
            raise TypeError(f"boosted: found {type(boosted).__name__}; keep what torchboost.boost returns.")
        if log is not None and not callable(log):
            raise TypeError(f"log: found {log!r}; give a function of a text, such as print.")
        trend = isinstance(reference, str)
        if trend and reference != "trend":
            raise ValueError(f"reference: found {reference!r}; give the losses of the stock loop, or 'trend'.")
        if tolerance is None:
            tolerance = TOLERANCE_OF_TREND if trend else TOLERANCE
        check_number("tolerance", tolerance)
        if not is_number(error) or not 0 < error < 1:
            raise ValueError(f"error: found {error!r}; give a probability between 0 and 1.")
        check_count("block", block, of="steps in a block")
        self._boosted, self._tolerance, self._block = boosted, tolerance, block
        self._reference = None if isinstance(reference, str) else _checked(reference, block)
        if self._reference is not None and boosted.steps is not None and len(self._reference) > boosted.steps:
            warnings.warn(
                f"reference: found {len(self._reference):,} losses, and this run has {boosted.steps:,} updates; a "
                "longer run learns later, which hides harm. Give the losses of a run of this length.",
                UserWarning,
                stacklevel=2,
            )
        self._scale = 1.0 if self._reference is None else sum(map(abs, self._reference)) / len(self._reference)
        self._log = _LOG.warning if log is None else log
        self._state = _State(ChangeTest(error / 2))
        self._sum: Tensor | None = None

    @property
    def withdrawn(self) -> list[str]:
        """The names of the algorithms that this guard has withdrawn, in their order."""
        return self._state.withdrawn

    def update(self, loss: Tensor | float) -> str | None:
        """Take the loss of a step, after the update.

        Args:
            loss: Of shape ``()``. It is neither changed nor kept.

        Returns:
            The name of the algorithm that was withdrawn now. None if nothing was.

        Raises:
            ValueError: ``loss`` has more than one entry, or none.
        """
        value = torch.as_tensor(loss, dtype=torch.float64).detach().clone()
        if value.numel() != 1:
            raise ValueError(f"loss: found the shape {tuple(value.shape)}; give one number, such as its mean.")
        value = value.reshape(())
        self._sum = value if self._sum is None else self._sum + value
        state = self._state
        state.step, state.inside = state.step + 1, state.inside + 1
        if state.inside < self._block:
            return None
        # A loss that was given as a float is on the CPU.
        device = device_of(self._boosted.model)
        mean = mean_over_ranks(self._sum.to(device)) / state.inside
        self._sum, state.inside = None, 0
        return self._judge(mean)

    def figures(self) -> dict[str, float]:
        """Return the state for a log: excess of the last block, evidence, and how many algorithms were withdrawn."""
        excess, evidence = self._state.excess, self._state.test.evidence
        return {"guard/excess": excess, "guard/evidence": evidence, "guard/withdrawn": float(len(self.withdrawn))}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return asdict(replace(self._state, sum=None if self._sum is None else float(self._sum)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. Algorithms that had been withdrawn are withdrawn again.

        The state of the boosted pair may be loaded before or after.

        Raises:
            ValueError: The state is not complete, or a part of it is damaged. Nothing is loaded.
        """
        loaded = checked_state(_State, state, of="Guard", ignored=_EARLIER)
        for name in loaded.withdrawn:
            self._boosted.withdraw(name, "it had been withdrawn when the checkpoint was written")
        self._state = loaded
        self._sum = None if loaded.sum is None else torch.tensor(loaded.sum, dtype=torch.float64, device="cpu")

    def _judge(self, mean: float) -> str | None:
        state = self._state
        if not math.isfinite(mean):
            return self._withdraw(f"the loss is {mean} at step {state.step}")
        if state.pause > 0:
            state.pause -= 1
            return None
        if self._reference is None:
            lowest = state.trend.add(mean)
            if lowest is None:
                return None
            level, spread = lowest
            scale = max(abs(level) + spread, _TINY)
            accepted = (self._tolerance * abs(level) + _SPREADS * spread) / scale
        else:
            part = self._reference[state.step - self._block : state.step]
            if len(part) < self._block:
                return None
            level, accepted = sum(part) / len(part), self._tolerance
            scale = max(abs(level), self._scale)
        state.excess = (mean - level) / scale
        if self._is_over() or not state.test.add(max(-1.0, min(1.0, state.excess - accepted))):
            return None
        test = state.test.leading
        above, least = test.total / test.count, "at least " if state.excess - accepted > 1 else ""
        text = (
            f"{_percent(above)} further above its lowest mean than is accepted ({_percent(self._tolerance)} and "
            f"{_SPREADS:g} standard deviations of a block)"
            if self._reference is None
            else f"{_percent(above + self._tolerance)} above its reference ({_percent(self._tolerance)} is accepted)"
        )
        steps = test.count * self._block
        return self._withdraw(f"the loss is {least}{text}, on average over {steps} steps, at step {state.step}")

    def _live(self) -> list[Algorithm]:
        return [
            one for one in self._boosted.plan.algorithms if one.traits.withdrawn and one.name in self._boosted.attached
        ]

    def _is_over(self) -> bool:
        """Whether it was logged that no algorithm remains, and no later trial has turned anything on."""
        return self._state.ended and not self._live()

    def _withdraw(self, reason: str) -> str | None:
        if self._is_over():
            return None
        live, state = self._live(), self._state
        # The rest of the run is judged as another run, with half of the error rate.
        state.test = ChangeTest(state.test.error / 2)
        state.trend, state.pause = _Trend(), PAUSE
        if not live:
            on = ", ".join(one.name for one in self._boosted.plan.algorithms if one.name in self._boosted.attached)
            self._log(f"guard: {reason}; nothing is left to withdraw (on: {on or 'nothing'}).")
            state.ended = True
            return None
        name = min(live, key=lambda one: one.traits.withdrawn).name
        self._boosted.withdraw(name, f"the guard withdrew it: {reason}")
        self.withdrawn.append(name)
        self._log(f"guard: {reason}; withdrew {name}.")
        return name


@dataclass
class _Trend:
    """The lowest mean of five values in a row, and the spread of single values about their trend."""

    lowest: float = math.inf
    recent: list[float] = field(default_factory=list)

    def add(self, value: float) -> tuple[float, float] | None:
        """Take a value, and return the level and the spread of those before it. None if they were too few."""
        self.recent = [*self.recent, value][-_MEMORY:]
        before = self.lowest
        if len(self.recent) >= _WINDOW:
            self.lowest = min(self.lowest, sum(self.recent[-_WINDOW:]) / _WINDOW)
        if before == math.inf:
            return None
        steps = [abs(after - ahead) for ahead, after in pairwise(self.recent)]
        return before, sum(steps) / len(steps) / _NORMAL


@dataclass
class _State:
    """The state of a guard in a checkpoint."""

    test: ChangeTest
    trend: _Trend = field(default_factory=_Trend)
    step: int = 0
    inside: int = 0
    sum: float | None = None
    pause: int = 0
    excess: float = 0.0
    ended: bool = False
    withdrawn: list[str] = field(default_factory=list)


def checked_state(kind: type[T], state: Mapping[str, Any], *, of: str, ignored: Sequence[str] = ()) -> T:
    """Return a dataclass from its ``asdict``, for the class ``of`` whose state it is.

    Raises:
        ValueError: It is not complete, or it has other parts, or parts of another form.
    """
    try:
        parts = {key: value for key, value in dict(state).items() if key not in ignored}
        loaded: Any = TypeAdapter(kind).validate_python(parts)
        if json.dumps(asdict(loaded), sort_keys=True) != json.dumps(parts, sort_keys=True):
            raise ValueError(f"it has the parts {sorted(parts)}, or parts of another form")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the state of the {of.lower()} is not complete, or damaged: found {error}; load what {of}.state_dict() of "
            f"this version returned, or begin with a new {of.lower()}."
        ) from error
    return loaded


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _checked(reference: Sequence[float], block: int) -> list[float]:
    try:
        losses = [float(value) for value in reference]
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"reference: found {reference!r}; give the losses of the stock loop, one number per step, or 'trend'."
        ) from error
    if not losses or not all(map(math.isfinite, losses)):
        raise ValueError(f"reference: found {len(losses)} losses; give at least one, all of them finite.")
    if len(losses) < block:
        found = f"found {len(losses)} losses, and a block has {block} steps"
        raise ValueError(f"reference: {found}, so nothing would be compared; give more, or a smaller block.")
    if not any(losses):
        raise ValueError("reference: found only zeros, and the excess is a share of their mean; give 'trend' instead.")
    return losses
