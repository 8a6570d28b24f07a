"""Detect uses of gradients that freezing does not support: ``autograd.grad`` and reentrant checkpointing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchboost.core.algorithm import Attachment, Removable
from torchboost.core.containers import tensors_in
from torchboost.core.covering import plain_hook
from torchboost.core.torch_private import is_reentrant_checkpoint
from torchboost.core.wrapping import is_compiled
from torchboost.errors import IncompatibleError

__all__ = ["Accumulated", "LostGradients"]


class Accumulated(Attachment):
    """Records whether a backward pass accumulates gradients into parameters, or the loop sets ``.grad`` itself.

    A loop that sets it from ``torch.autograd.grad(loss, parameters)`` or ``torch.func.grad`` names the parameters in
    each update, and autograd raises an error for frozen ones.

    Args:
        parameters: The parameters; each one that trains has a hook until :meth:`remove`.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._hooked = [parameter for parameter in parameters if parameter.requires_grad]
        self._stale = self._any()  # older gradients carry no information
        self._seen = False
        super().__init__(*(p.register_post_accumulate_grad_hook(self._note) for p in self._hooked))

    def observe(self) -> bool | None:
        """Check an update: True if a backward pass made its gradients, False if not, None if unknown."""
        stale, self._stale = self._stale, False
        return None if stale or not self._any() else self._seen

    def _any(self) -> bool:
        return any(parameter.grad is not None for parameter in self._hooked)

    def _note(self, _: Tensor) -> None:
        self._seen = True


class LostGradients:
    """Finds blocks that get no gradient after a frozen prefix because reentrant checkpointing runs them.

    ``torch.utils.checkpoint`` with ``use_reentrant=True`` gives gradients only if an input of the checkpointed part
    requires one. After a frozen prefix none does, unless the model ensures it. Such a part runs under ``no_grad``
    inside a pass that records gradients. It is refused after the first update that trains everything, if the graph
    shows that its inputs depend only on what will be frozen; and after an update with a frozen prefix, if it has no
    gradients then but had some before. Blocks that a pass skips at random, and parts that never have gradients, are not
    refused.

    Args:
        model: The model as the loop calls it.
        parameters: Parameters that may train.
        prefixes: The frozen parameters at index 0, 1, ...
    """

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor], prefixes: Iterable[Iterable[Tensor]]) -> None:
        known = set(map(id, parameters))
        self._model = model
        self._frozen = [known.intersection(map(id, prefix)) for prefix in prefixes]
        self._never: list[Tensor] | None = None  # had no gradient in any update that trained everything
        self._parameters = list(parameters)
        self._suspects: dict[str, Sequence[Tensor]] = {}
        self._recorded: set[str] = set()
        self._handles: list[Removable] = []
        self._inner: list[Removable] = []
        self._asks: _AsksForGradients | None = None
        self._ahead = False

    def look(self, *, ahead: bool = False) -> None:
        """Watch the next pass of the model. Call it after the flags change.

        Args:
            ahead: Whether everything trains in that pass, so that only its graph shows what will be lost.
        """
        self.remove()
        self._ahead = ahead
        self._suspects = {}
        self._handles = [
            plain_hook(self._model, self._model.register_forward_pre_hook(self._enter)),
            plain_hook(self._model, self._model.register_forward_hook(self._leave, always_call=True)),
        ]

    def observe(self, frozen: bool) -> None:
        """Check the gradients of an update. Call it after the update, before the flags change.

        Raises:
            IncompatibleError: A part after the frozen prefix has lost its gradients, or will.
        """
        if not frozen and self._never != []:
            self._never = [p for p in self._never or self._parameters if p.grad is None]
        suspects, self._suspects = self._suspects, {}
        never = set(map(id, self._never or ()))
        for name, trained in suspects.items():
            told = [p for p in trained if p.requires_grad and id(p) not in never]
            got = any(p.grad is not None and (self._ahead or bool(p.grad.any())) for p in told)
            if told and got == self._ahead:
                verb = ("are", "got none in this update") if not self._ahead else ("will be", "would get none then")
                raise IncompatibleError(
                    f"freezing: '{name}' runs without gradients inside a pass that records them, as under "
                    f"torch.utils.checkpoint with use_reentrant=True. While the blocks before it {verb[0]} frozen, its "
                    f"inputs require no gradient, so it {verb[1]}. Pass use_reentrant=False to the checkpointing, or "
                    "leave freezing out."
                )

    def remove(self) -> None:
        """Remove the hooks."""
        self._end_pass()
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._inner or not (torch.is_grad_enabled() and module.training):
            return
        if is_compiled(self._model):
            self.remove()  # hooks do not see the parts of a compiled pass
            return
        for name, part in self._model.named_modules():
            trained = [p for p in part.parameters(recurse=False) if p.requires_grad]
            if trained:
                self._inner.append(part.register_forward_pre_hook(partial(self._inside, name, trained)))
        if self._ahead:
            self._asks = _AsksForGradients()
            self._asks.__enter__()

    def _inside(self, name: str, trained: Sequence[Tensor], module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._recorded.add(name)
        else:
            self._suspects[name] = trained

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._inner:
            return
        asked = self._end_pass()
        self._suspects = {name: p for name, p in self._suspects.items() if name not in self._recorded}
        self._recorded.clear()
        if self._suspects and self._ahead and (asked or not self._will_lose(output)):
            self._suspects = {}
        if output is not None:  # it was a whole pass
            self.remove()

    def _end_pass(self) -> bool:
        """Remove the hooks from the parts; return whether the pass asked for gradients of an inner value."""
        while self._inner:
            self._inner.pop().remove()
        asks, self._asks = self._asks, None
        if asks is not None:
            asks.__exit__(None, None, None)
        return asks is not None and asks.asked

    def _will_lose(self, output: Any) -> bool:
        """Whether a suspect still trains once all inputs of some checkpointed part are frozen."""
        trained = {id(p) for parameters in self._suspects.values() for p in parameters}
        later = [frozen for frozen in self._frozen if not trained <= frozen]
        nodes = _above([tensor.grad_fn for tensor in tensors_in(output)])
        return any(
            {id(leaf) for leaf in map(_leaf, _above([node])) if leaf is not None} <= frozen
            for node in nodes
            if is_reentrant_checkpoint(node)
            for frozen in later
        )


class _AsksForGradients(TorchFunctionMode):
    """Records whether a forward asks for the gradient of a tensor it made, as models do before checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked |= func in _ASKING
        return func(*args, **(kwargs or {}))


_ASKING = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # pyright: ignore[reportAttributeAccessIssue]


def _above(nodes: Iterable[Any]) -> set[Any]:
    """The nodes of an autograd graph and all nodes they depend on."""
    found, waiting = set[Any](), [node for node in nodes if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _leaf(node: Any) -> Tensor | None:
    return getattr(node, "variable", None)
