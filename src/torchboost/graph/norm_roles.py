"""The role of every BatchNorm: its place in the residual blocks and plain stacks of a data flow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from torchboost.core.torch_private import PADDING, POOLING, AnyBatchNorm, AnyConv
from torchboost.graph.flow import Branches, Dataflow, Node
from torchboost.graph.structure import norm_tail

__all__ = ["WEIGHTED", "Block", "Keep", "Stack", "plain_stacks", "reasons_to_stay", "residual_blocks", "was_trained"]

Keep = Literal["last", "narrowest"]

WEIGHTED = (AnyConv, nn.Linear)
_TRANSPARENT = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_RESHAPING = (nn.Flatten, nn.Upsample, *PADDING)
_LINEAR_CALLS = frozenset(
    {"pad", "view", "reshape", "flatten", "permute", "transpose", "contiguous", "to", "clone", "dropout", "interpolate"}
)
MOST_IN_BRANCH = 3
"""BatchNorms in a residual branch. One of so many was shown to suffice, in basic and in bottleneck blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One residual addition.

    Args:
        join: The addition.
        mains: For every main branch its convolution and linear nodes, in execution order.
        norms: For every main branch its BatchNorm nodes, in execution order.
        shortcut_norms: BatchNorm nodes of the shortcuts.
        projects: Whether a shortcut changes its input, so that resolution or width may change here.
    """

    join: int
    mains: tuple[tuple[int, ...], ...]
    norms: tuple[tuple[int, ...], ...]
    shortcut_norms: tuple[int, ...]
    projects: bool


def was_trained(model: nn.Module) -> bool | None:
    """Whether any BatchNorm's statistics or counter differ from their initial values; None if none keeps statistics.

    One forward pass in training mode is enough. Values on the device ``meta`` and of lazy layers count as initial.
    """
    norms = [m for m in model.modules() if isinstance(m, AnyBatchNorm) and m.running_mean is not None]
    return any(_moved(norm) for norm in norms) if norms else None


def _moved(norm: AnyBatchNorm) -> bool:
    mean, variance, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
    if mean is None or variance is None or mean.is_meta or is_lazy(mean):
        return False
    counted = count is not None and not count.is_meta and bool(count > 0)
    return counted or bool(mean.any()) or bool((variance != 1).any())


def residual_blocks(flow: Dataflow) -> list[Block]:
    """Return the innermost residual blocks in execution order.

    A block is an addition whose inputs split at one fork, with at least one branch that has layers. The branch with the
    most weights is the main branch. Another branch counts as a shortcut if it has at most one layer with weights,
    otherwise as a second main branch. An addition around a smaller block (a long skip) is not a block.
    """
    blocks: list[Block] = []
    joins: set[int] = set()
    for node in flow.nodes:
        branches = flow.branches(node.index) if node.kind == "add" else None
        if branches is None or any(joins & path for path in branches.paths):
            continue
        block = _block(flow, node.index, branches)
        if block is not None:
            blocks.append(block)
            joins.add(node.index)
    return blocks


def _block(flow: Dataflow, join: int, branches: Branches) -> Block | None:
    layers = [_of(flow, path, WEIGHTED) for path in branches.paths]
    sizes = [(len(found), sum(_weights(flow, index) for index in found)) for found in layers]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    if not layers[largest]:
        return None
    mains = [i for i, found in enumerate(layers) if i == largest or len(found) > 1]
    shortcuts = [path for i, path in enumerate(branches.paths) if i not in mains]
    return Block(
        join=join,
        mains=tuple(layers[i] for i in mains),
        norms=tuple(_of(flow, branches.paths[i], AnyBatchNorm) for i in mains),
        shortcut_norms=tuple(sorted(index for path in shortcuts for index in _of(flow, path, AnyBatchNorm))),
        projects=not shortcuts or any(not _carries(flow, path) for path in shortcuts),
    )


def _of(flow: Dataflow, path: frozenset[int], kind: type | tuple[type, ...]) -> tuple[int, ...]:
    return tuple(index for index in sorted(path) if isinstance(flow.nodes[index].module, kind))


def _weights(flow: Dataflow, index: int) -> int:
    module = flow.nodes[index].module
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def _carries(flow: Dataflow, path: frozenset[int]) -> bool:
    """Whether a shortcut returns its input unchanged."""
    return all(isinstance(flow.nodes[index].module, _TRANSPARENT) for index in path)


class Stack(NamedTuple):
    """A run of layers with weights outside residual blocks.

    Args:
        layers: Their nodes in execution order.
        norms: For every layer the BatchNorm node directly after it, or None.
        linear_end: Whether the last BatchNorm feeds a layer or an addition without an activation in between, as at
            the end of an inverted residual; the run is then one block.
    """

    layers: tuple[int, ...]
    norms: tuple[int | None, ...]
    linear_end: bool


def plain_stacks(flow: Dataflow, blocks: list[Block]) -> list[Stack]:
    """Return the runs of layers with weights outside residual blocks.

    Layers belong to one run if the output of each reaches only the next, through activations, pooling, flattening and
    gates (squeeze-and-excitation). A run also ends after a BatchNorm that no activation follows, which is the end of an
    inverted residual without skip.
    """
    onwards = _onwards(flow)
    in_block = _inside(flow, blocks)
    free = [n.index for n in flow.instances(WEIGHTED) if n.index not in in_block]
    following = {index: _next_layer(flow, index, onwards) for index in free}
    followers = set(following.values())
    stacks: list[Stack] = []
    for start in free:
        if start in followers:
            continue
        run = [start]
        while (after := following.get(run[-1])) is not None and after not in in_block:
            run.append(after)
        stacks += _split_linear_ends(flow, run)
    return stacks


def _inside(flow: Dataflow, blocks: list[Block]) -> set[int]:
    """Return every node on a path of a block."""
    inside: set[int] = set()
    for block in blocks:
        branches = flow.branches(block.join)
        if branches is not None:
            inside.update(*branches.paths)
    return inside


def _onwards(flow: Dataflow) -> list[int | None]:
    """Return for every node the single node that uses its output; gates around it are skipped."""
    gates: dict[int, list[tuple[int, set[int]]]] = {}
    for node in flow.nodes:
        branches = flow.branches(node.index)
        if branches is None:
            continue
        inside = set().union(*branches.paths)
        if not any(isinstance(flow.nodes[index].module, AnyBatchNorm) for index in inside):
            gates.setdefault(branches.fork, []).append((node.index, inside))
    onwards: list[int | None] = []
    for index, consumers in enumerate(flow.consumers):
        following = None
        if len(consumers) == 1 and flow.nodes[consumers[0]].inputs == (index,):
            following = consumers[0]
        for join, inside in gates.get(index, ()):
            if set(consumers) <= inside | {join}:
                following = join
        onwards.append(following)
    return onwards


def _next_layer(flow: Dataflow, index: int, onwards: list[int | None]) -> int | None:
    after = onwards[index]
    while after is not None and not isinstance(flow.nodes[after].module, WEIGHTED):
        after = onwards[after]
    return after


def _split_linear_ends(flow: Dataflow, run: list[int]) -> list[Stack]:
    parts: list[Stack] = []
    layers: list[int] = []
    for index in run:
        layers.append(index)
        linear = _ends_linearly(flow, index)
        if linear or index == run[-1]:
            parts.append(Stack(tuple(layers), tuple(_norm_behind(flow, layer) for layer in layers), linear))
            layers = []
    return parts


def _norm_behind(flow: Dataflow, layer: int) -> int | None:
    consumers = flow.consumers[layer]
    return consumers[0] if len(consumers) == 1 and isinstance(flow.nodes[consumers[0]].module, AnyBatchNorm) else None


def _ends_linearly(flow: Dataflow, layer: int) -> bool:
    norm = _norm_behind(flow, layer)
    if norm is None or flow.traced == "structure":  # registration order does not show where activations are
        return False
    module = flow.nodes[norm].module
    assert module is not None
    if not all(isinstance(module.get_submodule(name), _TRANSPARENT) for name in norm_tail(module) or ()):
        return False
    waiting = list(flow.consumers[norm])
    while waiting:
        node = flow.nodes[waiting.pop()]
        if isinstance(node.module, WEIGHTED) or node.kind == "add":
            return True
        if _bends_nothing(node):
            waiting += flow.consumers[node.index]
    return False


def _bends_nothing(node: Node) -> bool:
    """Whether a node only moves, pools or drops values, and is not an activation."""
    if node.module is None:
        return node.label in _LINEAR_CALLS
    return isinstance(node.module, (*_TRANSPARENT, *_RESHAPING, *POOLING))


def reasons_to_stay(
    flow: Dataflow, blocks: list[Block], *, keep: Keep, keep_shortcut: bool, keep_every: int, blocks_per_norm: int
) -> dict[int, str | None]:
    """Return for every BatchNorm node in a block or stack why it is needed; None if it is not.

    Args:
        flow: The data flow.
        blocks: Its residual blocks.
        keep: Which BatchNorm of a residual branch stays: the last, or the last of those over the fewest channels.
        keep_shortcut: Whether shortcuts keep their BatchNorm.
        keep_every: Layers per BatchNorm in plain stacks; 1 keeps all, in blocks without skip too, and in residual
            branches with more than ``MOST_IN_BRANCH``, which are stacks inside a skip.
        blocks_per_norm: Blocks per BatchNorm while neither width nor resolution changes.
    """
    most = MOST_IN_BRANCH if keep_every == 1 else len(flow.nodes)
    reasons = _block_reasons(flow, blocks, keep, keep_shortcut, blocks_per_norm, most)
    first = next((node.index for node in flow.instances(AnyBatchNorm)), None)
    stem = None if first in reasons else first
    for stack in plain_stacks(flow, blocks):
        last = max((at for at, norm in enumerate(stack.norms) if norm is not None), default=0)
        for at, norm in enumerate(stack.norms):
            if norm is None:
                continue
            reasons[norm] = None
            if at == last:
                reasons[norm] = "the last of a block without skip" if stack.linear_end else "the last of its run"
            elif (keep_every == 1 or not stack.linear_end) and (last - at) % keep_every == 0:
                reasons[norm] = "in a plain stack" if keep_every == 1 else f"one of every {keep_every} in a plain stack"
    if stem is not None:
        reasons[stem] = "the first of the network"
    return reasons


def _block_reasons(
    flow: Dataflow, blocks: list[Block], keep: Keep, keep_shortcut: bool, blocks_per_norm: int, most: int
) -> dict[int, str | None]:
    reasons: dict[int, str | None] = {}
    since = 0
    for block in blocks:
        since += 1
        due = since >= blocks_per_norm or block.projects or block is blocks[-1]
        since = 0 if due else since
        for norms in block.norms:
            long = len(norms) > most
            reasons.update(
                dict.fromkeys(norms, f"in a branch of more than {most}, a stack inside a skip" if long else None)
            )
            if due and norms and not long:
                stays = norms[-1] if keep == "last" else min(reversed(norms), key=lambda norm: _channels(flow, norm))
                reasons[stays] = f"the {keep} of its residual branch"
        reasons.update(dict.fromkeys(block.shortcut_norms, "in a shortcut (keep_shortcut)" if keep_shortcut else None))
    return reasons


def _channels(flow: Dataflow, norm: int) -> int:
    module = flow.nodes[norm].module
    assert isinstance(module, AnyBatchNorm)
    return module.num_features
