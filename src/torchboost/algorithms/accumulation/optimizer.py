"""The optimizer that stands in front of the user's own if gradients accumulate in a loop that stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchboost.algorithms.accumulation.algorithm import Accumulator
from torchboost.algorithms.accumulation.gradient_window import GradientWindow
from torchboost.optim.direct_steps import DirectSteps
from torchboost.optim.front import FrontOptimizer

__all__ = ["AccumulatingOptimizer"]

_PASSED_BY = (
    "grad_accumulation: the optimizer that was boosted was stepped directly, which would update after every batch; "
    "step the one that boost returned: model, optimizer = torchboost.boost(model, optimizer, ...) or "
    "network, optimizer = booster.network_auto_process_train(network, optimizer). BoostTrainOneStepCell takes either."
)


class AccumulatingOptimizer(FrontOptimizer):
    """Applies every k-th step, with the mean of k gradients, in a loop that stays as it was.

    Every ``step()`` takes the gradients away into a buffer of its own, so that clipping and loss scaling in the loop
    act on each batch as they did, and ``zero_grad()`` loses nothing. A scheduler in such a loop still follows the
    batches. Ranks exchange gradients for each batch; the training cell, which knows when a window begins, does not.

    Args:
        opt: Stepped once per window, so that hooks on it follow the updates. A step of it that passes this by would
            update with the gradients of one batch, and is refused.
        accumulator: Says how many batches make an update.

    Copies and pickles go on with the window, on an optimizer of their own.

    Attributes:
        updated: Whether the last ``step()`` updated the weights.
        direct: Refuses steps of ``opt`` that pass this by.
    """

    copyable = True

    def __init__(self, opt: Optimizer, accumulator: Accumulator) -> None:
        super().__init__(opt)
        self.accumulator = accumulator
        self.updated = False
        self._given = GradientWindow(accumulator.steps, opt)
        self.direct = DirectSteps(opt, self, _PASSED_BY)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Add the gradients to the window, and update where that fills it; return what the closure returns."""
        returned = None
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
        self._given.steps = self.accumulator.steps  # 1 after the algorithm was removed
        parameters = self._parameters()
        with self.direct.allowed():
            self._given(None, [parameter.grad for parameter in parameters])
        self.updated = self._given.updated
        for parameter in parameters:
            parameter.grad = None
        return returned

    def flush(self) -> bool:
        """Update with what a window holds that is not full; return whether there was anything."""
        with self.direct.allowed():
            self.updated = self._given.flush()
        return self.updated

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "direct"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.direct = DirectSteps(self.opt, self, _PASSED_BY)  # hooks stay behind

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _own_state(self) -> dict[str, Any]:
        return self._given.state_dict()

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self._given.load_state_dict(state)
