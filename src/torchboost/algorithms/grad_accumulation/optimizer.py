"""The optimizer that wraps the user's optimizer if gradients accumulate in an unchanged loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchboost.algorithms.grad_accumulation.algorithm import Accumulator
from torchboost.algorithms.grad_accumulation.gradient_window import GradientWindow
from torchboost.optim.direct_steps import DirectSteps
from torchboost.optim.wrapping_optimizer import WrappingOptimizer

__all__ = ["AccumulatingOptimizer"]

_PASSED_BY = (
    "grad_accumulation: the original optimizer was stepped directly, which would update after every batch; step the "
    "one that boost returned: model, optimizer = torchboost.boost(model, optimizer, ...) or network, optimizer = "
    "booster.network_auto_process_train(network, optimizer). BoostTrainOneStepCell accepts both."
)


class AccumulatingOptimizer(WrappingOptimizer):
    """Applies every k-th step with the mean of k gradients; the loop does not change.

    Every ``step()`` moves the gradients into a buffer. Clipping and loss scaling in the loop therefore act on each
    batch as before, and ``zero_grad()`` loses nothing. A scheduler in such a loop still follows the batches. Ranks
    exchange gradients for each batch; the training cell knows when a window begins and does not.

    Args:
        opt: Stepped once per window, so its hooks follow the updates. Stepping it directly would update with the
            gradients of one batch and raises an error.
        accumulator: Its ``steps`` is the number of batches per update.

    Copies and pickles keep the window and have their own optimizer.

    Attributes:
        updated: Whether the last ``step()`` updated the weights.
        direct: Refuses direct steps of ``opt``.
    """

    copyable = True

    def __init__(self, opt: Optimizer, accumulator: Accumulator) -> None:
        super().__init__(opt)
        self.accumulator = accumulator
        self.updated = False
        self._given = GradientWindow(accumulator.steps, opt)
        self._taken: list[Tensor] = []
        self.direct = DirectSteps(opt, self, _PASSED_BY)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Add the gradients to the window and update if it is full; return what the closure returns."""
        returned = None
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
        self._given.steps = self.accumulator.steps  # 1 after the algorithm was removed
        parameters = self._parameters()
        self._taken = [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
        with self.direct.allowed():
            self._given(None, [parameter.grad for parameter in parameters])
        self.updated = self._given.updated
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
        """Update with a window that is not full; return whether it held anything."""
        with self.direct.allowed():
            self.updated = self._given.flush()
        return self.updated

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "direct"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.direct = DirectSteps(self.opt, self, _PASSED_BY)  # hooks are not copied

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _own_state(self) -> dict[str, Any]:
        return self._given.state_dict()

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self._given.load_state_dict(state)

    def _restart(self) -> None:
        self._given = GradientWindow(self.accumulator.steps, self.opt)
