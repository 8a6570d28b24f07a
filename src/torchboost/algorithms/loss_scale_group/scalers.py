"""Loss scalers: the common interface, a fixed scale and a dynamic scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from torchboost.algorithms.loss_scale_group.rule import Alarm, ScaleRule, ScaleState, check_scale
from torchboost.algorithms.loss_scale_group.unscaling import Part, check_scaled, last_bad, overflow_anywhere, unscale_
from torchboost.core.arguments import check_number, check_optimizer
from torchboost.errors import IncompatibleError

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScaler"]

Scaled = TypeVar("Scaled", Tensor, list[Tensor], tuple[Tensor, ...])


class _Seen(NamedTuple):
    optimizer: Optimizer
    overflow: list[bool]
    where: list[str | None]
    stepped: bool


class LossScaler:
    """Base class: ``scale``, backward, ``unscale_``, ``step`` and ``update``, as in ``GradScaler``.

    What :meth:`scale` uses first after an update holds until the next one, so all micro-batches of a window carry the
    same scale. An optimizer is not called at all at a step with overflow: weights, state and hooks stay as they are.
    Gradients are always divided before the optimizer sees them, so a fused one never gets a scale.

    Args:
        parts: Number of scales.
        agree: Whether an overflow on one rank skips the step on all. Every rank must then make the same calls.
        process_group: The ranks that agree; None stands for all.

    Attributes:
        overflowed: Whether the last :meth:`update` followed an overflow.
        agree: Whether the ranks agree on overflows.
    """

    def __init__(self, parts: int = 1, *, agree: bool = True, process_group: Any = None) -> None:
        self.overflowed = False
        self._count = parts
        self.agree, self._group = agree, process_group
        self._seen: dict[int, _Seen] = {}
        self._in_use: list[float] | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks that skip a step together, this one included."""
        together = self.agree and dist.is_available() and dist.is_initialized()
        return dist.get_world_size(self._group) if together else 1

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
        """Divide the gradients by their scale, in place, and look for overflow; once per update and optimizer.

        Raises:
            RuntimeError: Called twice since the last update, or before anything was scaled.
            IncompatibleError: A gradient is in float16; nothing was divided.
        """
        check_optimizer(optimizer)
        if id(optimizer) in self._seen:
            raise RuntimeError(
                "unscale_() was already called for this optimizer since the last update(); call it once."
            )
        if self._in_use is None:
            raise RuntimeError("unscale_() before scale(): multiply the loss, scaler.scale(loss).backward(), first.")
        members = self._members(optimizer)
        parts: list[Part] = list(zip(members, self._in_use, strict=True))
        check_scaled(parts)
        found = unscale_(parts)
        first = next(param for group in optimizer.param_groups for param in group["params"])
        overflow = overflow_anywhere(found, len(parts), first.device, agree=self.agree, process_group=self._group)
        where = [self._named(params) if bad else None for params, bad in zip(members, overflow, strict=True)]
        self._seen[id(optimizer)] = _Seen(optimizer, overflow, where, False)

    def step(self, optimizer: Optimizer, *args: Any) -> float | None:
        """Step the optimizer unless a gradient overflowed; unscale first if needed.

        Raises:
            RuntimeError: Called twice since the last update.
            IncompatibleError: A closure was given; its gradients would not be unscaled.
        """
        if any(callable(arg) for arg in args):
            raise IncompatibleError(
                f"{type(self).__name__}.step was given a closure, whose gradients would not be unscaled; compute the "
                "gradients before the step, or train this optimizer without a loss scale."
            )
        if id(optimizer) not in self._seen:
            self.unscale_(optimizer)
        seen = self._seen[id(optimizer)]
        if seen.stepped:
            raise RuntimeError("step() was already called for this optimizer since the last update(); call it once.")
        self._seen[id(optimizer)] = seen._replace(stepped=True)
        return None if any(seen.overflow) else optimizer.step(*args)

    def update(self) -> None:
        """Choose the scales of the next step.

        Raises:
            RuntimeError: No gradients were unscaled since the last update.
        """
        if not self._seen:
            raise RuntimeError("update() before unscale_() or step(): no gradients were checked for overflow.")
        seen, self._seen, self._in_use = list(self._seen.values()), {}, None
        overflow = [any(each.overflow[i] for each in seen) for i in range(self._count)]
        where = [next((each.where[i] for each in seen if each.where[i]), None) for i in range(self._count)]
        self.overflowed = any(overflow)
        self._conclude(overflow, where)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, also in the middle of a window."""
        return {**self._own_state(), "in_use": None if self._in_use is None else list(self._in_use)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned.

        Raises:
            ValueError: The checkpoint is of another scaler; nothing was loaded.
        """
        own = self._own_state()
        if set(state_dict) != {*own, "in_use"}:
            raise ValueError(
                f"the checkpoint of the scaler holds {sorted(state_dict)}, a {type(self).__name__} needs "
                f"{sorted([*own, 'in_use'])}; load it into the kind of scaler that saved it."
            )
        self._load_own_state(state_dict)
        self._seen = {}
        self._in_use = None if state_dict["in_use"] is None else list(state_dict["in_use"])
        if self._in_use is not None:
            self._begun(self._in_use)

    def get_scale(self) -> float:
        """Return the scale, or the smallest of several, without synchronising the device."""
        return min(self._applied())

    def _applied(self) -> list[float]:
        """The current scales; the first one multiplies the loss."""
        raise NotImplementedError

    def _begun(self, scales: Sequence[float]) -> None:
        """Called when the first loss since an update is scaled."""

    def _members(self, optimizer: Optimizer) -> list[list[Tensor]]:
        """The parameters of an optimizer by the scale in their gradients."""
        return [[param for group in optimizer.param_groups for param in group["params"]]]

    def _named(self, params: Sequence[Tensor]) -> str | None:
        """Name a gradient that is not finite."""
        bad = last_bad(params)
        return None if bad is None else f"the gradient of parameter {bad}, of shape {tuple(params[bad].shape)}"

    def _conclude(self, overflow: Sequence[bool], where: Sequence[str | None]) -> None:
        """Move the scales."""

    def _own_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


