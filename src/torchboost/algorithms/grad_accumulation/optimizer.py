"""Accumulation of explicit gradients, and the optimizer that does it behind an unchanged loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchboost.algorithms.grad_accumulation.algorithm import Accumulator, Window, checked_steps
from torchboost.core.arguments import check_optimizer
from torchboost.core.wrapping import parameters_of
from torchboost.optim.wrapping_optimizer import DirectSteps, WrappingOptimizer

Loss = TypeVar("Loss")

_PASSED_BY = (
    "grad_accumulation: the original optimizer was stepped directly, which would update after every batch; step the "
    "one that boost returned: model, optimizer = torchboost.boost(model, optimizer, ...) or network, optimizer = "
    "booster.network_auto_process_train(network, optimizer). BoostTrainOneStepCell accepts both."
)


class GradientWindow:
    """Accumulates the gradients passed to it and updates with their mean after ``steps`` calls.

    See :class:`torchboost.GradientAccumulation`, which is this class under MindSpore's name.

    Args:
        steps: Calls per update, 1 or more.
        optimizer: Steps once per window, so its hooks and schedulers follow the updates.

    Attributes:
        updated: Whether the last call stepped the optimizer. If so, step the schedulers.
    """

    def __init__(self, steps: int, optimizer: Optimizer) -> None:
        self.steps = checked_steps(steps)
        check_optimizer(optimizer, "optimizer")
        self.optimizer = optimizer
        self.updated = False
        self._clear()

    def __call__(self, loss: Loss, grads: Sequence[Tensor | None], *, count: float | None = None) -> Loss:
        """Add the gradients of one micro-batch. Return the loss unchanged.

        Args:
            loss: Not used.
            grads: One gradient per parameter of the optimizer, in the order of its groups. None for a parameter without
                one.
            count: Number of samples or tokens that the loss is the mean of. Without it all calls weigh the same.

        Raises:
            ValueError: The number or shapes of the gradients are wrong, a count is not valid, or only some calls of a
                window have one.
        """
        grads, number = self._checked(grads), self._window.checked(count)
        if not self._window.index:
            self._clear()
            self._window.length = self.steps
        self._sums += [None] * (len(grads) - len(self._sums))  # for a group that was added within the window
        weight = 1.0 if number is None else number
        share = weight / self._window.length
        for i, (total, gradient) in enumerate(zip(self._sums, grads, strict=True)):
            if gradient is not None and total is None:
                self._sums[i] = gradient.detach() * share
            elif gradient is not None and total is not None:
                total.add_(gradient.detach(), alpha=share)
        self._window.add(weight, counted=number is not None)
        self._window.index += 1
        self.updated = self._window.index >= self.steps and self.flush()
        return loss

    def flush(self) -> bool:
        """Update with the mean of a window that is not full. Return whether it held anything.

        Raises:
            ValueError: All counts were 0.
        """
        self.updated = self._window.index > 0
        if self.updated:
            window, sums, parameters = self._window, self._sums, parameters_of(self.optimizer)
            self._clear()
            correction = window.correction(window.weight)
            sums += [None] * (len(parameters) - len(sums))
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.grad = total if total is None or correction == 1.0 else total.mul_(correction)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.updated

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the window, including the gradients of one that is not full."""
        window, sums = self._window, [None if total is None else total.clone() for total in self._sums]
        state = {"calls": window.index, "weight": window.weight, "counted": window.counted, "held": sums}
        return {**state, "length": window.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of :meth:`state_dict`. If ``steps`` differs, the window ends with the one here.

        Raises:
            ValueError: The window does not fit this optimizer or is too long. Nothing was loaded.
        """
        calls, length = state["calls"], state.get("length", self.steps)  # the version before wrote no length
        if calls and calls >= self.steps:
            raise ValueError(
                f"the checkpoint holds {calls} calls, but a window takes {self.steps}; use the steps of the saved one."
            )
        sums, window = self._checked(state["held"]), Window(length, calls, state["weight"], state["counted"])
        pairs = zip(sums, parameters_of(self.optimizer), strict=True)
        self._sums = [None if total is None else total.to(param.device, copy=True) for total, param in pairs]
        self._window = window

    def _clear(self) -> None:
        self._window = Window()
        self._sums: list[Tensor | None] = [None] * len(parameters_of(self.optimizer))

    def _checked(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        parameters = parameters_of(self.optimizer)
        if len(grads) != len(parameters):
            raise ValueError(
                f"grads: found {len(grads)}, the optimizer has {len(parameters)} parameters; pass one gradient for "
                "each, in the order of its groups, or None."
            )
        for i, (gradient, parameter) in enumerate(zip(grads, parameters, strict=True)):
            if gradient is not None and gradient.shape != parameter.shape:
                raise ValueError(
                    f"grads[{i}] has shape {tuple(gradient.shape)}, but its parameter has {tuple(parameter.shape)}; "
                    "pass the gradients in the order of the optimizer's groups."
                )
        return grads


class AccumulatingOptimizer(WrappingOptimizer):
    """Applies every k-th step with the mean of k gradients. The loop does not change.

    Every ``step()`` moves the gradients into a buffer. Clipping and loss scaling in the loop therefore act on each
    batch as before, and ``zero_grad()`` loses nothing. A scheduler in such a loop still follows the batches. Ranks
    exchange gradients for each batch. The training cell knows when a window begins and does not.

    ``opt`` is stepped once per window, so its hooks follow the updates. A direct step, which would update with the
    gradients of one batch, is refused. ``accumulator.steps`` is the number of batches per update, and ``updated`` says
    whether the last ``step()`` was an update. Copies and pickles keep the window and have their own optimizer.
    """

    copyable = True

    def __init__(self, opt: Optimizer, accumulator: Accumulator) -> None:
        super().__init__(opt)
        self.accumulator = accumulator
        self.updated = False
        self._collected = GradientWindow(accumulator.steps, opt)
        self._taken: list[Tensor] = []
        self.direct = DirectSteps(opt, self, _PASSED_BY)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Add the gradients to the window and update if it is full. Return the result of the closure."""
        returned = None
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
        self._collected.steps = self.accumulator.steps  # 1 after the algorithm was removed
        parameters = parameters_of(self)
        self._taken = [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
        with self.direct.allowed():
            self._collected(None, [parameter.grad for parameter in parameters])
        self.updated = self._collected.updated
        for parameter in parameters:
            parameter.grad = None
        return returned

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients. Those that the last ``step`` has moved away are 0 afterwards if not set to None."""
        super().zero_grad(set_to_none)
        if not set_to_none:
            for parameter in self._taken:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self._taken = []

    def flush(self) -> bool:
        """Update with a window that is not full. Return whether it held anything."""
        with self.direct.allowed():
            self.updated = self._collected.flush()
        return self.updated

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "direct"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.direct = DirectSteps(self.opt, self, _PASSED_BY)  # hooks are not copied

    def _own_state(self) -> dict[str, Any]:
        return self._collected.state_dict()

    def _loading(self, state: dict[str, Any]) -> Callable[[], None]:
        collected = GradientWindow(self.accumulator.steps, self.opt)
        collected.load_state_dict(state)
        return partial(setattr, self, "_collected", collected)

    def _restart(self) -> None:
        self._collected = GradientWindow(self.accumulator.steps, self.opt)
