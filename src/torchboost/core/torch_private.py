"""Every private name of torch that this package reads: one function each, with the version it was last seen in.

Nothing else in the package reads a private name of torch. If an update of torch breaks a name,
``tests/core/test_torch_private.py`` names it, and it is fixed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

__all__ = ["step_pre_hooks"]


def step_pre_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that run before each step of an optimizer, in order: ``Optimizer._optimizer_step_pre_hooks``."""
    return list(optimizer._optimizer_step_pre_hooks.values())
