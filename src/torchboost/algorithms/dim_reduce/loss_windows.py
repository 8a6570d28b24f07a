"""The mean loss of one window of updates, compared with the window before."""

from __future__ import annotations

from typing import Any

__all__ = ["LossWindows"]


class LossWindows:
    """Means of the loss over windows of updates, of which the last two are kept."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0
        self._means: list[float] = []

    def add(self, loss: float, size: int) -> bool:
        """Take a loss; return whether it fills a window of ``size`` that has one before it to be compared with."""
        self._sum, self._count = self._sum + loss, self._count + 1
        if self._count < size:
            return False
        self._means = [*self._means[-1:], self._sum / self._count]
        self._sum, self._count = 0.0, 0
        return len(self._means) == 2

    def gain(self) -> float:
        """Return by which share of the mean before the last mean is lower."""
        before, now = self._means
        return (before - now) / abs(before) if before else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"sum": self._sum, "count": self._count, "means": list(self._means)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned."""
        self._sum, self._count, self._means = state["sum"], state["count"], list(state["means"])
