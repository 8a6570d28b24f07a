"""Accepted forms of ``lr``, and schedules (:mod:`torchboost.optim.schedules`) as a ``LRScheduler`` of torch."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchboost.optim.schedules import Schedule, each, function, number, whole

__all__ = ["Listed", "ScheduleLR", "factor", "resolve_lr"]


@dataclass(frozen=True)
class Listed:
    """A list of learning rates, one per update, counted from 0; past the end it raises ``IndexError``.

    Args:
        rates: Learning rates, at least one.

    Raises:
        TypeError: Not a sequence of numbers.
        ValueError: Empty, or a rate is negative or not finite.

    Example:
        >>> Listed([0.1, 0.2])(1)
        0.2
    """

    rates: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", _entries("rates", self.rates))

    def __call__(self, step: int) -> float:
        """Return the learning rate at an update, counted from 0."""
        if whole("step", step, least=0) >= len(self.rates):
            raise IndexError(
                f"the list of rates ended at step {len(self.rates) - 1}, but step {step} was requested (counted from "
                f"0; the list has {len(self.rates)} entries). Give one entry per update, or a schedule. For a constant "
                "rate give a number or a 0-d tensor."
            )
        return self.rates[step]


@dataclass(frozen=True)
class _Checked:
    schedule: Callable[[int], Any]
    name: str

    def __repr__(self) -> str:
        return repr(self.schedule)

    def __call__(self, step: int) -> float:
        rate = self.schedule(step)
        if isinstance(rate, (Tensor, np.ndarray)) and rate.ndim == 0:
            rate = rate.item()
        return number(f"{self.name} at step {step}", rate)


def resolve_lr(value: Any, *, name: str = "lr") -> Schedule | None:
    """Return the schedule of a learning rate, or None if the value is constant.

    Args:
        value: A number or a 0-d tensor: constant, the result is None. A list, tuple, 1-d tensor or 1-d array: entry t
            at update t. A function of the step: called at each update; its result is checked.
        name: The name in error messages, such as ``"weight_decay"``.

    Raises:
        TypeError: The value has another type, or an entry is not a number.
        ValueError: A number is negative or not finite, a list is empty, or a tensor has more than one axis. The result
            also raises it if the function returns such a number, and ``IndexError`` past the end of a list.

    Example:
        >>> resolve_lr(1e-3) is None
        True
        >>> resolve_lr([0.3, 0.2, 0.1])(1)
        0.2
        >>> resolve_lr(lambda step: 0.5**step)(2)
        0.25
    """
    if isinstance(value, (Listed, _Checked)):
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim > 1:
            raise ValueError(
                f"{name}: found a tensor of shape {tuple(value.shape)}; give a 0-d tensor, or a 1-d one with one entry "
                "per update."
            )
        value = value.tolist()
    if callable(value):
        return _Checked(function(name, value), name)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return Listed(_entries(name, value))
    try:
        number(name, value)
    except TypeError:
        raise TypeError(
            f"{name}: found {reprlib.repr(value)}; give a number, a list or 1-d tensor with one entry per update, or a "
            "function of the step."
        ) from None
    return None


class ScheduleLR(LRScheduler):
    """Set the learning rates of an optimizer from schedules, as absolute values.

    Call :meth:`step` after each update that was not skipped. A tensor ``lr`` is filled in place, so compiled,
    capturable and fused optimizers see the change. The state holds numbers only: to resume, construct the scheduler
    with the same schedules and load the state, before or after that of the optimizer; ``{"last_epoch": step}`` is
    enough.

    Args:
        optimizer: The optimizer whose groups get the rates.
        schedule: One for all groups, including those added later, or a list with one per group. It replaces the rates
            of the groups; to scale them, use torch's ``LambdaLR`` with :func:`factor`. After the last entry of a list
            (see :class:`Listed`) one more :meth:`step` is allowed, because loops end with it; the next raises
            ``IndexError``.
        last_epoch: Updates done before, minus 1.

    Raises:
        TypeError: Not an optimizer, or not a schedule.
        ValueError: The number of schedules is not that of the groups, ``last_epoch`` is below -1, or a rate is out of
            range.

    Example:
        >>> import torch
        >>> from torchboost.optim.schedules import CosineDecay
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> scheduler = ScheduleLR(optimizer, CosineDecay(0.2, decay_steps=2))
        >>> for _ in range(2):
        ...     print(scheduler.get_last_lr())
        ...     optimizer.step()
        ...     scheduler.step()
        [0.2]
        [0.1]
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule | Sequence[Schedule], last_epoch: int = -1) -> None:
        self._schedules = _one_or_each(schedule)
        whole("last_epoch", last_epoch, least=-1)
        if last_epoch >= 0 and isinstance(optimizer, Optimizer):
            # torch requires this key then; a schedule of absolute values resumes without it.
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", _copied(group["lr"]))
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of every group at update ``last_epoch``."""
        groups = len(self.optimizer.param_groups)
        if not isinstance(self._schedules, tuple):
            return [_rate(self._schedules, self.last_epoch)] * groups
        if len(self._schedules) != groups:
            raise ValueError(
                f"found {len(self._schedules)} schedules and {groups} param groups; give one schedule per group."
            )
        return [_rate(schedule, self.last_epoch) for schedule in self._schedules]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler, without the schedules."""
        return {key: value for key, value in super().state_dict().items() if key != "_schedules"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from the state of another scheduler, and set the learning rates of that update.

        Raises:
            ValueError: ``last_epoch`` is missing or below 0.
        """
        if "last_epoch" not in state_dict:
            raise ValueError(f"state_dict: found the keys {sorted(state_dict)}; it must have 'last_epoch'.")
        whole("last_epoch", state_dict["last_epoch"], least=0)
        super().load_state_dict({key: value for key, value in state_dict.items() if key in self.state_dict()})
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [_copied(group["lr"]) for group in self.optimizer.param_groups]


def factor(schedule: Schedule, *, base: float | None = None) -> Callable[[int], float]:
    """Return a schedule as a factor of ``base``, for torch's ``LambdaLR``, which multiplies the rate of each group.

    Args:
        schedule: The learning rates.
        base: Learning rate that corresponds to a factor of 1, above 0; None takes that of update 0.

    Raises:
        TypeError: Not a schedule, or not a number.
        ValueError: ``base`` is 0, negative or not finite, or is not given and the schedule begins at 0.

    Example:
        >>> from torchboost.optim.schedules import CosineDecay
        >>> half = factor(CosineDecay(0.2, decay_steps=2))
        >>> half(0), half(1)
        (1.0, 0.5)
    """
    rates = _Checked(function("schedule", schedule), "schedule")
    one = rates(0) if base is None else number("base", base)
    if one == 0:
        given = "the schedule begins at 0" if base is None else "found 0"
        raise ValueError(f"base: {given}; give the learning rate that counts as 1, such as the highest.")

    # A function, not an object: LambdaLR would save the attributes of an object.
    def at(step: int) -> float:
        return rates(step) / one

    return at


def _one_or_each(schedule: Any) -> Schedule | tuple[Schedule, ...]:
    if not isinstance(schedule, (list, tuple)):
        return _Checked(function("schedule", schedule), "schedule")
    return tuple(_Checked(one, f"schedule[{i}]") for i, one in enumerate(each("schedule", schedule, function)))


def _rate(schedule: Schedule, step: int) -> float:
    """Return the rate; one step past the end of a list, return its last rate."""
    try:
        return schedule(step)
    except IndexError as ended:
        if step == 0:
            raise
        try:
            return schedule(step - 1)
        except IndexError:
            raise ended from None


def _entries(name: str, values: Any) -> tuple[float, ...]:
    rates = each(name, values, number)
    if not rates:
        raise ValueError(f"{name}: found an empty list; give one entry per update.")
    return rates


def _copied(lr: float | Tensor) -> float | Tensor:
    return lr.clone() if isinstance(lr, Tensor) else lr
