"""The graph of one forward pass, with queries for the algorithms."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from torch import nn

Kind = Literal["input", "module", "add", "other", "output"]
Traced = Literal["fx", "run", "structure", "-"]
"""By a symbolic trace, in one run, or not at all, because that failed or was not needed: then there are no nodes."""
_ADDITIONS = frozenset({"add", "add_", "iadd", "__add__", "__iadd__", "__radd__"})


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
        flat: In a run, whether the output has two dimensions.
    """

    index: int
    kind: Kind
    label: str
    inputs: tuple[int, ...]
    module: nn.Module | None = None
    writes: bool = False
    running: tuple[nn.Module, ...] = ()
    flat: bool = False


class Branches(NamedTuple):
    """Two or more paths that split at ``fork`` and meet again. An identity shortcut is an empty path."""

    fork: int
    paths: tuple[frozenset[int], ...]


class Dataflow:
    """Nodes in execution order: every node comes after its inputs."""

    def __init__(self, traced: Traced) -> None:
        self.nodes: list[Node] = []
        self.traced: Traced = traced

    def add(self, kind: Kind, label: str, inputs: Iterable[int] = (), **facts: Any) -> int:
        """Append a node, and return its index. ``facts`` are the other fields of :class:`Node`."""
        sources = tuple(dict.fromkeys(inputs))
        if kind == "other" and label in _ADDITIONS and len(sources) > 1:
            kind = "add"
        self.nodes.append(Node(len(self.nodes), kind, label, sources, **facts))
        return len(self.nodes) - 1

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For every node, the nodes that use its output."""
        lists: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for source in node.inputs:
                lists[source].append(node.index)
        return tuple(map(tuple, lists))

    @cached_property
    def _reach(self) -> list[int]:
        """For every node, as bits, the node itself and all nodes that it depends on."""
        masks: list[int] = []
        for node in self.nodes:
            mask = 1 << node.index
            for source in node.inputs:
                mask |= masks[source]
            masks.append(mask)
        return masks

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

    def before(self, index: int) -> list[Node]:
        """Return a node and all that it depends on."""
        return [self.nodes[at] for at in _bits(self._reach[index])]

    def instances(self, kind: type | tuple[type, ...]) -> list[Node]:
        """Return the calls of all modules of a type, in execution order."""
        return [node for node in self.nodes if isinstance(node.module, kind)]

    def branches(self, index: int) -> Branches | None:
        """Return the paths that meet in a node, or None if its inputs do not come from a single fork.

        The fork is the last node that all inputs depend on. Paths must not share nodes and must not use
        anything from before the fork.
        """
        ends = self.nodes[index].inputs
        common = functools.reduce(operator.and_, (self._reach[end] for end in ends), -1)
        if len(ends) < 2 or not common:
            return None
        fork = common.bit_length() - 1
        masks = [self._reach[end] & ~self._reach[fork] for end in ends]
        inside = functools.reduce(operator.or_, masks)
        if sum(masks) != inside:
            return None
        paths = tuple(frozenset(_bits(mask)) for mask in masks)
        sources = {source for path in paths for member in path for source in self.nodes[member].inputs}
        return Branches(fork, paths) if all((inside | 1 << fork) >> source & 1 for source in sources) else None


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
