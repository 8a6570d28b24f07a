"""The heads of a model: the matrix products whose results reach an output without passing through another product."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchboost.core.forward import tensors_in
from torchboost.core.torch_private import (
    AnyConv,
    call_uncompiled,
    is_reentrant_checkpoint,
    node_number,
    parameter_slots,
    sequence_number,
)
from torchboost.core.wrapping import is_compiled, unwrap
from torchboost.graph.normalized_linear import NormalizedLinear

__all__ = ["HeadSearch", "Heads", "find_heads", "guessed_heads"]

_CHEAP = 0.1
"""A head of at most this share of all multiplications costs little in float32."""
_FEW = 8
"""A head with this many inputs for each output, or more, costs less than what computes its inputs."""
_LARGE = 128.0
"""Numbers of this size come in steps of 1 in bfloat16."""
_LAYERS = (nn.Linear, NormalizedLinear, AnyConv, nn.Bilinear)
_PRODUCTS = frozenset(
    {
        *("Mm", "Addmm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Addmv", "Linear", "MkldnnLinear", "GroupedMm", "ScaledMm"),
        *("Convolution", "ConvolutionOverrideable", "MkldnnConvolution", "CudnnConvolution", "SlowConv3D"),
        *("MkldnnRnnLayer", "CudnnRnn", "MiopenRnn", "CompiledFunction"),
    }
)
"""Nodes of the autograd graph; a compiled part counts as one product."""
_ATTENTION = "ScaledDotProduct"
_MOVING = frozenset(
    {
        *("View", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided", "T", "Transpose", "Permute", "Squeeze"),
        *("Unsqueeze", "Select", "Slice", "Split", "SplitWithSizes", "Unbind", "Unfold", "Expand", "Clone", "ToCopy"),
        *("Cat", "Stack", "Index", "Gather", "CopySlices", "Copy"),
    }
)
"""Nodes that move numbers and compute none."""
_MANY = object()


class Heads(NamedTuple):
    """What of a model has to be in float32 for its outputs to be exact. Names are those of ``named_modules``.

    Args:
        computed: Modules that compute in float32: a head that costs little, has few outputs, or has results that are
            large or computed with. The empty name is the whole model, if it computes the product itself.
        cast: Heads that are too expensive for that, and whose results are only cast.
    """

    computed: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()


def find_heads(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Heads | None:
    """Run one pass with gradients, and return the heads of the model; None if no output has a gradient.

    Nothing else is changed: hooks that are set meanwhile are removed. Buffers and random generators move as in any
    pass.

    Args:
        model: Wrapped or not. The pass is that of the bare module.
        args: Of the call.
        kwargs: Of the call.
    """
    bare = unwrap(model)
    with HeadSearch(bare) as search, torch.enable_grad():
        outputs = call_uncompiled(bare, *args, **kwargs)
    return search.heads(outputs)


def guessed_heads(model: nn.Module) -> Heads:
    """Return the last layer in the order of the modules as the head, without a pass."""
    bare = unwrap(model)
    sizes = {name: _entries(module) for name, module in bare.named_modules() if isinstance(module, _LAYERS)}
    if not sizes:
        return Heads()
    name, size = list(sizes.items())[-1]
    cheap = size <= _CHEAP * sum(sizes.values()) or _has_few_outputs(bare.get_submodule(name))
    return Heads((name,)) if cheap else Heads(cast=(name,))


class HeadSearch:
    """Watches one pass of a model inside the ``with`` block. What is compiled in it runs eagerly.

    Mechanism: temporary hooks note which operations of the autograd graph were recorded in which module; then the graph
    is followed from the outputs to the first products. Tied weights, several heads and products outside of any layer
    (``x @ w``) are found, too.

    Limit: what ran inside a checkpoint with ``use_reentrant=True`` is not in the graph.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._cleanup = ExitStack()
        self._stack = [""]
        self._starts, self._names = [0], [""]
        self._work: dict[str, float] = defaultdict(float)

    def __enter__(self) -> Self:
        if is_compiled(self._model):
            self._cleanup.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in unwrap(self._model).named_modules():
            if name and not isinstance(module, torch.jit.ScriptModule):  # pyright: ignore[reportPrivateImportUsage]
                self._cleanup.enter_context(module.register_forward_pre_hook(partial(self._enter, name)))
                leaving = partial(self._leave, name)
                self._cleanup.enter_context(module.register_forward_hook(leaving, always_call=True))
        return self

    def __exit__(self, *error: Any) -> None:
        self._cleanup.close()

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._stack.append(name)
        self._mark()

    def _leave(self, name: str, module: nn.Module, args: Any, outputs: Any) -> None:
        if self._stack[-1] != name:  # a hook before this one raised an exception
            return
        self._stack.pop()
        self._mark()
        self._work[name] += _multiplications(module, outputs)

    def _mark(self) -> None:
        self._starts.append(sequence_number())
        self._names.append(self._stack[-1])

    def heads(self, outputs: Any) -> Heads | None:
        """Return the heads, from what the pass returned."""
        ends, products = self._reached([tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None])
        if not ends:
            return None
        total = sum(self._work[name] for name in products)
        modules = dict(unwrap(self._model).named_modules())
        computed, cast = [], []
        for name, behind in ends.items():
            share = sum(self._work[other] for other in products if _is_inside(other, name)) / total if total else 1.0
            cheap = share <= _CHEAP or _has_few_outputs(modules[name])
            (computed if behind or (name and cheap) else cast).append(name)
        return Heads(tuple(sorted(computed)), tuple(sorted(name for name in cast if name)))

    def _reached(self, outputs: list[Tensor]) -> tuple[dict[str, bool], set[str]]:
        """Return each head and whether its results are large or computed with, and the owners of all products.

        What leads to a loss, an output without dimensions, does not count as such: a cast of the results is enough.
        """
        ends: dict[str, bool] = {}
        nodes: dict[Any, None] = dict.fromkeys(tensor.grad_fn for tensor in outputs)
        unread = list(nodes)
        while unread:
            after = [node for node, _ in unread.pop().next_functions if node is not None and node not in nodes]
            nodes |= dict.fromkeys(after)
            unread += after
        products = {self._owner(node) for node in nodes if _is_product(node)}
        seen: set[Any] = set()
        waiting: list[tuple[Any, Any, bool]] = [
            (tensor.grad_fn, _MANY if _is_large(tensor) else None, tensor.ndim == 0) for tensor in outputs
        ]
        while waiting:
            entry = waiting.pop()
            node, by, loss = entry
            if entry in seen or is_reentrant_checkpoint(node):
                continue
            seen.add(entry)
            if _is_product(node):
                owner = self._owner(node)
                alone = by is owner and not any(_is_inside(other, owner) for other in products - {owner})
                ends[owner] = ends.get(owner, False) or not (loss or by is None or (alone and owner))
                continue
            if _kind(node) not in _MOVING:
                owner = self._owner(node)
                by = owner if by is None or by is owner else _MANY
            waiting += [(after, by, loss) for after, _ in node.next_functions if after is not None]
        return ends, products

    def _owner(self, node: Any) -> str:
        """Return the innermost module that was running when an operation was recorded."""
        return self._names[bisect_right(self._starts, node_number(node)) - 1]


