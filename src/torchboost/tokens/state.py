"""What a forward pass writes to besides its results, so that a pass that is given up leaves nothing behind."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.core.forward import tensors_in
from torchboost.core.torch_private import buffer_slots, version

__all__ = ["Key", "State"]

Key = tuple[int, str]
"""The number of a module and the name of its buffer, or the number of an input and an empty name."""


class State:
    """Attributes and buffers of the modules of a model, and the tensors among the inputs of a call, as they are now.

    Lists and other objects that attributes name are not followed.

    Args:
        model: Of the call.
        inputs: Its arguments.
        moving: Tensors whose numbers are copied. None copies all.
    """

    def __init__(self, model: nn.Module, inputs: Any, moving: Set[Key] | None = None) -> None:
        modules = [*model.modules()]
        self._slots = [(s, dict(s)) for module in modules for s in (vars(module), buffer_slots(module)) if s]
        tensors: dict[Key, Tensor] = {(place, ""): tensor for place, tensor in enumerate(tensors_in(inputs))}
        for place, module in enumerate(modules):
            named = buffer_slots(module).items()
            tensors |= {(place, name): buffer for name, buffer in named if buffer is not None}
        self._tensors = {key: (tensor, version(tensor)) for key, tensor in tensors.items()}
        copied = tensors if moving is None else moving & tensors.keys()
        self._numbers = {key: tensors[key].detach().clone() for key in copied}

    def moved(self) -> frozenset[Key]:
        """Return which tensors have been written to since."""
        return frozenset(key for key, (tensor, then) in self._tensors.items() if version(tensor) != then)

    def restore(self) -> bool:
        """Restore everything. Return whether the graph of no input is another one, which cannot be undone."""
        for slots, entries in self._slots:
            for name in slots.keys() - entries.keys():
                del slots[name]
            slots.update(entries)
        moved = self.moved()
        with torch.no_grad():
            for key in moved & self._numbers.keys():  # a graph may hold the others
                self._tensors[key][0].copy_(self._numbers[key])
        return all(self._tensors[key][0].grad_fn is None for key in moved)
