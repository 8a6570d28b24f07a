"""Warn if the loop does not call the forward that an algorithm acts on."""

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
    """Warns after the first update if the model's forward was not called before it.

    A loop may call a part of the model instead, such as a ``training_step`` that calls ``self.net(x)``. An algorithm
    that acts in the model's own forward then has no effect.

    Args:
        name: Name of the algorithm.
        model: The model that the algorithm acts on.
        optimizer: The optimizer of the model. Its first update with nonzero gradients counts.

    Attributes:
        called: Whether the forward was called. Set by the function that covers it.
    """

    def __init__(self, name: str, model: nn.Module, optimizer: Optimizer) -> None:
        self.called = False
        self._name = name
        self._kind = type(unwrap(model)).__name__
        self._parts = [part for part, _ in unwrap(model).named_children()]
        self._judged = False
        super().__init__(optimizer.register_step_pre_hook(self._judge))

    def _judge(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._judged and not torch.compiler.is_compiling():
            self._judged = self.called or _moves(optimizer)
            if self._judged and not self.called:
                self._warn()

    def _warn(self) -> None:
        such = f" (here one of {', '.join(self._parts[:4])})" if self._parts else ""
        warnings.warn(
            f"{self._name} had no effect: there was an update, but {self._kind} itself was not called before it. Pass "
            f"the module that the training step calls{such}, or call the {self._kind}.",
            NoEffectWarning,
            stacklevel=2,
        )


def _moves(optimizer: Optimizer) -> bool:
    """Whether a gradient is nonzero. torch's checkpoint functions step with zeros to create the optimizer's state."""
    grads = (param.grad for group in optimizer.param_groups for param in group["params"])
    return any(bool((grad.coalesce().values() if grad.is_sparse else grad).any()) for grad in grads if grad is not None)
