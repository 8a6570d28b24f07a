"""Cut a traced forward into the part that depends only on frozen weights, and the rest."""

from __future__ import annotations

import enum
import inspect
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.nn import Parameter

from torchboost.algorithms.grad_freeze.prefix.trace import TracedForward, is_opaque
from torchboost.core.torch_private import AnyBatchNorm, AnyDropout, AnyNorm
from torchboost.graph.trace import METADATA, function_name

__all__ = ["Cut", "cut_forward"]

_SHAPES = frozenset({"shape", "dtype", "device", "ndim", "layout"})
_WRITING = frozenset(
    {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow}
    | {operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.imatmul}
    | {operator.setitem}
)
_FRESH = frozenset(
    {"add", "sub", "mul", "truediv", "div", "pow", "neg", "matmul", "mm", "bmm", "einsum", "linear", "conv1d", "conv2d"}
    | {"conv3d", "relu", "gelu", "silu", "sigmoid", "tanh", "softmax", "log_softmax", "exp", "sqrt", "rsqrt", "abs"}
    | {"mean", "sum", "cat", "stack", "embedding", "layer_norm", "group_norm", "batch_norm", "max_pool2d", "avg_pool2d"}
    | {"adaptive_avg_pool2d", "scaled_dot_product_attention", "clone", "zeros", "ones", "full", "empty", "arange"}
    | {"one_hot"}
)
"""Operations whose result shares no memory with their inputs."""


_SIZED = frozenset(
    {"new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like"}
    | {"rand_like", "randn_like"}
)
"""Operations that read the size of a tensor, not its values."""


class Part(enum.IntEnum):
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
    """

    part: Part
    data: bool
    weighted: bool
    storages: frozenset[str]


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
    and suffix together compute the same as the forward. What depends only on the inputs or their sizes is computed on
    both sides if both need it.

    Args:
        traced: Not changed.
        blocked: Names of further nodes that must not be in the prefix.
    """
    stops = set(blocked)
    while True:
        known, late = _classify(traced, stops)
        suffix, border = _suffix_nodes(traced, known)
        late |= _torn(traced, known, border)
        if late <= stops:
            break
        stops |= late
    prefix = _needed(known, set(border), lambda facts: facts.part is not Part.SUFFIX)
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    read = {source for node in prefix for source in node.all_input_nodes} | set(border)
    return Cut(
        prefix=_copy(traced.graph, prefix, border=(), results=border),
        suffix=_copy(traced.graph, suffix, border=border, results=None),
        border=tuple(node.name for node in border),
        inputs=tuple(place for place, node in enumerate(inputs) if node in read),
    )


def _classify(traced: TracedForward, stops: set[str]) -> tuple[_Known, set[str]]:
    """Assign every node its part; also return the nodes of parameters and buffers that the forward writes to."""
    known: _Known = {}
    outside: set[str] = set()
    owner: dict[str, Part] = {}
    dirty: set[str] = set()  # memory that the suffix writes: later readers belong to the suffix
    seen: set[str] = set()  # memory that the suffix reads: the prefix must not write it later
    attributes: dict[str, set[str]] = {}
    for node in traced.graph.nodes:
        facts = _facts(node, traced, known)
        reached, writes = _storages(node.all_input_nodes, known), _storages(_written(node, traced), known)
        part = facts.part
        if node.op in ("placeholder", "get_attr"):
            outside |= facts.storages
            for name in facts.storages if node.op == "get_attr" else ():
                attributes.setdefault(name, set()).add(node.name)
        if node.name in stops or node.op == "output" or _trains(node, traced) or reached & dirty:
            part = Part.SUFFIX
        early = writes & seen or any(owner[name] is Part.BOTH for name in writes)
        if writes & outside or (part is Part.PREFIX and early):
            part = Part.SUFFIX
        if part is Part.SUFFIX:
            seen |= reached
            dirty |= writes
        for name in facts.storages:
            owner.setdefault(name, part)
        known[node] = _Facts(part, facts.data, facts.weighted, facts.storages)
    return known, {node for name in dirty for node in attributes.get(name, ())}


def _facts(node: fx.Node, traced: TracedForward, known: _Known) -> _Facts:
    sources = [known[source] for source in node.all_input_nodes]
    if node.op == "placeholder":
        return _Facts(Part.BOTH, True, False, frozenset({node.name}))
    if node.op == "get_attr":
        weighted = isinstance(traced.targets[str(node.target)], Parameter)
        return _Facts(Part.BOTH, False, weighted, frozenset({str(node.target)}))
    part = max((source.part for source in sources), default=Part.BOTH)
    if _is_metadata(node):
        return _Facts(part, False, False, frozenset())
    module = traced.targets[str(node.target)] if node.op == "call_module" else None
    data = any(source.data for source in sources) and function_name(node.target) not in _SIZED
    weighted = any(source.weighted for source in sources)
    weighted |= isinstance(module, nn.Module) and next(module.parameters(), None) is not None
    if data and weighted:
        part = max(part, Part.PREFIX)
    storages = frozenset({node.name})
    if not _is_fresh(node, module) or _written(node, traced):
        storages = storages.union(*(source.storages for source in sources))
    return _Facts(part, data, weighted, storages)


