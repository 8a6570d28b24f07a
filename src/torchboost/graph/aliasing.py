"""Check whether a normalisation can be removed although a later operation may write to its output in place."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.nn.modules import activation

from torchboost.core.torch_private import POOLING, AnyBatchNorm
from torchboost.graph.flow import Dataflow, Node
from torchboost.graph.norm_roles import WEIGHTED
from torchboost.graph.structure import is_customised, norm_tail

__all__ = ["may_collide"]

_FRESH_CALLS = frozenset(
    {"cat", "stack", "mul", "__mul__", "__rmul__", "sub", "__sub__", "truediv", "__truediv__", "matmul", "__matmul__"}
    | {"mean", "sum", "sigmoid", "tanh", "softmax", "gelu", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"}
    | {"conv1d", "conv2d", "conv3d", "linear", "batch_norm", "layer_norm", "group_norm"}
)


def may_collide(flow: Dataflow, index: int, removed: Collection[int] = ()) -> bool:
    """Return whether something may write in place to memory that a removed normalisation would share.

    A normalisation returns a new tensor. After removal its input is returned instead, so a later in-place ReLU or
    ``+=`` overwrites what others still read (the skip path) or what autograd keeps for the backward pass. This is safe
    if the input comes from a convolution or linear layer and is used nowhere else, or if nothing that may share the
    memory is written to. Operations not known to be harmless count as writing.

    Args:
        flow: The data flow of the forward pass.
        index: Node of the normalisation.
        removed: Other normalisations that return their inputs.
    """
    node = flow.nodes[index]
    if flow.traced == "structure" or len(node.inputs) != 1:
        return True
    source = flow.nodes[node.inputs[0]]
    if flow.consumers[source.index] == (index,) and _keeps_nothing(source):
        return False
    return _is_written(flow, _sharing_before(flow, index, {index, *removed}), {index, *removed})


def _keeps_nothing(node: Node) -> bool:
    """Whether a layer returns a new tensor that nothing else, including autograd, keeps."""
    module = node.module
    if not isinstance(module, WEIGHTED) or is_customised(module):
        return False
    return type(module).forward.__module__.startswith("torch.nn.modules")


def _sharing_before(flow: Dataflow, index: int, removed: Collection[int]) -> set[int]:
    """Return the node and those before it whose outputs may share memory."""
    found: set[int] = set()
    waiting = [index]
    while waiting:
        at = waiting.pop()
        if at not in found:
            found.add(at)
            waiting += () if _is_fresh(flow.nodes[at]) and at not in removed else flow.nodes[at].inputs
    return found


def _is_written(flow: Dataflow, sharing: set[int], removed: Collection[int]) -> bool:
    """Whether something writes to the memory of these nodes, or of later nodes that may share it."""
    waiting = list(sharing)
    while waiting:
        at = waiting.pop()
        if at in removed and _writes(flow.nodes[at]):  # its tail does
            return True
        for consumer in flow.consumers[at]:
            node = flow.nodes[consumer]
            writes = _writes(node) and consumer not in removed
            if node.kind == "output" or (writes and node.inputs[0] == at):
                return True
            if writes:  # to something else, which it returns
                continue
            if consumer not in sharing and (consumer in removed or not _is_fresh(node)):
                sharing.add(consumer)
                waiting.append(consumer)
    return False


def _writes(node: Node) -> bool:
    module = node.module
    if module is None:
        return node.writes
    parts = [module.get_submodule(name) for name in norm_tail(module) or ()] if isinstance(module, AnyBatchNorm) else []
    return any(getattr(part, "inplace", False) is True for part in (module, *parts))


def _is_fresh(node: Node) -> bool:
    """Whether the output is known to be a new tensor."""
    module = node.module
    if module is None:
        return not node.writes and (node.kind == "add" or node.label in _FRESH_CALLS)
    if isinstance(module, nn.Module) and type(module).__module__ == activation.__name__:
        return not _writes(node)
    return isinstance(module, (*WEIGHTED, AnyBatchNorm, *POOLING))
