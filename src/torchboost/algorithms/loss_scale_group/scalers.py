"""Loss scalers: the rule that moves a scale, the common interface, a fixed scale and a dynamic scale."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from torchboost.core.arguments import check_number, check_optimizer, is_integer
from torchboost.core.torch_private import check_and_unscale_, sparse_values
from torchboost.core.wrapping import parameters_of
from torchboost.distributed.agreement import local_part, several
from torchboost.errors import IncompatibleError, ScaleCollapseWarning

Scaled = TypeVar("Scaled", Tensor, list[Tensor], tuple[Tensor, ...])

LARGEST = 2.0**100
"""Scales lie within this and its inverse, so that float32 holds both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRule:
    """The rule that adjusts a scale after overflows: MindSpore's, with bounds.

    On overflow ``scale = max(scale * shrink, floor)`` and the window starts again. After every ``window`` updates
    without one ``scale = min(scale * growth, ceiling)``.

    Args:
        growth: Factor after a clean window, at least 1.
        shrink: Factor at an overflow, above 0 and below 1.
        window: Clean updates per growth.
        floor: Smallest scale.
        ceiling: Largest scale.

    Raises:
        TypeError, ValueError: A setting is not valid.

    Example:
        >>> import torch, torchboost
        >>> rule = torchboost.ScaleRule(growth=2.0, shrink=0.5, window=2)
        >>> scaler = torchboost.GroupGradScaler(torch.nn.Sequential(torch.nn.Linear(4, 2)), ["0"], rule=rule)
    """

    growth: float = 2.0
    shrink: float = 0.5
    window: int = 1000
    floor: float = 1.0
    ceiling: float = 2.0**32

    def __post_init__(self) -> None:
        if not is_integer(self.window) or self.window < 1:
            raise ValueError(f"window: found {self.window!r}; give an integer of 1 or more.")
        for name in ("growth", "shrink", "floor", "ceiling"):
            check_number(name, getattr(self, name), above=True)
        if self.growth < 1:
            raise ValueError(f"growth: found {self.growth}; a clean window multiplies the scale by it: give 1 or more.")
        if self.shrink >= 1:
            raise ValueError(f"shrink: found {self.shrink}; an overflow multiplies the scale by it: give less than 1.")
        if not 1 / LARGEST <= self.floor <= self.ceiling <= LARGEST:
            raise ValueError(
                f"floor, ceiling: found {self.floor} and {self.ceiling}; the floor must not be above the ceiling, and "
                "both lie between 2**-100 and 2**100."
            )


class MovingScale:
    """A scale that a rule moves. It counts its overflows, and warns once if it collapses.

    It collapses when eight updates in a row overflow, or when it is nearer to its floor than to its start (on a
    logarithmic scale). ``title`` is the scale in words, such as ``"the loss scale of group 'stem'"``. ``clean`` counts
    the updates without overflow since the scale last moved.
    """

    ROW = 8

    def __init__(self, rule: ScaleRule, scale: float, title: str) -> None:
        self.scale = float(scale)
        self.clean = self.overflows = self.in_a_row = 0
        self._rule, self._start, self._title = rule, self.scale, title
        self._warned = False

    def move(self, overflow: bool) -> None:
        """Move the scale after an update. ``overflow`` says whether it overflowed."""
        rule = self._rule
        self.in_a_row = self.in_a_row + 1 if overflow else 0
        self.overflows += overflow
        self.clean = 0 if overflow else self.clean + 1
        if overflow:
            self.scale = max(self.scale * rule.shrink, rule.floor)
        elif self.clean >= rule.window:
            self.scale, self.clean = min(self.scale * rule.growth, rule.ceiling), 0

    def warn(self, overflow: bool) -> None:
        """Warn if the scale collapses. All scales move before one warns, as a warning may be raised as an error."""
        scale, floor = self.scale, self._rule.floor
        low = scale < math.sqrt(self._start * floor)
        falls = overflow and (low or self.in_a_row >= self.ROW)
        if falls and not self._warned:
            warnings.warn(
                f"{self._title} fell from {self._start:g} to {scale:g} (floor {floor:g}): {self.in_a_row} overflows in "
                f"a row, {self.overflows} in all. The run will fail if this continues: lower the learning rate, clip "
                "the gradients, or compute this part in bfloat16 or float32.",
                ScaleCollapseWarning,
                stacklevel=4,
            )
        self._warned = falls or (self._warned and (overflow or low))

    def saved(self) -> tuple[list[Any], list[int]]:
        """Return the scale and the counters for a checkpoint."""
        return [self.scale, self.clean], [self.overflows, self.in_a_row, int(self._warned)]

    @staticmethod
    def check(state: Sequence[Any], counts: Sequence[int]) -> None:
        """Raise ``TypeError`` or ``ValueError`` unless :meth:`load` can resume from these."""
        scale, clean = state[:2]  # older versions saved a third number
        overflows, in_a_row, _ = counts
        check_scale("the scale", scale)
        for number in (clean, overflows, in_a_row):
            if not is_integer(number) or number < 0:
                raise ValueError(f"found {number!r} as a count of updates; it is an integer, at least 0.")

    def load(self, state: Sequence[Any], counts: Sequence[int]) -> None:
        """Resume from the result of :meth:`saved`."""
        self.scale, self.clean = state[:2]
        self.overflows, self.in_a_row, warned = counts
        self._warned = bool(warned)


