"""Compute the logits of labelled positions only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from typing_extensions import Self

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import check_module
from torchboost.core.forward import tensors_in
from torchboost.core.torch_private import has_saved_tensor_hooks, parameter_slots
from torchboost.core.wrapping import sharded_units, unwrap
from torchboost.tokens.call import Part, PartialCall, PartialForward
from torchboost.tokens.layout import Layout
from torchboost.tokens.operations import PaddedRows
from torchboost.tokens.rows import BATCH, FLAT, TOKEN, Rows


def sparse_head_forward(model: nn.Module) -> Attachment:
    """Compute the output head of a language model at the positions that have a label, in training.

    The product of the last hidden states with the output embeddings waits until something reads it. A cross entropy
    with ``ignore_index`` reads the labelled rows, and only they are computed. Everything else that reads logits gets
    all of them, and later calls then compute them at once. The first call computes everything and sees which logits the
    loop reads. Losses and gradients are the same numbers up to the order of additions.

    Args:
        model: The bare model, as the loop calls it. Its head is ``model.get_output_embeddings()`` if it has this
            method, otherwise its linear layers with the most outputs.

    Returns:
        Its ``remove()`` restores the forward of the model.

    Raises:
        TypeError: Not a module.

    Cost: about 2 microseconds for each function of torch in a forward pass.

    Example:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> class Tagger(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.head = torch.nn.Linear(4, 100)
        ...     def forward(self, hidden, labels):
        ...         return cross_entropy(self.head(hidden).view(-1, 100), labels.view(-1))
        >>> model, hidden = Tagger(), torch.randn(2, 3, 4)
        >>> labels = torch.tensor([[5, -100, -100], [-100, -100, 7]])
        >>> with sparse_head_forward(model):
        ...     bool(model(hidden, labels) > 0)
        True
    """
    check_module(model)
    return _attached(model, ())


@dataclass(frozen=True, kw_only=True)
class SparseHead(Algorithm):
    """Applies :func:`sparse_head_forward`. It has no settings."""

    name: ClassVar[str] = "sparse_head"
    traits: ClassVar[Traits] = Traits(order=13, each_optimizer=True, eager=True)

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that the model has no output head over tokens, or that it is sharded."""
        if sharded_units(model):
            return "FSDP2 frees the weights of the head before its loss is computed"
        return None if _heads(unwrap(model)) else "the model has no output head that a loss could read in part"

    def fitted(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Self:
        """See in one pass whether a loss reads a part of the logits."""
        with _attached(model, ()) as live:
            outputs = tensors_in(model(*args, **kwargs))
        reason = live.remark
        if not reason and any(isinstance(output, Rows) for output in outputs):
            has_loss = any(output.numel() == 1 and output.requires_grad for output in outputs)
            reason = "" if has_loss else "the loss is computed outside of the model, and a trial cannot see its labels"
        return self.noting(reason)

    def attach(self, target: Target) -> Attachment:
        """Cover the forward of the model."""
        return _attached(target.model, target.optimizers)


def _heads(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers that compute logits."""
    named: Any = getattr(model, "get_output_embeddings", None)
    if callable(named):
        head = named()
        return [head] if isinstance(head, nn.Linear) and _weight(head) is not None else []
    if not any(isinstance(module, (nn.Embedding, nn.MultiheadAttention)) for module in model.modules()):
        return []
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    most = max((module.out_features for module in linear), default=0)
    return [module for module in linear if module.out_features == most and _weight(module) is not None]


def _weight(head: nn.Linear) -> Tensor | None:
    """Return the weight, or None if it is computed whenever it is read, perhaps with random numbers."""
    return parameter_slots(head).get("weight")


def _attached(model: nn.Module, optimizers: Sequence[Optimizer]) -> PartialForward:
    heads = _heads(unwrap(model))
    return PartialForward("sparse_head", model, optimizers, lambda call, args, kwargs: _Waiting(heads, call))


def _complete(tensor: Tensor, call: PartialCall) -> Layout:
    """Return the layout of all positions of a tensor with one dimension of features."""
    mask = torch.ones(tensor.shape[:-1], dtype=torch.bool, device=tensor.device)
    return Layout(mask if mask.ndim == 2 else mask[None], call, call.forward.leave)


def _has_features(hidden: Tensor) -> bool:
    """Whether a tensor has features of positions in its last dimension."""
    return hidden.ndim in (2, 3) and not (isinstance(hidden, Rows) and hidden.dims[-1] < 0)


class _Waiting(Part):
    """Inside of it, products with the weights of heads wait until something reads them."""

    def __init__(self, heads: Sequence[nn.Linear], call: PartialCall) -> None:
        super().__init__()
        self._weights = {id(_weight(head)): head.out_features for head in heads}
        self._call = call

    def layout(self, output: Tensor) -> Layout | None:
        """Return the layout of all positions for logits."""
        logits = output.shape[-1] in self._weights.values() and output.ndim in (2, 3)
        return _complete(output, self._call) if logits else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a call of a function of torch. In a checkpoint it stays as it is: there it is called once more."""
        kwargs = kwargs or {}
        is_head = func is F.linear and len(args) > 1 and id(args[1]) in self._weights and _has_features(args[0])
        if not is_head or has_saved_tensor_hooks():
            return func(*args, **kwargs)
        return self._later(args[0], *args[1:], **kwargs)

    def _later(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        compute = self._call.later(lambda rows: F.linear(rows, weight, bias), hidden)
        if isinstance(hidden, Rows):
            return hidden.like(hidden.rows, hidden.positions, hidden.dims, (compute,))
        layout = _complete(hidden, self._call)
        if hidden.ndim == 2:
            return PaddedRows(hidden, layout, (FLAT, 0), (compute,))
        return PaddedRows(hidden.flatten(0, 1), layout, (BATCH, TOKEN, 0), (compute,))
