"""BFGS in a few dimensions: an estimate of the inverse Hessian from steps and the changes of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["InverseHessian"]

CURVATURE = 1e-20
"""A pair with ``y.s`` not above this is ignored, as in MindSpore."""


class InverseHessian:
    """A symmetric k x k estimate B of the inverse Hessian, the identity at first, on the host in float64.

    The BFGS update, ``B <- (I - s y'/y.s) B (I - y s'/y.s) + s s'/y.s``, makes ``B y = s`` (Nocedal and Wright,
    "Numerical Optimization", equation 6.17). Cost: a few k x k products per update, microseconds for k = 32.

    Args:
        dimensions: k.
    """

    def __init__(self, dimensions: int) -> None:
        self.matrix = torch.eye(dimensions, dtype=torch.float64, device="cpu")
        self._gradient: Tensor | None = None
        self._step = torch.zeros(dimensions, dtype=torch.float64, device="cpu")
        self._before: tuple[Tensor, Tensor | None] = (self.matrix, None)

    def direction(self, gradient: Tensor) -> Tensor:
        """Update B from the last step and the change of the gradient, and return ``-B g``.

        Args:
            gradient: Shape ``(k,)``, float64, on the host.
        """
        self._before = (self.matrix, self._gradient)
        if self._gradient is not None:
            self.matrix = _updated(self.matrix, self._step, gradient - self._gradient)
        self._gradient = gradient
        return -(self.matrix @ gradient)

    def accept(self, step: Tensor) -> None:
        """Record the step taken along the last direction."""
        self._step = step

    def reject(self) -> None:
        """Drop the last direction and its gradient, if no step was taken along it."""
        self.matrix, self._gradient = self._before

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Call it between steps only."""
        gradient = None if self._gradient is None else self._gradient.clone()
        return {"matrix": self.matrix.clone(), "gradient": gradient, "step": self._step.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned.

        Raises:
            ValueError: The state is of another number of dimensions; nothing was loaded.
        """
        if state["matrix"].shape != self.matrix.shape:
            raise ValueError(
                f"the checkpoint holds a subspace of {state['matrix'].shape[0]} dimensions, but this one has "
                f"{self.matrix.shape[0]}; load it with the basis that it was saved with."
            )
        self.matrix, self._step = _on_host(state["matrix"]), _on_host(state["step"])
        self._gradient = None if state["gradient"] is None else _on_host(state["gradient"])


def _on_host(loaded: Tensor) -> Tensor:
    """Return a copy on the host, whatever device the checkpoint was mapped to."""
    return loaded.to("cpu", torch.float64, copy=True)


def _updated(inverse: Tensor, step: Tensor, change: Tensor) -> Tensor:
    curvature = change @ step
    if not curvature > CURVATURE:
        return inverse
    shift = torch.eye(len(step), dtype=inverse.dtype, device=inverse.device) - torch.outer(change, step) / curvature
    return shift.T @ inverse @ shift + torch.outer(step, step) / curvature