def check_scale(name: str, value: Any, rule: ScaleRule | None = None) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``value`` is a number that can scale gradients in float32.

    It must also lie within the bounds of the rule that moves it, if there is one.
    """
    check_number(name, value, above=True)
    if not 1 / LARGEST <= value <= LARGEST:
        raise ValueError(f"{name}: found {value}; allowed are 2**-100 to 2**100.")
    if rule is not None and not rule.floor <= value <= rule.ceiling:
        bounds = f"{rule.floor} (floor) to {rule.ceiling} (ceiling)"
        raise ValueError(f"{name}: found {value}; allowed are {bounds}: change the scale or the bound.")


class LossScaler:
    """Base class: ``scale``, backward, ``unscale_``, ``step`` and ``update``, as in ``GradScaler``.

    The scale that :meth:`scale` uses first after an update holds until the next one, so all micro-batches of a window
    carry the same scale. An optimizer is not called at all at a step with overflow: weights, state and hooks do not
    change. Gradients are always divided before the optimizer sees them, so a fused one never gets a scale.

    Args:
        agree: Whether an overflow on one rank skips the step on all. Every rank must then make the same calls.

    Attributes:
        overflowed: Whether the last :meth:`update` followed an overflow.
        agree: Whether the ranks agree on overflows.
    """

    def __init__(self, *, agree: bool = True) -> None:
        self.overflowed = False
        self.agree = agree
        # For each scale whether a gradient was not finite, by optimizer.
        self._overflows: dict[Optimizer, list[bool]] = {}
        self._stepped: set[Optimizer] = set()
        self._in_use: list[float] | None = None

    def scale(self, outputs: Scaled) -> Scaled:
        """Return the loss, or each of several, times the scale."""
        if self._in_use is None:
            self._in_use = self._applied()
            self._begun(self._in_use)
        factor = self._in_use[0]
        if isinstance(outputs, Tensor):
            return outputs if factor == 1.0 else outputs * factor
        return type(outputs)(self.scale(output) for output in outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by their scale, in place, and look for overflow. Once per update and optimizer.

        Raises:
            RuntimeError: Called twice since the last update, or before anything was scaled.
            IncompatibleError: A gradient is in float16. Nothing was divided.
        """
        check_optimizer(optimizer)
        if optimizer in self._overflows:
            raise RuntimeError(
                "unscale_() was already called for this optimizer since the last update(); call it once."
            )
        if self._in_use is None:
            raise RuntimeError("unscale_() before scale(): multiply the loss, scaler.scale(loss).backward(), first.")
        members = self._members(optimizer)
        device = parameters_of(optimizer)[0].device
        total = torch.zeros(len(members), dtype=torch.float32, device=device)
        for flags in divide_(members, self._in_use):
            total += flags.to(device)
        if self.agree and several():
            dist.all_reduce(total, dist.ReduceOp.MAX)
        self._overflows[optimizer] = [flag > 0 for flag in total.tolist()]

    def step(self, optimizer: Optimizer, *args: Any) -> float | None:
        """Step the optimizer unless a gradient overflowed. Unscale first if needed.

        Raises:
            RuntimeError: Called twice since the last update.
            IncompatibleError: A closure was given. Its gradients would not be unscaled.
        """
        if any(callable(arg) for arg in args):
            raise IncompatibleError(
                f"{type(self).__name__}.step was given a closure, whose gradients would not be unscaled; compute the "
                "gradients before the step, or train this optimizer without a loss scale."
            )
        if optimizer not in self._overflows:
            self.unscale_(optimizer)
        if optimizer in self._stepped:
            raise RuntimeError("step() was already called for this optimizer since the last update(); call it once.")
        self._stepped.add(optimizer)
        return None if any(self._overflows[optimizer]) else optimizer.step(*args)

    def update(self) -> None:
        """Choose the scales of the next step.

        Raises:
            RuntimeError: No gradients were unscaled since the last update.
        """
        if not self._overflows:
            raise RuntimeError("update() before unscale_() or step(): no gradients were checked for overflow.")
        overflows = [any(flags) for flags in zip(*self._overflows.values(), strict=True)]
        self._overflows, self._stepped, self._in_use = {}, set(), None
        self.overflowed = any(overflows)
        self._conclude(overflows)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, also in the middle of a window."""
        return {**self._own_state(), "in_use": None if self._in_use is None else list(self._in_use)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from the result of :meth:`state_dict`.

        Raises:
            ValueError: The checkpoint is of another scaler, or damaged. Nothing was loaded.
        """
        entries = [*self._own_state(), "in_use"]
        if set(state_dict) != set(entries):
            raise ValueError(
                f"the checkpoint of the scaler holds {sorted(state_dict)}, a {type(self).__name__} needs "
                f"{sorted(entries)}; load it into the kind of scaler that saved it."
            )
        self._check_kind(state_dict)
        try:
            in_use = None if state_dict["in_use"] is None else list(state_dict["in_use"])
            for scale in in_use or ():
                check_scale("in_use", scale)
            if in_use is not None and len(in_use) != len(self._applied()):
                raise ValueError(f"found {len(in_use)} scales in use, needed are {len(self._applied())}.")
            self._load_own_state(state_dict)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"the checkpoint of the scaler is damaged ({type(error).__name__}: {error}); load another one."
            ) from error
        self._overflows, self._stepped, self._in_use = {}, set(), in_use
        if self._in_use is not None:
            self._begun(self._in_use)

    def get_scale(self) -> float:
        """Return the scale, or the smallest of several, without synchronising the device."""
        return min(self._applied())

    def _applied(self) -> list[float]:
        """The current scales. The first one multiplies the loss."""
        raise NotImplementedError

    def _begun(self, scales: Sequence[float]) -> None:
        """Called when the first loss since an update is scaled."""

    def _members(self, optimizer: Optimizer) -> list[list[Tensor]]:
        """The parameters of an optimizer by the scale in their gradients."""
        return [parameters_of(optimizer)]

    def _conclude(self, overflows: Sequence[bool]) -> None:
        """Move the scales. ``overflows`` says for each of them whether it overflowed."""

    def _own_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if a checkpoint is of other scales."""

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of :meth:`_own_state`. If it raises, nothing was loaded."""
        raise NotImplementedError


