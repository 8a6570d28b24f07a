"""Refuse direct steps of an optimizer that is wrapped by another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from torchboost.core.wrapping import hookable
from torchboost.errors import IncompatibleError

__all__ = ["DirectSteps"]


class DirectSteps:
    """Refuse steps of a wrapped optimizer unless the wrapping optimizer makes them.

    The wrapped optimizer keeps this object alive, and with it the wrapping one.

    Args:
        behind: The wrapped optimizer. If it wraps another optimizer itself, the steps of that one are refused.
        front: The wrapping optimizer, which must be stepped instead.
        instead: The error message: what was found, and what to do.
    """

    def __init__(self, behind: Optimizer, front: Optimizer, instead: str) -> None:
        self._front, self._instead = front, instead
        self._allowed = False
        self._handle = hookable(behind).register_step_pre_hook(self._refuse)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow steps of the wrapped optimizer inside the context."""
        before, self._allowed = self._allowed, True
        try:
            yield
        finally:
            self._allowed = before

    def remove(self) -> None:
        """Allow direct steps of the wrapped optimizer again."""
        self._handle.remove()

    def _refuse(self, *_: Any) -> None:
        if not self._allowed:
            raise IncompatibleError(self._instead)