class FixedLossScale(LossScaler):
    """A fixed loss scale; updates that overflow are skipped.

    Args:
        scale: Above 0.
        agree: See :class:`LossScaler`.
        process_group: Likewise.

    Raises:
        TypeError, ValueError: The scale is not a finite number above 0.

    Example:
        >>> import torch, torchboost
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = torchboost.FixedLossScale(128.0)
        >>> step = torchboost.boost(model, optimizer, level="O0", scaler=scaler).step(torch.nn.functional.cross_entropy)
    """

    def __init__(self, scale: float, *, agree: bool = True, process_group: Any = None) -> None:
        super().__init__(agree=agree, process_group=process_group)
        self.set(scale)

    def set(self, scale: float) -> None:
        """Change the scale; inside an accumulation window it applies from the next window on."""
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

    Unlike ``torch.amp.GradScaler`` it has bounds and hysteresis, agrees over ranks, skips steps of fused optimizers
    like those of any other, and warns (:class:`~torchboost.ScaleCollapseWarning`) if it collapses.

    Args:
        init_scale: Scale at the beginning.
        factor: Divides the scale at an overflow, multiplies it after a window; above 1.
        window: Updates without overflow per growth.
        floor: Smallest scale.
        ceiling: Largest scale.
        hysteresis: Number of overflows before the scale shrinks; a clean window resets the count.
        agree: Whether an overflow on one rank skips the update on all; every rank must then make the same calls.
        process_group: The ranks that agree; None stands for all.

    Raises:
        TypeError, ValueError: A setting is not valid.

    Cost: one pass over the gradients and one wait for the device per update, as ``GradScaler`` has; with several
    ranks one collective of a single number.

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
        hysteresis: int = 1,
        agree: bool = True,
        process_group: Any = None,
    ) -> None:
        check_number("factor", factor, above=True)
        if factor <= 1:
            raise ValueError(f"factor: found {factor}; an overflow divides the scale by it: give more than 1.")
        super().__init__(agree=agree, process_group=process_group)
        self.rule = ScaleRule(
            growth=factor, shrink=1 / factor, window=window, floor=floor, ceiling=ceiling, hysteresis=hysteresis
        )
        self._state = self.rule.start(init_scale)
        self._alarm = Alarm("the loss scale", float(init_scale), floor)

    @property
    def overflows(self) -> int:
        """Number of updates that overflowed so far."""
        return self._alarm.overflows

    def _applied(self) -> list[float]:
        return [self._state.scale]

    def _conclude(self, overflow: Sequence[bool], where: Sequence[str | None]) -> None:
        self._state = self.rule.after(self._state, overflow[0])
        self._alarm.observe(self._state.scale, overflow[0], where[0])

    def _own_state(self) -> dict[str, Any]:
        return {"state": list(self._state), "alarm": self._alarm.state()}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._state = ScaleState(*state["state"])
        self._alarm.load(state["alarm"])
