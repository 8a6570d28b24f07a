"""Who owns the training loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torchboost.distributed.agreement import from_first_rank
from torchboost.registry import Facts, Loop

__all__ = ["Host"]


@dataclass(frozen=True, kw_only=True)
class Host:
    """Who owns the training loop, and what it does around the model.

    Args:
        loop: See :func:`boost`.
        precision: The mixed precision in which a trainer computes, in its own words; empty if it uses none.
        forward: Makes the context in which it computes each forward pass.
        together: Whether all ranks ask for the facts together, as in a trainer.
    """

    loop: Loop = "own"
    precision: str = ""
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    together: bool = False

    def facts(self, model: nn.Module) -> Facts:
        """Look at the machine and the model. The speed of bfloat16 is then that of the first rank."""
        facts = Facts.measure(model, loop=self.loop, precision=self.precision)
        if not self.together:
            return facts
        fast, reason = from_first_rank((facts.half_precision, facts.half_precision_reason))
        return replace(facts, half_precision=fast, half_precision_reason=reason)
