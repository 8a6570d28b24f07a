"""Accumulation of explicit gradients, for loops and wrappers that hold them as tensors."""

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
    """Accumulates the gradients passed to it and updates with their mean after ``steps`` calls.

    If the loop itself calls ``backward()``, use :class:`~torchboost.Accumulator`: it needs no second copy of the
    gradients and does not exchange them between ranks in every pass.

    Args:
        steps: Calls per update, 1 or more.
        optimizer: Steps once per window, so its hooks and schedulers follow the updates.

    Attributes:
        updated: Whether the last call stepped the optimizer; if so, step the schedulers.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
        ValueError: ``steps`` is not an integer of 1 or more.

    Example:
        >>> import torch
        >>> from torchboost.algorithms.grad_accumulation.gradient_window import GradientWindow
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
    """Name of ``steps`` in the messages."""

    def __init__(self, steps: int, optimizer: Optimizer) -> None:
        if not is_integer(steps) or steps < 1:
            raise ValueError(
                f"{self.steps_name}: found {steps!r}; pass the number of calls per update, an integer of 1 or more."
            )
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, found {type(optimizer).__name__}.")
        self.steps = steps
        self.optimizer = optimizer
        self.updated = False
        self._clear()

    def __call__(self, loss: Loss, grads: Sequence[Tensor | None], *, count: float | None = None) -> Loss:
        """Add the gradients of one micro-batch; return the loss unchanged.

        Args:
            loss: Not used.
            grads: One gradient per parameter of the optimizer, in the order of its groups; None for a parameter without
                one.
            count: Number of samples or tokens that the loss is the mean of, above 0; without it all calls weigh the
                same.

        Raises:
            TypeError: An entry is neither a tensor nor None.
            ValueError: The number or shapes of the gradients are wrong, a count is not valid, or only some calls of a
                window have one.
        """
        grads = self._checked(grads)
        if self._counted not in (None, count is not None):
            raise ValueError(f"count: found {count}, but the window began otherwise; pass one in each call or in none.")
        if count is not None and not 0 < count < math.inf:
            raise ValueError(f"count: found {count}; allowed are finite numbers above 0; skip empty batches.")
        if not self._calls:
            self._clear()
        self._held += [None] * (len(grads) - len(self._held))  # for a group that was added within the window
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
        """Update with the mean of a window that is not full; return whether it held anything."""
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
        """Return the state of the window, including the gradients of one that is not full."""
        held = [None if gradient is None else gradient.clone() for gradient in self._held]
        return {"calls": self._calls, "weight": self._weight, "counted": self._counted, "held": held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned.

        Raises:
            ValueError: The window does not fit this optimizer or is too long; nothing was loaded.
        """
        if state["calls"] >= self.steps and state["calls"]:
            raise ValueError(
                f"the checkpoint holds {state['calls']} calls, but a window takes {self.steps}; build it with the "
                f"{self.steps_name} it was saved with."
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
                f"grads: found {len(grads)}, the optimizer has {len(parameters)} parameters; pass one gradient for "
                "each, in the order of its groups, or None."
            )
        for i, (gradient, parameter) in enumerate(zip(grads, parameters, strict=True)):
            if gradient is not None and not isinstance(gradient, torch.Tensor):
                raise TypeError(f"grads[{i}] must be a tensor or None, found {type(gradient).__name__}.")
            if gradient is not None and gradient.shape != parameter.shape:
                raise ValueError(
                    f"grads[{i}] has shape {tuple(gradient.shape)}, but its parameter has {tuple(parameter.shape)}; "
                    "pass the gradients in the order of the optimizer's groups."
                )
        return grads
