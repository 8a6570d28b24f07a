"""Learning rates as pure functions of the update, counted from 0. To resume, only the step is needed."""

from __future__ import annotations

import math
import operator
import reprlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from torchboost.core.arguments import check_number

Schedule = Callable[[int], float]
"""Any function from the update, counted from 0, to the learning rate. Those below can be compared and printed."""


# No slots: torch's LambdaLR saves and loads the __dict__ of its functions.
@dataclass(frozen=True)
class _ScheduleBase:
    """Base of every schedule. Subclass it and implement ``_at(step)``.

    Fields annotated ``float``, ``int``, ``bool`` or ``Schedule`` are checked. Check others in ``__post_init__``.
    """

    def __post_init__(self) -> None:
        checks = {"float": number, "int": whole, "bool": _flag, "Schedule": function}
        for field in fields(self):
            if field.type in checks:
                checked = checks[str(field.type)](field.name, getattr(self, field.name))
                object.__setattr__(self, field.name, checked)

    def __call__(self, step: int) -> float:
        """Return the learning rate at an update, counted from 0."""
        return self._at(whole("step", step, least=0))

    def _at(self, step: int) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(_ScheduleBase):
    """The same learning rate at every update.

    Args:
        lr: Learning rate, at least 0.

    Raises:
        TypeError, ValueError: Not a number, negative or not finite.

    Example:
        >>> Constant(0.1)(1000)
        0.1
    """

    lr: float

    def _at(self, step: int) -> float:
        return self.lr


@dataclass(frozen=True)
class PiecewiseConstant(_ScheduleBase):
    """``rates[k]`` until update ``milestones[k]``, the last rate from the last milestone on.

    As in K. He et al., "Deep Residual Learning for Image Recognition", arXiv 1512.03385. MindSpore gives as many
    milestones as rates, because its last one is the length of the list. Omit that one here.

    Args:
        milestones: Updates at which the next rate starts, increasing, at least 1.
        rates: Learning rates, one more than milestones.

    Raises:
        TypeError: Not sequences of whole numbers and of numbers.
        ValueError: Milestones do not increase, a rate is out of range, or the lengths do not match.

    Example:
        >>> as_list(PiecewiseConstant((2, 3), (0.1, 0.01, 0.001)), 5)
        [0.1, 0.1, 0.01, 0.001, 0.001]
    """

    milestones: Sequence[int]
    rates: Sequence[float]

    def __post_init__(self) -> None:
        milestones, rates = each("milestones", self.milestones, whole), each("rates", self.rates, number)
        if any(a >= b for a, b in pairwise(milestones)):
            raise ValueError(f"milestones: found {reprlib.repr(milestones)}; give increasing updates.")
        if len(rates) != len(milestones) + 1:
            raise ValueError(
                f"found {len(milestones)} milestones and {len(rates)} rates; give one more rate than milestones. "
                "Leave out a last milestone that is the length of the run, as in MindSpore."
            )
        object.__setattr__(self, "milestones", milestones)
        object.__setattr__(self, "rates", rates)

    def _at(self, step: int) -> float:
        return self.rates[bisect_right(self.milestones, step)]


@dataclass(frozen=True)
class _Decay(_ScheduleBase):
    lr: float
    _: KW_ONLY
    decay_rate: float
    decay_steps: int
    staircase: bool = False

    def _periods(self, step: int) -> float:
        return step // self.decay_steps if self.staircase else step / self.decay_steps


@dataclass(frozen=True)
class ExponentialDecay(_Decay):
    """``lr * decay_rate ** (step / decay_steps)``.

    Z. Li and S. Arora, "An Exponential Learning Rate Schedule for Deep Learning", arXiv 1910.07454. With
    ``decay_rate`` above 1 the rate grows, as in a learning-rate range test.

    Args:
        lr: Learning rate at update 0.
        decay_rate: Factor per ``decay_steps`` updates, at least 0.
        decay_steps: Updates, at least 1.
        staircase: Round ``step / decay_steps`` down.

    Raises:
        TypeError, ValueError: A setting has the wrong type or is out of range.

    Example:
        >>> as_list(ExponentialDecay(0.8, decay_rate=0.5, decay_steps=2, staircase=True), 5)
        [0.8, 0.8, 0.4, 0.4, 0.2]
    """

    def _at(self, step: int) -> float:
        try:
            return self.lr * self.decay_rate ** self._periods(step)
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class InverseDecay(_Decay):
    """``lr / (1 + decay_rate * step / decay_steps)``, inverse-time decay.

    After H. Robbins and S. Monro, "A Stochastic Approximation Method", 1951. Settings and errors as in
    :class:`ExponentialDecay`.

    Example:
        >>> as_list(InverseDecay(0.6, decay_rate=1.0, decay_steps=1), 3)
        [0.6, 0.3, 0.19999999999999998]
    """

    def _at(self, step: int) -> float:
        return self.lr / (1 + self.decay_rate * self._periods(step))