def _is_metadata(node: fx.Node) -> bool:
    name = function_name(node.target)
    return name in METADATA or (name == "getattr" and node.args[1] in _SHAPES)


def _is_fresh(node: fx.Node, module: Any) -> bool:
    if node.op == "call_module":
        return not isinstance(module, (nn.Identity, nn.Flatten, nn.Unflatten, AnyDropout)) and not is_opaque(module)
    return function_name(node.target) in _FRESH | _SIZED


def _trains(node: fx.Node, traced: TracedForward) -> bool:
    """Whether a node brings in a trainable parameter, random numbers or a changing buffer."""
    if node.op not in ("call_module", "get_attr"):
        return False
    target = traced.targets[str(node.target)]
    if isinstance(target, Tensor):
        return target.requires_grad
    if is_opaque(target) or any(p.requires_grad for p in target.parameters()):
        return True
    return any(_varies(module) or (module is not target and is_opaque(module)) for module in target.modules())


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
    found = out if isinstance(out, (tuple, list)) else (out,)
    return [target for target in found if isinstance(target, fx.Node)]


def _asks_for_inplace(node: fx.Node) -> bool:
    if not inspect.isfunction(node.target):
        return bool(node.kwargs.get("inplace"))
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except TypeError:
        return True
    return bool(bound.arguments.get("inplace"))


def _suffix_nodes(traced: TracedForward, known: _Known) -> tuple[set[fx.Node], list[fx.Node]]:
    """The nodes of the suffix, and the values that it takes from the prefix."""
    start = {node for node, facts in known.items() if facts.part is Part.SUFFIX}
    nodes = _needed(known, start, lambda facts: facts.part is not Part.PREFIX)
    wanted = {source for node in nodes for source in node.all_input_nodes if known[source].part is Part.PREFIX}
    tensors = {node for node in wanted if known[node].data}
    filled = {
        name
        for node, facts in known.items()
        if facts.part is Part.PREFIX
        for name in _storages(_written(node, traced), known)
    }
    for node in wanted - tensors:  # sizes of border tensors, and values computed from them
        chain = _made_of_sizes(node, known, tensors)
        if not any(known[member].storages & filled for member in chain):
            nodes |= chain
    nodes = _needed(known, nodes, lambda facts: facts.part is Part.BOTH) | nodes
    border = [node for node in known if node in wanted and node not in nodes]
    return nodes, border


def _made_of_sizes(node: fx.Node, known: _Known, tensors: set[fx.Node]) -> set[fx.Node]:
    """The prefix nodes that compute ``node`` from sizes of ``tensors``; empty if it needs more than that."""
    chain, open_nodes = set(), [node]
    while open_nodes:
        current = open_nodes.pop()
        chain.add(current)
        for source in current.all_input_nodes:
            if known[source].part is Part.BOTH or source in tensors or source in chain:
                continue
            if known[source].data:
                return set()
            open_nodes.append(source)
    return chain


def _needed(known: _Known, start: Iterable[fx.Node], inside: Any) -> set[fx.Node]:
    """All nodes ``inside`` that ``start`` depends on, and the nodes that write to their memory."""
    needed = set(start)
    storages = {name for node in needed for name in known[node].storages}
    for node in reversed(known):
        if node not in needed and inside(known[node]):
            writes = node.op not in ("placeholder", "get_attr") and bool(known[node].storages & storages)
            if not writes and not any(user in needed for user in node.users):
                continue
            needed.add(node)
        if node in needed:
            for source in node.all_input_nodes:
                storages |= known[source].storages
    return needed


def _copy(
    graph: fx.Graph, nodes: set[fx.Node], *, border: Iterable[fx.Node], results: Iterable[fx.Node] | None
) -> fx.Graph:
    """Copy some nodes in order; ``border`` are added as inputs, and ``results`` replace the output of the graph."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = part.node_copy(node)
    for node in border:
        copies[node] = part.placeholder(f"border_{node.name}")
    for node in graph.nodes:
        if node in nodes and node not in copies and node.op != "output":
            copies[node] = part.node_copy(node, lambda source: copies[source])
    if results is None:
        last = next(iter(reversed(graph.nodes)))
        part.output(fx.map_arg(last.args[0], lambda source: copies[source]))
    else:
        part.output(tuple(copies[node] for node in results))
    return part


def _torn(traced: TracedForward, known: _Known, border: list[fx.Node]) -> set[str]:
    """Border values that alias memory the suffix writes to: autograd must see how they were made."""
    inputs = {node.name for node in known if node.op == "placeholder"}
    torn: set[str] = set()
    for node, facts in known.items():
        if facts.part is Part.SUFFIX:
            writes = _storages(_written(node, traced), known)
            touched = [value for value in border if known[value].storages & writes]
            if len(touched) > 1 or writes & inputs:
                torn |= {value.name for value in touched if len(known[value].storages) > 1}
    return torn


def _storages(nodes: Iterable[fx.Node], known: _Known) -> frozenset[str]:
    return frozenset[str]().union(*(known[node].storages for node in nodes))
