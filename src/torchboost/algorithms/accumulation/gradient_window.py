"""Accumulation of gradients that are handed over, for loops and wrappers that hold them as tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchboost.core.arguments import is_integer

__all__ = ["GradientWindow"]

Loss = TypeVar("Loss")


class GradientWindow:
    """Collects gradients that are handed over, and updates with their mean once ``steps`` are there.

    Where the loop itself calls ``backward()``, :class:`~torchboost.Accumulator` does the same without a second copy of
    the gradients and without exchanging them between ranks in every pass.

    Args:
        steps: Calls per update, 1 or more.
        optimizer: Steps once per window, so hooks and schedulers on it follow the updates.

    Attributes:
        updated: Whether the last call stepped the optimizer; step schedulers where it did.

    Raises:
        TypeError: ``optimizer`` is no optimizer.
        ValueError: ``steps`` is no integer of 1 or more.

    Example:
        >>> import torch
        >>> from torchboost.algorithms.accumulation.gradient_window import GradientWindow
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulate = GradientWindow(2, optimizer)
        >>> for size in (8, 3):
        ...     loss = model(torch.randn(size, 4)).square().mean()
        ...     loss = accumulate(loss, torch.autograd.grad(loss, list(model.parameters())), count=size)
        >>> accumulate.updated
        True
    """

    steps_name: ClassVar[str] = "steps"
    """What the messages call the number of calls per update."""

    def __init__(self, steps: int, optimizer: Optimizer) -> None:
        if not is_integer(steps) or steps < 1:
            raise ValueError(
                f"{self.steps_name}: found {steps!r}; an integer of 1 or more says how many calls make an update."
            )
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, found {type(optimizer).__name__}.")
        self.steps = steps
        self.optimizer = optimizer
        self.updated = False
        self._clear()

    def __call__(self, loss: Loss, grads: Sequence[Tensor | None], *, count: float | None = None) -> Loss:
        """Add the gradients of one micro-batch; return the loss as it is.

        Args:
            loss: Not looked at.
            grads: One gradient per parameter of the optimizer, in the order of its groups; None where there is none.
            count: Number of samples or tokens behind gradients of a mean loss, above 0; without it all weigh the same.

        Raises:
            TypeError: An entry is neither a tensor nor None.
            ValueError: Wrong number or shapes of gradients, a bad count, or one in some calls of a window only.
        """
        grads = self._checked(grads)
        if self._counted not in (None, count is not None):
            raise ValueError(f"count: found {count}, but the window began otherwise; give one in each call or in none.")
        if count is not None and not 0 < count < math.inf:
            raise ValueError(f"count: found {count}; allowed are finite numbers above 0; leave empty batches out.")
        if not self._calls:
            self._clear()
        self._held += [None] * (len(grads) - len(self._held))  # of a group that was added within the window
        self._counted, weight = count is not None, 1.0 if count is None else float(count)
        for i, gradient in enumerate(grads):
            held = self._held[i]
            if gradient is not None and held is None:
                self._held[i] = gradient.detach() * (weight / self.steps)
            elif gradient is not None and held is not None:
                held.add_(gradient.detach(), alpha=weight / self.steps)
        self._calls += 1
        self._weight += weight
        self.updated = self._calls >= self.steps and self.flush()
        return loss

    def flush(self) -> bool:
        """Update with the mean of what a window holds that is not full; return whether there was anything."""
        self.updated = self._calls > 0
        if self.updated:
            rest = self.steps / self._weight
            self._held += [None] * (len(self._parameters()) - len(self._held))
            for parameter, held in zip(self._parameters(), self._held, strict=True):
                parameter.grad = held if held is None or rest == 1.0 else held.mul_(rest)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._clear()
        return self.updated

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, the gradients of a window that is not full included."""
        held = [None if gradient is None else gradient.clone() for gradient in self._held]
        return {"calls": self._calls, "weight": self._weight, "counted": self._counted, "held": held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned.

        Raises:
            ValueError: The window does not fit this optimizer or is longer; nothing was loaded.
        """
        if state["calls"] >= self.steps and state["calls"]:
            raise ValueError(
                f"the checkpoint holds {state['calls']} calls, a window takes {self.steps}; build it "
                f"with the {self.steps_name} it was written with."
            )
        held = self._checked(state["held"])
        self._held = [
            None if g is None else g.to(p.device, copy=True) for g, p in zip(held, self._parameters(), strict=True)
        ]
        self._calls, self._weight, self._counted = state["calls"], state["weight"], state["counted"]

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _clear(self) -> None:
        self._held: list[Tensor | None] = [None] * len(self._parameters())
        self._calls, self._weight = 0, 0.0
        self._counted: bool | None = None

    def _checked(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        parameters = self._parameters()
        if len(grads) != len(parameters):
            raise ValueError(
                f"grads: found {len(grads)}, the optimizer has {len(parameters)} parameters; give one gradient for "
                "each, in the order of its groups, None where there is none."
            )
        for i, (gradient, parameter) in enumerate(zip(grads, parameters, strict=True)):
            if gradient is not None and not isinstance(gradient, torch.Tensor):
                raise TypeError(f"grads[{i}] must be a tensor or None, found {type(gradient).__name__}.")
            if gradient is not None and gradient.shape != parameter.shape:
                raise ValueError(
                    f"grads[{i}] has shape {tuple(gradient.shape)}, its parameter {tuple(parameter.shape)}; give the "
                    "gradients in the order of the optimizer's groups."
                )
        return grads