@dataclass(frozen=True)
class NaturalExponentialDecay(_Decay):
    """``lr * exp(-decay_rate * step / decay_steps)``, the published form.

    The form of TensorFlow's ``natural_exp_decay`` and of MindSpore's documentation. MindSpore's code does not divide by
    ``decay_steps``: ``per_step=True`` gives ``lr * exp(-decay_rate * step)``, with the step rounded down to a multiple
    of ``decay_steps`` if ``staircase`` is set. Other settings and errors as in :class:`ExponentialDecay`.

    Args:
        per_step: ``decay_rate`` is per update, not per ``decay_steps`` updates (MindSpore).

    Example:
        >>> published = NaturalExponentialDecay(0.1, decay_rate=0.5, decay_steps=10)
        >>> mindspore = NaturalExponentialDecay(0.1, decay_rate=0.5, decay_steps=10, per_step=True)
        >>> round(published(10), 4), round(mindspore(10), 4)
        (0.0607, 0.0007)
    """

    _: KW_ONLY
    per_step: bool = False

    def _at(self, step: int) -> float:
        scale = self.decay_steps if self.per_step else 1
        return self.lr * math.exp(-self.decay_rate * scale * self._periods(step))


@dataclass(frozen=True)
class PolynomialDecay(_ScheduleBase):
    """``end_lr + (lr - end_lr) * (1 - step / decay_steps) ** power``, then ``end_lr``.

    The "poly" policy of L.-C. Chen et al., "DeepLab", arXiv 1606.00915. With ``cycle`` the decay repeats: at each
    multiple of ``decay_steps`` the period grows by ``decay_steps``, so the rate jumps up and decays again (``cycle`` of
    TensorFlow's ``polynomial_decay``, ``update_decay_steps`` of MindSpore). Errors as in :class:`ExponentialDecay`.

    Args:
        lr: Learning rate at update 0.
        end_lr: Learning rate at update ``decay_steps``.
        decay_steps: Updates, at least 1.
        power: Above 0. With 1 the decay is linear.
        cycle: Start again after ``decay_steps``.

    Example:
        >>> as_list(PolynomialDecay(0.4, decay_steps=4), 6)
        [0.4, 0.30000000000000004, 0.2, 0.1, 0.0, 0.0]
    """

    lr: float
    _: KW_ONLY
    end_lr: float = 0.0
    decay_steps: int
    power: float = 1.0
    cycle: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.power == 0:
            raise ValueError("power: found 0; give a finite number above 0, such as 1.")

    def _at(self, step: int) -> float:
        periods = max(1, -(-step // self.decay_steps)) if self.cycle else 1
        length = self.decay_steps * periods
        return self.end_lr + (self.lr - self.end_lr) * (1 - min(step, length) / length) ** self.power


@dataclass(frozen=True)
class CosineDecay(_ScheduleBase):
    """``min_lr + (max_lr - min_lr) / 2 * (1 + cos(pi * step / decay_steps))``, then ``min_lr``.

    Equation 5 of I. Loshchilov and F. Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts",
    arXiv 1608.03983, without restarts. Errors as in :class:`ExponentialDecay`.

    Args:
        max_lr: Learning rate at update 0.
        min_lr: Learning rate at update ``decay_steps`` and after, at most ``max_lr``.
        decay_steps: Updates, at least 1.

    Example:
        >>> as_list(CosineDecay(0.2, decay_steps=2), 4)
        [0.2, 0.1, 0.0, 0.0]
    """

    max_lr: float
    _: KW_ONLY
    min_lr: float = 0.0
    decay_steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_lr > self.max_lr:
            raise ValueError(f"found max_lr {self.max_lr} below min_lr {self.min_lr}; give the larger as max_lr.")

    def _at(self, step: int) -> float:
        share = min(step, self.decay_steps) / self.decay_steps
        return self.min_lr + (self.max_lr - self.min_lr) / 2 * (1 + math.cos(math.pi * share))


@dataclass(frozen=True)
class Warmup(_ScheduleBase):
    """Linear warm-up before a schedule: ``min(step, steps) / steps`` of its learning rate.

    Section 2.2 of P. Goyal et al., "Accurate, Large Minibatch SGD", arXiv 1706.02677. The default ``start_factor`` of 0
    is MindSpore's. With it update 0 does not change the weights. Errors as in :class:`ExponentialDecay`.

    Args:
        schedule: Schedule after the warm-up, or a fixed learning rate.
        steps: Updates of warm-up, at least 1. Update ``steps`` is the first with the full rate.
        start_factor: Fraction of the rate at update 0, from 0 to 1.
        delay: Start the schedule when the warm-up ends. If False it starts at update 0, so its milestones count from
            the start of the run, and the warm-up scales its first updates.

    Example:
        >>> as_list(Warmup(CosineDecay(0.2, decay_steps=2), steps=4), 7)
        [0.0, 0.05, 0.1, 0.15000000000000002, 0.2, 0.1, 0.0]
    """

    schedule: Schedule | float
    _: KW_ONLY
    steps: int
    start_factor: float = 0.0
    delay: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start_factor > 1:
            raise ValueError(f"start_factor: found {self.start_factor}; give a number from 0 to 1.")
        check = function if callable(self.schedule) else number
        object.__setattr__(self, "schedule", check("schedule", self.schedule))

    def _at(self, step: int) -> float:
        at = max(0, step - self.steps) if self.delay else step
        rate = self.schedule(at) if callable(self.schedule) else self.schedule
        if step >= self.steps:
            return rate
        return rate * (self.start_factor + (1 - self.start_factor) * (step / self.steps))


@dataclass(frozen=True)
class PerEpoch(_ScheduleBase):
    """A schedule that counts epochs: ``schedule(step // steps_per_epoch)``.

    With :func:`as_list` these are MindSpore's list functions: ``exponential_decay_lr(lr, rate, total, per_epoch,
    decay_epoch)`` is ``as_list(PerEpoch(ExponentialDecay(lr, decay_rate=rate, decay_steps=decay_epoch),
    steps_per_epoch=per_epoch), total)``.

    Args:
        schedule: Its steps are epochs.
        steps_per_epoch: Updates in an epoch, at least 1. Errors as in :class:`ExponentialDecay`.

    Example:
        >>> as_list(PerEpoch(CosineDecay(0.2, decay_steps=2), steps_per_epoch=2), 6)
        [0.2, 0.2, 0.1, 0.1, 0.0, 0.0]
    """

    schedule: Schedule
    _: KW_ONLY
    steps_per_epoch: int

    def _at(self, step: int) -> float:
        return self.schedule(step // self.steps_per_epoch)


def as_list(schedule: Schedule, steps: int) -> list[float]:
    """Return the learning rates of the first ``steps`` updates.

    Raises:
        TypeError: Not a schedule, or not a whole number of steps.
        ValueError: ``steps`` is below 1, or a learning rate is negative or not finite.

    Example:
        >>> as_list(Warmup(0.3, steps=2), 4)
        [0.0, 0.15, 0.3, 0.3]
    """
    function("schedule", schedule)
    return [number(f"the learning rate of update {step}", schedule(step)) for step in range(whole("steps", steps))]


@dataclass(frozen=True)
class Listed(_ScheduleBase):
    """A list of learning rates, one per update, counted from 0. Past the end it raises ``IndexError``.

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

    def _at(self, step: int) -> float:
        if step >= len(self.rates):
            raise IndexError(
                f"the list of rates ended at step {len(self.rates) - 1}, but step {step} was requested (counted from "
                f"0; the list has {len(self.rates)} entries). Give one entry per update, or a schedule. For a constant "
                "rate give a number or a 0-d tensor."
            )
        return self.rates[step]


@dataclass(frozen=True)
class CheckedRate:
    """A function of the step whose results are checked. ``name`` is its name in messages."""

    schedule: Callable[[int], Any]
    name: str

    def __repr__(self) -> str:
        return repr(self.schedule)

    def __call__(self, step: int) -> float:
        """Return the rate at an update, a finite number of at least 0."""
        rate = self.schedule(step)
        if isinstance(rate, (Tensor, np.ndarray)) and rate.ndim == 0:
            rate = rate.item()
        return number(f"{self.name} at step {step}", rate)


def resolve_lr(value: Any, *, name: str = "lr") -> Schedule | None:
    """Return the schedule of a learning rate, or None if the value is constant.

    Args:
        value: A number or a 0-d tensor: constant, the result is None. A list, tuple, 1-d tensor or 1-d array: entry t
            at update t. A function of the step: called at each update, and its result is checked.
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
    if isinstance(value, (Listed, CheckedRate)):
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim > 1:
            shape = tuple(value.shape)
            raise ValueError(f"{name}: found a tensor of shape {shape}; give a 0-d tensor, or one entry per update.")
        value = value.tolist()
    if callable(value):
        return CheckedRate(function(name, value), name)
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


def number(name: str, value: Any) -> float:
    """Return a finite number that is at least 0 as a float. ``name`` is its name in messages."""
    check_number(name, value)
    return float(value)


def whole(name: str, value: Any, *, least: int = 1) -> int:
    """Return a whole number that is at least ``least`` as an int."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: found {reprlib.repr(value)}; give a whole number, at least {least}.")
    if (count := operator.index(value)) < least:
        raise ValueError(f"{name}: found {count}; give a whole number, at least {least}.")
    return count


def each(name: str, values: Any, check: Callable[[str, Any], Any]) -> tuple[Any, ...]:
    """Return the checked entries of a list."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name}: found {reprlib.repr(values)}; give a list or a tuple of numbers.")
    return tuple(check(f"{name}[{position}]", value) for position, value in enumerate(values))


def function(name: str, value: Any) -> Any:
    """Return the schedule if it is one. A class is callable but not a schedule."""
    if isinstance(value, type) or not callable(value):
        raise TypeError(
            f"{name}: found {reprlib.repr(value)}; give a function of the step, such as Constant(0.1), or "
            "Listed([...]) for one rate per update."
        )
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: found {reprlib.repr(value)}; give True or False.")
    return value


def _entries(name: str, values: Any) -> tuple[float, ...]:
    rates = each(name, values, number)
    if not rates:
        raise ValueError(f"{name}: found an empty list; give one entry per update.")
    return rates
