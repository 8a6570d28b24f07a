"""Optimizers that stand in front of another one and share its groups and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from torchboost.core.arguments import check_optimizer

__all__ = ["FrontOptimizer"]


class FrontOptimizer(Optimizer):
    """An optimizer in front of ``opt``: the same parameter groups, the same state, one set of moments.

    Schedulers and scalers may drive either.

    Args:
        opt: What updates the weights.

    Raises:
        TypeError: ``opt`` is no optimizer.
    """

    def __init__(self, opt: Optimizer) -> None:
        check_optimizer(opt, "opt")
        super().__init__(opt.param_groups, opt.defaults)
        self.opt = opt
        self.state = opt.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step ``opt``."""
        return self.opt.step(closure) if closure is not None else self.opt.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of ``opt``, loadable by it, and under a key of its own what this class adds."""
        return {**self.opt.state_dict(), "front": self._own_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint of this class, or of ``opt`` alone, beside which this class starts anew."""
        rest = {key: value for key, value in state_dict.items() if key != "front"}
        if "front" in state_dict:
            self._load_own_state(state_dict["front"])
        self.opt.load_state_dict(rest)
        self.param_groups, self.state = self.opt.param_groups, self.opt.state

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        pass
