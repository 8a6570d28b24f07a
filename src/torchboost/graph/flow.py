"""The graph of one forward pass, with queries for the algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from torch import nn

__all__ = ["Branches", "Dataflow", "FlowBuilder", "Kind", "Node", "Traced", "registered"]

Kind = Literal["input", "module", "add", "other", "output"]
Traced = Literal["fx", "run", "structure"]
"""By a symbolic trace, in one run, or not at all: the order in which modules are registered."""


@dataclass(frozen=True, slots=True)
class Node:
    """One step of a forward pass.

    Args:
        index: Position in execution order.
        kind: A module call, an addition of two or more activations, or any other operation.
        label: Module or function name, for messages.
        inputs: Nodes whose outputs it uses, each listed once.
        module: The module of a ``"module"`` node.
        writes: Whether a function writes to the memory of its first input.
        running: Modules whose forward was running when this one was called, outermost first.
        rank: Number of dimensions of its output, if known: of any output in a symbolic trace, of the sample in a run.
    """

    index: int
    kind: Kind
    label: str
    inputs: tuple[int, ...]
    module: nn.Module | None = None
    writes: bool = False
    running: tuple[nn.Module, ...] = ()
    rank: int | None = None


class Branches(NamedTuple):
    """Two or more paths that split at ``fork`` and meet again; an identity shortcut is an empty path."""

    fork: int
    paths: tuple[frozenset[int], ...]


class Dataflow:
    """Nodes in execution order.

    Args:
        nodes: Every node comes after its inputs.
        traced: How the graph was found, see :data:`Traced`. What must be exact does not rely on ``"structure"``.
    """

    def __init__(self, nodes: Sequence[Node], traced: Traced) -> None:
        self.nodes = tuple(nodes)
        self.traced: Traced = traced

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For every node, the nodes that use its output."""
        lists: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for source in node.inputs:
                lists[source].append(node.index)
        return tuple(map(tuple, lists))

    @cached_property
    def _reach(self) -> tuple[int, ...]:
        """For every node, as bits, the node itself and all nodes that it depends on."""
        masks: list[int] = []
        for node in self.nodes:
            mask = 1 << node.index
            for source in node.inputs:
                mask |= masks[source]
            masks.append(mask)
        return tuple(masks)

    @cached_property
    def _calls(self) -> dict[nn.Module, list[int]]:
        calls: dict[nn.Module, list[int]] = {}
        for node in self.nodes:
            if node.module is not None:
                calls.setdefault(node.module, []).append(node.index)
        return calls

    def calls(self, module: nn.Module) -> list[int]:
        """Return the nodes that call ``module``: none if the pass does not reach it, several if it is shared."""
        return self._calls.get(module, [])

    def instances(self, kind: type | tuple[type, ...]) -> list[Node]:
        """Return the calls of all modules of a type, in execution order."""
        return [node for node in self.nodes if isinstance(node.module, kind)]

    def branches(self, index: int) -> Branches | None:
        """Return the paths that meet in a node, or None if its inputs do not come from a single fork.

        The fork is the last node that all inputs depend on. Paths must not share nodes and must not use
        anything from before the fork.
        """
        ends = self.nodes[index].inputs
        if len(ends) < 2:
            return None
        common = -1
        for end in ends:
            common &= self._reach[end]
        if not common:
            return None
        fork = common.bit_length() - 1
        masks = [self._reach[end] & ~self._reach[fork] for end in ends]
        inside = 0
        for mask in masks:
            if inside & mask:
                return None
            inside |= mask
        allowed = inside | 1 << fork
        paths = tuple(frozenset(_bits(mask)) for mask in masks)
        sources = {source for path in paths for member in path for source in self.nodes[member].inputs}
        if any(not allowed >> source & 1 for source in sources):
            return None
        return Branches(fork, paths)


class FlowBuilder:
    """Collect nodes in execution order."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []

    def add(
        self,
        kind: Kind,
        label: str,
        inputs: Iterable[int] = (),
        module: nn.Module | None = None,
        *,
        writes: bool = False,
        running: tuple[nn.Module, ...] = (),
        rank: int | None = None,
    ) -> int:
        """Append a node and return its index."""
        index = len(self._nodes)
        self._nodes.append(Node(index, kind, label, tuple(dict.fromkeys(inputs)), module, writes, running, rank))
        return index

    def operation(self, name: str, inputs: Sequence[int], additions: frozenset[str], *, writes: bool = False) -> int:
        """Append a function call; it is an addition if its name says so and it joins two activations."""
        return self.add("add" if name in additions and len(inputs) > 1 else "other", name, inputs, writes=writes)

    def build(self, traced: Traced) -> Dataflow:
        """Return the graph."""
        return Dataflow(self._nodes, traced)


def registered(model: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> Dataflow:
    """Return the modules in the order of registration, each after the one before, as if they ran like that.

    Args:
        model: Any module.
        is_leaf: Which modules become one node.
    """
    builder = FlowBuilder()
    last = builder.add("input", "input")
    for module in model.modules():
        if is_leaf(module):
            last = builder.add("module", type(module).__name__, [last], module)
    builder.add("output", "output", [last])
    return builder.build("structure")


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
