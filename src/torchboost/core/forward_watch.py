"""Say so if the forward that an algorithm acts through is not the one that is trained."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchboost.core.algorithm import Attachment
from torchboost.core.wrapping import unwrap
from torchboost.errors import NoEffectWarning

__all__ = ["ForwardWatch"]


class ForwardWatch(Attachment):
    """Warns after the first update if the forward of a model was not called until then.

    A loop may call a part of the model instead, as a ``training_step`` that calls ``self.net(x)`` does; whatever acts
    as the model is entered then does nothing.

    Args:
        name: Of the algorithm.
        model: What was given to it.
        optimizer: Whose first update with gradients other than zero counts.

    Attributes:
        called: Whether the forward was called; set by who covers it.
    """

    def __init__(self, name: str, model: nn.Module, optimizer: Optimizer) -> None:
        self.called = False
        self._name = name
        self._kind = type(unwrap(model)).__name__
        self._parts = [part for part, _ in unwrap(model).named_children()]
        self._judged = False
        super().__init__(optimizer.register_step_post_hook(self._judge))

    def _judge(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._judged and not torch.compiler.is_compiling():
            self._judged = self.called or _moves(optimizer)
            if self._judged and not self.called:
                self._warn()

    def _warn(self) -> None:
        such = f" (here one of {', '.join(self._parts[:4])})" if self._parts else ""
        warnings.warn(
            f"{self._name} had no effect: there was an update, but {self._kind} itself was not called before it. Give "
            f"the module that the training step calls{such}, or call the {self._kind}.",
            NoEffectWarning,
            stacklevel=2,
        )


def _moves(optimizer: Optimizer) -> bool:
    """Whether there is a gradient: checkpoint functions of torch step with zeros to find out about the state."""
    grads = (param.grad for group in optimizer.param_groups for param in group["params"])
    return any(bool((grad.coalesce().values() if grad.is_sparse else grad).any()) for grad in grads if grad is not None)