def _kind(node: Any) -> str:
    return node.name().rpartition("Backward")[0]


def _is_product(node: Any) -> bool:
    kind = _kind(node)
    return kind in _PRODUCTS or kind.startswith(_ATTENTION)


def _is_inside(name: str, other: str) -> bool:
    return not other or name == other or name.startswith(f"{other}.")


def _has_few_outputs(module: nn.Module) -> bool:
    if isinstance(module, AnyConv):
        return module.in_channels >= _FEW * module.out_channels
    return isinstance(module, nn.Linear) and module.in_features >= _FEW * module.out_features


def _is_large(tensor: Tensor) -> bool:
    return tensor.ndim > 0 and tensor.numel() > 0 and bool(tensor.detach().abs().max() >= _LARGE)


def _entries(module: nn.Module) -> int:
    """Return the size of the matrices of a module itself."""
    parameters = [p for p in parameter_slots(module).values() if p is not None]
    return sum(p.numel() for p in parameters if not isinstance(p, nn.parameter.UninitializedParameter) and p.ndim > 1)


def _multiplications(module: nn.Module, outputs: Any) -> float:
    entries = 0 if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else _entries(module)
    tensors = tensors_in(outputs)
    if not entries or not tensors or not tensors[0].ndim:
        return 0.0
    channels = tensors[0].shape[1 if isinstance(module, AnyConv) and tensors[0].ndim > 1 else -1]
    return entries * tensors[0].numel() / max(1, channels)
