"""Cut a traced forward into the part that depends only on frozen weights, and the rest."""

from __future__ import annotations

import enum
import inspect
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.nn import Parameter

from torchboost.algorithms.grad_freeze.trace import TracedForward, is_opaque
from torchboost.core.torch_private import AnyBatchNorm, AnyDropout, AnyNorm
from torchboost.graph.trace import METADATA, function_name

__all__ = ["Cut", "cut_forward"]

_SHAPES = frozenset({"shape", "dtype", "device", "ndim", "layout"})
_WRITING = frozenset(
    {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow}
    | {operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.imatmul}
    | {operator.setitem}
)
_SIZED = frozenset(
    {"new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like"}
    | {"rand_like", "randn_like"}
)
"""Operations that read the size of a tensor, not its values."""
_FRESH = _SIZED | frozenset(
    {"add", "sub", "mul", "truediv", "div", "pow", "neg", "matmul", "mm", "bmm", "einsum", "linear", "conv1d", "conv2d"}
    | {"conv3d", "relu", "gelu", "silu", "sigmoid", "tanh", "softmax", "log_softmax", "exp", "sqrt", "rsqrt", "abs"}
    | {"mean", "sum", "cat", "stack", "embedding", "layer_norm", "group_norm", "batch_norm", "max_pool2d", "avg_pool2d"}
    | {"adaptive_avg_pool2d", "scaled_dot_product_attention", "clone", "zeros", "ones", "full", "empty", "arange"}
    | {"one_hot"}
)
"""Operations whose result shares no memory with their inputs."""


