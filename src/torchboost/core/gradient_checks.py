"""What a loop does with gradients that freezing cannot follow: ``autograd.grad``, and reentrant checkpointing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.core.algorithm import Attachment, Removable
from torchboost.errors import IncompatibleError

__all__ = ["Accumulated", "LostGradients"]


class Accumulated(Attachment):
    """Notes whether a backward pass accumulates gradients into parameters, or the loop sets ``.grad`` by itself.

    A loop that sets it, by ``torch.autograd.grad(loss, parameters)`` or ``torch.func.grad``, names the parameters in
    each update, and autograd refuses those that are frozen.

    Args:
        parameters: A hook is registered on each that trains, until :meth:`remove`.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._hooked = [parameter for parameter in parameters if parameter.requires_grad]
        self._stale = self._any()  # gradients from before tell nothing
        self._seen = False
        super().__init__(*(p.register_post_accumulate_grad_hook(self._note) for p in self._hooked))

    def observe(self) -> bool | None:
        """Look at an update: True if a backward pass made its gradients, False if not, None if that cannot be told."""
        stale, self._stale = self._stale, False
        return None if stale or not self._any() else self._seen

    def _any(self) -> bool:
        return any(parameter.grad is not None for parameter in self._hooked)

    def _note(self, _: Tensor) -> None:
        self._seen = True


class LostGradients:
    """Finds blocks behind a frozen prefix that get no gradient because reentrant checkpointing runs them.

    ``torch.utils.checkpoint`` with ``use_reentrant=True`` gives gradients only if an input of the checkpointed part
    requires one, and behind a frozen prefix none does. An update that misses gradients which every update had before
    is a suspicion; the next pass of the model proves it, for the part then runs under ``no_grad``. Blocks that a
    forward pass leaves out at random are not taken for it.

    Args:
        model: What the loop calls.
        parameters: That may train.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        self._model = model
        self._always = list(parameters)
        self._handles: list[Removable] = []
        self._outside = False  # whether the pass of the model records gradients

    def observe(self, frozen: bool) -> None:
        """Look at the gradients of an update; to be called after it, while the flags are those of its pass."""
        missing = [p for p in self._always if p.requires_grad and p.grad is None]
        if not missing:
            return
        lost = set(map(id, missing))
        self._always = [p for p in self._always if id(p) not in lost]
        if frozen and not self._handles:
            self._look_at(lost)

    def remove(self) -> None:
        """Take the hooks of a suspicion away."""
        while self._handles:
            self._handles.pop().remove()

    def _look_at(self, lost: set[int]) -> None:
        self._handles = [
            self._model.register_forward_pre_hook(self._enter),
            self._model.register_forward_hook(self._leave),
        ]
        for name, module in self._model.named_modules():
            if any(id(p) in lost for p in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(_Inside(self, name, len(lost))))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._outside = torch.is_grad_enabled() and module.training

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._outside:
            self._outside = False
            self.remove()

    @property
    def outside(self) -> bool:
        """Whether a pass of the model that records gradients is under way."""
        return self._outside


class _Inside:
    """A forward pre-hook of a module whose parameters got no gradient."""

    def __init__(self, found: LostGradients, name: str, count: int) -> None:
        self._found, self._name, self._count = found, name, count

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._found.outside and not torch.is_grad_enabled():
            self._found.remove()
            raise IncompatibleError(
                f"freezing: '{self._name}' runs without gradients inside a pass that records them, as under "
                "torch.utils.checkpoint with use_reentrant=True. While the blocks in front are frozen its inputs "
                f"require no gradient, so {self._count} parameters that train got none in the last update. Pass "
                "use_reentrant=False to the checkpointing, or leave freezing out."
            )
