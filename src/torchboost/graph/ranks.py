"""The number of dimensions of a traced tensor, if it is the same for every input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from torch.nn.modules import activation, dropout, pooling

__all__ = ["rank_of"]

_FIXED = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}
"""Layers that refuse an input of any other number of dimensions."""
_KEEPING = (
    *(getattr(activation, name) for name in activation.__all__ if name != "MultiheadAttention"),
    *(getattr(pooling, name) for name in pooling.__all__),
    *(getattr(dropout, name) for name in dropout.__all__),
    *(nn.Identity, nn.Linear, nn.BatchNorm1d, nn.LayerNorm),
)
_ELEMENTWISE = "add sub mul truediv div neg exp contiguous clone float dropout softmax sigmoid tanh"
_ACTIVATIONS = "relu relu_ relu6 gelu silu mish hardswish leaky_relu elu selu"
_POOLING = "adaptive_avg_pool2d max_pool2d avg_pool2d"
_KEEPING_CALLS = frozenset(f"{_ELEMENTWISE} {_ACTIVATIONS} {_POOLING}".split())
_REDUCING = frozenset({"mean", "sum", "amax", "amin"})


def rank_of(node: fx.Node, module: nn.Module | None, ranks: Mapping[fx.Node, int | None]) -> int | None:
    """Return the number of dimensions of a node's output; None if it may depend on the input.

    Args:
        node: Of a graph without shapes.
        module: The module that it calls, if any.
        ranks: The numbers of dimensions of all nodes before it.
    """
    before = {ranks.get(source) for source in node.all_input_nodes} - {None}
    shared = before.pop() if len(before) == 1 else None
    unknown = any(ranks.get(source) is None for source in node.all_input_nodes)
    if module is not None:
        if isinstance(module, nn.Flatten):
            return 2 if (module.start_dim, module.end_dim) == (1, -1) else None
        fixed = next((rank for kind, rank in _FIXED.items() if type(module) is kind), None)
        return fixed or (shared if type(module) in _KEEPING and not unknown else None)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op not in ("call_function", "call_method") or not node.args:
        return None
    if name == "flatten":
        start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim")
        return 2 if start == 1 and len(node.args) < 3 and "end_dim" not in node.kwargs else None
    if name in ("view", "reshape"):
        return _sizes(node.args[1:])
    if name in _REDUCING and isinstance(node.args[0], fx.Node):
        return _reduced(node, ranks.get(node.args[0]))
    return shared if name in _KEEPING_CALLS and not unknown else None


def _sizes(sizes: tuple[Any, ...]) -> int | None:
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    elif len(sizes) < 2:  # one stand-in may be a whole shape, or a type
        return None
    return len(sizes)


def _reduced(node: fx.Node, rank: int | None) -> int | None:
    axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if rank is None or not isinstance(axes, (tuple, list)) or len(node.args) > 2:
        return None
    return rank if node.kwargs.get("keepdim") else rank - len(axes)
