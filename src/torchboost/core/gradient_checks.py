"""What a loop does with gradients that freezing cannot follow: ``autograd.grad``, and reentrant checkpointing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.core.algorithm import Attachment, Removable
from torchboost.core.wrapping import is_compiled
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
    requires one, and behind a frozen prefix none does. Such a part runs under ``no_grad`` inside a pass that records
    gradients; if it then has none after the update, and had some before, it is refused. Blocks that a pass leaves out
    at random, and parts that never have gradients, are not taken for it.

    Args:
        model: What the loop calls.
        parameters: That may train.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        self._model = model
        self._never: list[Tensor] | None = None  # had no gradient in any update that trained everything
        self._parameters = list(parameters)
        self._suspects: list[tuple[str, Sequence[Tensor]]] = []
        self._handles: list[Removable] = []
        self._recording = False

    def look(self) -> None:
        """Watch the next pass of the model; to be called after a change of the flags."""
        self.remove()
        if is_compiled(self._model):
            return  # no hook sees the parts of a compiled pass
        self._suspects = []
        self._handles = [
            self._model.register_forward_pre_hook(self._enter),
            self._model.register_forward_hook(self._leave),
        ]
        for name, module in self._model.named_modules():
            trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
            if trained:
                self._handles.append(module.register_forward_pre_hook(partial(self._inside, name, trained)))

    def observe(self, frozen: bool) -> None:
        """Look at the gradients of an update; to be called after it, while the flags are those of its pass.

        Raises:
            IncompatibleError: A part behind the frozen prefix has lost its gradients.
        """
        if not frozen and self._never != []:
            self._never = [p for p in self._never or self._parameters if p.grad is None]
        suspects, self._suspects = self._suspects, []
        never = set(map(id, self._never or ()))
        for name, trained in suspects:
            lost = [p for p in trained if p.requires_grad and id(p) not in never]
            if lost and not any(p.grad is not None and bool(p.grad.any()) for p in lost):
                raise IncompatibleError(
                    f"freezing: '{name}' runs without gradients inside a pass that records them, as under "
                    "torch.utils.checkpoint with use_reentrant=True. While the blocks in front are frozen its inputs "
                    "require no gradient, so it got none in this update. Pass use_reentrant=False to the "
                    "checkpointing, or leave freezing out."
                )

    def remove(self) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._recording = torch.is_grad_enabled() and module.training

    def _inside(self, name: str, trained: Sequence[Tensor], module: nn.Module, args: Any) -> None:
        if self._recording and not torch.is_grad_enabled():
            self._suspects.append((name, trained))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._recording:
            self._recording = False
            self.remove()
