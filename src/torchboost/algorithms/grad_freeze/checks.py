"""Models, optimizers and gradients that freezing does not support."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.grad_freeze.replicas import check_reducer
from torchboost.core.algorithm import Attachment, Removable
from torchboost.core.forward import plain_hook
from torchboost.core.torch_private import compiler_follows_flags, follows_flags
from torchboost.core.wrapping import compiled_parts, is_compiled
from torchboost.errors import IncompatibleError

__all__ = ["GradientChecks", "check_freezable"]

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_freezable(model: nn.Module | None, optimizer: Optimizer) -> None:
    """Refuse models and optimizers that do not support changing ``requires_grad``.

    Raises:
        IncompatibleError: The model is wrapped by DDP with ``static_graph=True``, or with a communication hook that has
            a state or is built into the reducer; the program compiles the model, and this torch keeps using the graph
            of the old flags; or the ``step`` of the optimizer needs a closure, as that of LBFGS, which moves parameters
            without a gradient.
    """
    if model is not None:
        check_reducer(model)
        if not all(map(follows_flags, compiled_parts(model))) and not compiler_follows_flags():
            raise IncompatibleError(
                f"freezing: torch.compile of torch {torch.__version__} keeps using the old graph when requires_grad "
                "changes (pytorch#139476), so unfrozen layers would never train; set torch._dynamo.config."
                "skip_tensor_guards_with_matching_dict_tags = False at the start of the program, or update to 2.12."
            )
    closure = list(inspect.signature(type(optimizer).step).parameters.values())[1:2]
    if closure and closure[0].default is inspect.Parameter.empty and closure[0].kind in _NAMED:
        raise IncompatibleError(
            f"freezing: {type(optimizer).__name__}.step needs a closure; such an optimizer, for example LBFGS, also "
            "moves parameters without a gradient. Use an optimizer that skips them, or leave freezing out."
        )


class GradientChecks(Attachment):
    """Finds uses of gradients that freezing does not support, at the first update.

    A loop that sets ``.grad`` from ``torch.autograd.grad(loss, parameters)`` or ``torch.func.grad`` names the
    parameters in each update, and autograd raises an error for frozen ones.

    ``torch.utils.checkpoint`` with ``use_reentrant=True`` gives gradients only if an input of the checkpointed part
    requires one, which is not so after a frozen prefix. Such a part runs under ``no_grad`` inside a pass that records
    gradients, and gets gradients nonetheless, or gets none because the blocks before it are frozen.

    Args:
        model: The model whose first pass is watched through hooks on its modules; None watches none.
        parameters: Parameters that may train. Each one that trains has a hook until the first update.
    """

    def __init__(self, model: nn.Module | None, parameters: Iterable[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._stale = self._any_gradient()  # older gradients carry no information
        self._accumulated = self._seen = False  # by a backward pass; whether a whole pass was watched
        self._suspects: dict[str, list[Tensor]] = {}
        self._recorded: set[str] = set()
        self._inner: list[Removable] = []
        handles: list[Removable] = [p.register_post_accumulate_grad_hook(self._note) for p in self._parameters]
        if model is not None:
            handles.append(plain_hook(model, model.register_forward_pre_hook(self._enter)))
            handles.append(plain_hook(model, model.register_forward_hook(self._leave, always_call=True)))
        super().__init__(*handles, undo=self._end_pass)

    def observe(self, frozen: bool) -> bool | None:
        """Check an update. Call it after the update, before the flags change.

        Returns:
            Whether a backward pass made the gradients; None if this update cannot tell. Otherwise the checks are over.

        Raises:
            IncompatibleError: A part of the model is checkpointed with ``use_reentrant=True``.
        """
        stale, self._stale = self._stale, False
        if stale or not self._any_gradient():
            return None
        self.remove()
        for name, parameters in self._suspects.items():
            trained = [p for p in parameters if p.requires_grad]
            if trained and (frozen or any(p.grad is not None for p in trained)):
                raise IncompatibleError(
                    f"freezing: '{name}' runs without gradients inside a pass that records them, as under "
                    "torch.utils.checkpoint with use_reentrant=True. It gets no gradients while the blocks before it "
                    "are frozen. Pass use_reentrant=False to the checkpointing, or leave freezing out."
                )
        return self._accumulated

    def _any_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters)

    def _note(self, _: Tensor) -> None:
        self._accumulated = True

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._seen or self._inner or is_compiled(module):
            return  # hooks do not see the parts of a compiled pass
        if not (torch.is_grad_enabled() and module.training):
            return
        for name, part in module.named_modules():
            trained: list[Tensor] = [p for p in part.parameters(recurse=False) if p.requires_grad]
            if trained:
                self._inner.append(part.register_forward_pre_hook(partial(self._inside, name, trained)))

    def _inside(self, name: str, trained: list[Tensor], module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._recorded.add(name)
        else:
            self._suspects[name] = trained

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._inner:
            return
        self._end_pass()
        self._suspects = {name: p for name, p in self._suspects.items() if name not in self._recorded}
        self._seen = output is not None

    def _end_pass(self) -> None:
        while self._inner:
            self._inner.pop().remove()