class _Part(enum.IntEnum):
    """The part that computes a node; ordered, so that a node is never before its inputs."""

    BOTH = 0
    PREFIX = 1
    SUFFIX = 2


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts about a node.

    Args:
        data: Whether it depends on the values of the inputs, not only on their sizes.
        weighted: Whether it depends on a parameter.
        storages: Names of the storages that it may share.
        writes: Names of the storages that it may write to.
    """

    part: _Part
    data: bool
    weighted: bool
    storages: frozenset[str]
    writes: frozenset[str] = frozenset()


_Known = dict[fx.Node, _Facts]


@dataclass(frozen=True, slots=True)
class Cut:
    """A forward, split into two graphs.

    Args:
        prefix: Takes the tensors of the call, returns the tuple of border values.
        suffix: Takes the tensors of the call and then the border values, returns what the forward returns.
        border: Names of the border values; empty if no frozen part comes first.
        inputs: Positions of the tensors that the prefix reads.
    """

    prefix: fx.Graph
    suffix: fx.Graph
    border: tuple[str, ...]
    inputs: tuple[int, ...]


def cut_forward(traced: TracedForward, *, blocked: Collection[str] = ()) -> Cut:
    """Cut a forward after everything that no trainable parameter, random number or changing buffer has reached.

    Both sides keep the order of operations, and an in-place write happens on the side that reads it later, so prefix
    and suffix together compute the same as the forward. What depends only on the inputs or on sizes is computed on
    both sides if both need it.

    Args:
        traced: Not changed.
        blocked: Names of further nodes that must not be in the prefix.
    """
    least = dict.fromkeys(blocked, _Part.SUFFIX)
    while True:
        known = _classified(traced, least)
        suffix = _needed(known, {n for n in known if known[n].part is _Part.SUFFIX}, _Part.BOTH)
        read = {source for node in suffix for source in node.all_input_nodes}
        border = [node for node in known if node in read and known[node].part is _Part.PREFIX]
        raised = {name: part for name, part in _misplaced(known, border, suffix) if part > least.get(name, _Part.BOTH)}
        if not raised:
            break
        for name, part in raised.items():
            least[name] = max(part, least.get(name, part))
    prefix = _needed(known, border, _Part.PREFIX)
    inputs = [node for node in known if node.op == "placeholder"]
    read = {source for node in prefix for source in node.all_input_nodes} | set(border)
    return Cut(
        prefix=_copy(traced.graph, prefix, results=border),
        suffix=_copy(traced.graph, suffix, border=border),
        border=tuple(node.name for node in border),
        inputs=tuple(place for place, node in enumerate(inputs) if node in read),
    )


def _classified(traced: TracedForward, least: dict[str, _Part]) -> _Known:
    """Assign every node its part, at least the one in ``least``."""
    known: _Known = {}
    for node in traced.graph.nodes:
        sources = [known[source] for source in node.all_input_nodes]
        name, module = function_name(node.target), None
        data, weighted = any(source.data for source in sources), any(source.weighted for source in sources)
        storages = frozenset({node.name})
        writes = frozenset[str]().union(*(known[target].storages for target in _written(node, traced)))
        part = max(_Part.BOTH, least.get(node.name, _Part.BOTH))
        if node.op == "call_module":
            module = traced.targets[str(node.target)]
            weighted |= isinstance(module, nn.Module) and next(module.parameters(), None) is not None
        elif node.op == "get_attr":
            storages = frozenset({str(node.target)})
            weighted = isinstance(traced.targets[str(node.target)], Parameter)
        elif node.op == "placeholder":
            data = True
        if node.op == "output" or _trains(node, traced):
            part = _Part.SUFFIX
        sized = name in METADATA | _SIZED or (name == "getattr" and node.args[1] in _SHAPES)
        if sized:
            data = weighted = False
        elif data and weighted:
            part = max(part, _Part.PREFIX)
        if any(source.part is _Part.SUFFIX for source in sources):
            part = _Part.SUFFIX
        elif not sized:
            part = max([part, *(source.part for source in sources)])
        if sized:
            storages = storages if name in _SIZED else frozenset()
        elif writes or not _is_fresh(name, module):
            storages = storages.union(*(source.storages for source in sources))
        known[node] = _Facts(part, data, weighted, storages, writes)
    return known


def _misplaced(known: _Known, border: list[fx.Node], suffix: set[fx.Node]) -> Iterable[tuple[str, _Part]]:
    """Yield nodes that must be in a later part, because one side writes to memory that the other one uses."""
    members, users = defaultdict[str, list[fx.Node]](list), defaultdict[str, list[fx.Node]](list)
    for node, facts in known.items():
        for name in facts.storages:
            members[name].append(node)
        for name in {name for source in node.all_input_nodes for name in known[source].storages if facts.storages}:
            users[name].append(node)
    for name in {name for facts in known.values() for name in facts.writes}:
        outside = [node for node in members[name] if node.op in ("placeholder", "get_attr")]
        yield from ((node.name, _Part.SUFFIX) for node in outside)
        after = rewritten = False  # whether the suffix has used or written it before this node
        for node in users[name]:
            part, writes = known[node].part, name in known[node].writes
            if part is not _Part.SUFFIX and (rewritten or (after and writes and part is _Part.PREFIX)):
                yield node.name, _Part.SUFFIX
            after |= part is _Part.SUFFIX
            rewritten |= part is _Part.SUFFIX and writes
        if any(name in known[node].writes and known[node].part is _Part.PREFIX for node in users[name]):
            yield from ((node.name, _Part.PREFIX) for node in members[name])
        both = [node for node in members[name] if node in suffix and known[node].part is _Part.BOTH]
        if rewritten and len([*both, *(node for node in border if name in known[node].storages)]) > 1:
            yield from ((node.name, _Part.SUFFIX) for node in border if known[node].storages > {name})


def _is_fresh(name: str, module: Any) -> bool:
    if module is not None:
        return not isinstance(module, (nn.Identity, nn.Flatten, nn.Unflatten, AnyDropout)) and not is_opaque(module)
    return name in _FRESH


def _trains(node: fx.Node, traced: TracedForward) -> bool:
    """Whether a node brings in a trainable parameter, random numbers or a changing buffer."""
    if node.op not in ("call_module", "get_attr"):
        return False
    target = traced.targets[str(node.target)]
    if isinstance(target, Tensor):
        return target.requires_grad
    if is_opaque(target) or any(p.requires_grad for p in target.parameters()):
        return True
    return any(_varies(module) or is_opaque(module) for module in target.modules())


def _varies(module: nn.Module) -> bool:
    if isinstance(module, AnyBatchNorm):
        return module.training or module.running_mean is None
    if not module.training:
        return False
    if isinstance(module, AnyNorm):
        return module.running_mean is not None
    if isinstance(module, AnyDropout):
        return module.p > 0
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0


def _written(node: fx.Node, traced: TracedForward) -> list[fx.Node]:
    """The nodes whose tensor a node writes to or may write to."""
    target = node.args[0] if node.args else node.kwargs.get("input")
    first = [target] if isinstance(target, fx.Node) else []
    if node.op == "call_module":
        module = traced.targets[str(node.target)]
        if isinstance(module, nn.Module) and any(map(is_opaque, module.modules())):
            return node.all_input_nodes  # its effect on them is unknown
        return first if getattr(module, "inplace", False) else []
    if node.op not in ("call_function", "call_method"):
        return []
    name = function_name(node.target)
    marked = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
    if marked or node.target in _WRITING or _asks_for_inplace(node):
        return first
    out = node.kwargs.get("out")
    return [entry for entry in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(entry, fx.Node)]


def _asks_for_inplace(node: fx.Node) -> bool:
    if not inspect.isfunction(node.target):
        return bool(node.kwargs.get("inplace"))
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except TypeError:
        return True
    return bool(bound.arguments.get("inplace"))


def _needed(known: _Known, start: Iterable[fx.Node], latest: _Part) -> set[fx.Node]:
    """All nodes up to a part that ``start`` depends on, and the nodes that write to their memory."""
    needed = set(start)
    storages = {name for node in needed for name in known[node].storages}
    for node in reversed(known):
        facts = known[node]
        if node not in needed and facts.part <= latest:
            if not facts.writes & storages and not any(user in needed for user in node.users):
                continue
            needed.add(node)
        if node in needed:
            storages |= {name for source in node.all_input_nodes for name in known[source].storages}
    return needed


def _copy(
    graph: fx.Graph, nodes: set[fx.Node], *, border: Iterable[fx.Node] = (), results: Iterable[fx.Node] | None = None
) -> fx.Graph:
    """Copy some nodes in order; ``border`` are added as inputs, and ``results`` replace the output of the graph."""
    part = fx.Graph()
    copies = {node: part.node_copy(node) for node in graph.nodes if node.op == "placeholder"}
    copies |= {node: part.placeholder(f"border_{node.name}") for node in border}
    for node in graph.nodes:
        if node in nodes and node not in copies and node.op != "output":
            copies[node] = part.node_copy(node, lambda source: copies[source])
    last = next(iter(reversed(graph.nodes)))
    returned = last.args[0] if results is None else tuple(results)
    part.output(fx.map_arg(returned, lambda source: copies[source]))
    return part