class FixedLossScale(LossScaler):
    """A fixed loss scale. Updates that overflow are skipped.

    Args:
        scale: Above 0.
        agree: Whether an overflow on one rank skips the step on all. Every rank must then make the same calls.

    Raises:
        TypeError, ValueError: The scale is not a finite number above 0.

    Example:
        >>> import torch, torchboost
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = torchboost.FixedLossScale(128.0)
        >>> step = torchboost.boost(model, optimizer, level="O0", scaler=scaler).step(torch.nn.functional.cross_entropy)
    """

    def __init__(self, scale: float, *, agree: bool = True) -> None:
        super().__init__(agree=agree)
        self.set(scale)

    def set(self, scale: float) -> None:
        """Change the scale. Inside an accumulation window it applies from the next window on."""
        check_scale("scale", scale)
        self._scale = float(scale)

    def _applied(self) -> list[float]:
        return [self._scale]

    def _own_state(self) -> dict[str, Any]:
        return {"scale": self._scale}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self.set(state["scale"])


class DynamicLossScale(LossScaler):
    """A dynamic loss scale by MindSpore's rule: it shrinks at an overflow and grows after a clean window.

    Unlike ``torch.amp.GradScaler`` it has bounds, agrees over ranks, skips steps of fused optimizers
    like steps of any other, and warns (:class:`~torchboost.ScaleCollapseWarning`) if it collapses.

    Args:
        init_scale: Scale at the beginning.
        factor: Divides the scale at an overflow, multiplies it after a window. Above 1.
        window: Updates without overflow per growth.
        floor: Smallest scale.
        ceiling: Largest scale.
        agree: Whether an overflow on one rank skips the update on all. Every rank must then make the same calls.

    Raises:
        TypeError, ValueError: A setting is not valid.

    Cost: one pass over the gradients and one wait for the device per update, as ``GradScaler`` has. With several ranks
    one collective of a single number.

    Example:
        >>> import torch, torchboost
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = torchboost.DynamicLossScale(1024.0, window=100)
        >>> scaler.scale(model(torch.randn(3, 4)).sum()).backward()
        >>> scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        *,
        factor: float = 2.0,
        window: int = 1000,
        floor: float = 1.0,
        ceiling: float = 2.0**32,
        agree: bool = True,
    ) -> None:
        check_number("factor", factor, above=True)
        if factor <= 1:
            raise ValueError(f"factor: found {factor}; an overflow divides the scale by it: give more than 1.")
        super().__init__(agree=agree)
        self.rule = ScaleRule(growth=factor, shrink=1 / factor, window=window, floor=floor, ceiling=ceiling)
        check_scale("init_scale", init_scale, self.rule)
        self._moving = MovingScale(self.rule, init_scale, "the loss scale")

    def _applied(self) -> list[float]:
        return [self._moving.scale]

    def _conclude(self, overflows: Sequence[bool]) -> None:
        self._moving.move(overflows[0])
        self._moving.warn(overflows[0])

    def _own_state(self) -> dict[str, Any]:
        state, alarm = self._moving.saved()
        return {"state": state, "alarm": alarm}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._moving.check(state["state"], state["alarm"])
        self._moving.load(state["state"], state["alarm"])


@torch.no_grad()
def divide_(members: Sequence[Sequence[Tensor]], scales: Sequence[float]) -> list[Tensor]:
    """Divide the gradients of each member by its scale, in place: dense, sparse or sharded, in one pass.

    Return for each device a tensor with one number per member (float32): 0 if all gradients there are finite. A
    gradient in float16, in which numbers that the scale lifted out of the subnormal ones would fall back, is refused.
    """
    flags: dict[torch.device, Tensor] = {}
    batches: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
    for index, params in enumerate(members):
        for param in params:
            if param.grad is None:
                continue
            if param.grad.dtype is torch.float16:
                raise IncompatibleError(
                    f"a parameter of shape {tuple(param.shape)} has its gradient in float16, which cannot hold it once "
                    "it is unscaled; keep the parameters in float32 and compute in float16 under torch.autocast."
                )
            numbers = _numbers(param.grad)
            batches.setdefault((index, numbers.device, numbers.dtype), []).append(numbers)
    for (index, device, _), grads in batches.items():
        if device not in flags:
            flags[device] = torch.zeros(len(members), dtype=torch.float32, device=device)
        inverse = torch.full((), 1.0 / scales[index], dtype=torch.float32, device=device)
        check_and_unscale_(grads, flags[device][index : index + 1], inverse)
    return list(flags.values())


def _numbers(grad: Any) -> Tensor:
    """Return the stored numbers of a gradient. Shards of this rank only."""
    grad = local_part(grad)
    values = sparse_values(grad) if grad.is_sparse else grad
    if not values.is_complex():
        return values
    # The kernel knows real numbers only. A conjugate that is not worked out yet has the memory of the other one.
    return torch.view_as_real(values.conj() if values.is_conj() else values)
