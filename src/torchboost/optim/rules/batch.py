"""The tensors of one group in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchboost.optim.memory_layout import aligned
from torchboost.optim.rules.checked import strides

__all__ = ["Batch"]


@dataclass(slots=True)
class Batch:
    """The parameters of a group that have a gradient, as parallel lists.

    Args:
        params: The tensors to update in place: the parameters, or their float32 masters.
        grads: Their gradients, in the precision of ``params``.
        states: Their states.
        layout: Strides of ``params``, if already known.
    """

    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    layout: list[tuple[int, ...]] | None = None

    def state(self, key: str) -> list[Tensor]:
        """Return one entry of all states."""
        return [state[key] for state in self.states]

    def align(self, keys: Sequence[str]) -> None:
        """Give gradients and the entries ``keys`` of the states the memory layout of their parameter.

        Kernels that read memory in order would read them at the wrong places.
        """
        wanted = strides(self.params) if self.layout is None else self.layout
        if strides(self.grads) != wanted:
            self.grads[:] = [aligned(grad, param) for grad, param in zip(self.grads, self.params, strict=True)]
        for key in keys:
            entries = [state.get(key) for state in self.states]
            present = [entry for entry in entries if entry is not None]
            if len(present) == len(entries) and strides(present) == wanted:
                continue
            for entry, param, state in zip(entries, self.params, self.states, strict=True):
                if entry is not None:
                    state[key] = aligned(entry, param)
