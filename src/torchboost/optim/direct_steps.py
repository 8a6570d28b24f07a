"""What stands in front of an optimizer must not be passed by: steps of the one behind it are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from torchboost.core.wrapping import hookable
from torchboost.errors import IncompatibleError

__all__ = ["DirectSteps"]


class DirectSteps:
    """Refuses steps of an optimizer that somebody else than the one in front of it makes.

    The optimizer behind keeps this, and so the one in front, alive: whoever holds the one finds the other.

    Args:
        behind: Whose steps are refused, or those of the optimizer that it wraps.
        front: What is to be stepped in its place.
        instead: The message: what was found, and what to do.
    """

    def __init__(self, behind: Optimizer, front: Optimizer, instead: str) -> None:
        self._front, self._instead = front, instead
        self._allowed = False
        self._handle = hookable(behind).register_step_pre_hook(self._refuse)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Return the context in which the optimizer behind may be stepped."""
        before, self._allowed = self._allowed, True
        try:
            yield
        finally:
            self._allowed = before

    def remove(self) -> None:
        """Let the optimizer behind be stepped by everyone again."""
        self._handle.remove()

    def _refuse(self, *_: Any) -> None:
        if not self._allowed:
            raise IncompatibleError(self._instead)
