"""Two runnable halves of a forward: the frozen part under ``no_grad``, and the rest."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchboost.algorithms.grad_freeze.prefix.split import Cut, cut_forward
from torchboost.algorithms.grad_freeze.prefix.trace import Call, TracedForward, random_state
from torchboost.core.torch_private import memory_stamp, versions
from torchboost.graph.copies import accelerators, generators_kept

__all__ = ["Halves", "build_halves"]

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
_HALF_TOLERANCE = 0.1


@dataclass(slots=True)
class Halves:
    """One forward, split in two.

    Args:
        cut: The cut.
        prefix: Returns the tuple of border values. Calls the model's own modules, as the suffix does.
        suffix: Takes the tensors of the call and the border values.
        frozen: Every parameter and buffer of the prefix.
        signature: Equal for two prefixes that compute the same, bit for bit.
        rows: Why border values cannot be kept per sample; empty if they can, None until :meth:`check_rows`.
    """

    cut: Cut
    prefix: fx.GraphModule
    suffix: fx.GraphModule
    frozen: tuple[Tensor, ...]
    signature: Hashable
    rows: str | None = field(default=None)

    @property
    def parameters(self) -> int:
        """Number of weights in the prefix."""
        return sum(p.numel() for p in self.frozen if isinstance(p, nn.Parameter))

    @torch.no_grad()
    def border(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Run the prefix."""
        values = self.prefix.forward(*tensors)
        # Autograd refuses in-place writes to a view made under no_grad.
        return tuple(value.detach() if isinstance(value, Tensor) else value for value in values)

    def select(self, tensors: tuple[Tensor, ...], rows: Tensor) -> tuple[Tensor, ...]:
        """Take some samples out of the tensors that the prefix reads."""
        picked = set(self.cut.inputs)
        return tuple(t[rows.to(t.device)] if place in picked else t for place, t in enumerate(tensors))

    def check_rows(self, tensors: tuple[Tensor, ...], values: tuple[Any, ...], count: int) -> str:
        """Explain why ``values`` are not one independent row per sample; return an empty string if they are.

        The prefix runs once more, on every second sample from the last; the rows must equal those of the whole batch.
        """
        if self.rows is None:
            self.rows = self._rows_obstacle(tensors, values, count)
        return self.rows

    def _rows_obstacle(self, tensors: tuple[Tensor, ...], values: tuple[Any, ...], count: int) -> str:
        for place in self.cut.inputs:
            if tensors[place].ndim == 0 or len(tensors[place]) != count:
                return (
                    f"input {place} of shape {tuple(tensors[place].shape)} is not one row for each of {count} samples"
                )
        for name, value in zip(self.cut.border, values, strict=True):
            if not isinstance(value, Tensor):
                return f"'{name}' at its border is not a tensor but {type(value).__name__}"
            if value.ndim == 0 or len(value) != count:
                return (
                    f"'{name}' at its border, of shape {tuple(value.shape)}, is not one row for each of {count} samples"
                )
        rows = torch.tensor(list(range(count - 1, -1, -2)) if count > 1 else [0, 0], device="cpu")
        try:
            alone = self.border(self.select(tensors, rows))
        except Exception as error:  # whatever the user's forward raises
            return f"it does not run on part of a batch ({error})"
        for name, value, part in zip(self.cut.border, values, alone, strict=True):
            if not _alike(value[rows.to(value.device)], part):
                return f"'{name}' at its border depends on what else is in the batch"
        return ""


def build_halves(traced: TracedForward, call: Call, blocked: set[str]) -> Halves | None:
    """Cut a forward and check the prefix on one call; return None if no frozen part comes first.

    The prefix must neither draw random numbers nor change buffers. Nodes that do, found by running it, are added to
    ``blocked`` and left to the suffix; random state and buffers are restored.

    Cost: one or a few passes through the prefix.

    Args:
        traced: The forward.
        call: Arguments it runs on.
        blocked: Names of nodes known to belong to the suffix; grows.
    """
    while True:
        cut = cut_forward(traced, blocked=blocked)
        if not cut.border:
            return None
        plain = _module(cut.prefix, traced.targets)
        found = _restless(plain, call.tensors) - blocked
        if not found:
            break
        blocked |= found
    frozen = (*plain.parameters(), *plain.buffers())
    names = tuple(node.name for node in cut.prefix.nodes)
    signature = (call.key, names, cut.border, tuple((id(t), *memory_stamp(t)) for t in frozen))
    return Halves(cut, plain, _module(cut.suffix, traced.targets), frozen, signature)


def _module(graph: fx.Graph, targets: dict[str, nn.Module | Tensor]) -> fx.GraphModule:
    return fx.GraphModule(targets, graph)  # the dictionary preserves module identity; only those used are taken


@torch.no_grad()
def _restless(prefix: fx.GraphModule, tensors: tuple[Tensor, ...]) -> set[str]:
    """Names of the nodes that draw random numbers or change buffers."""
    buffers = [(buffer, buffer.clone()) for buffer in prefix.buffers()]
    devices = accelerators((*tensors, *prefix.parameters()))
    watch = _Watcher(prefix, functools.partial(random_state, devices), [buffer for buffer, _ in buffers])
    with generators_kept(devices):
        before = watch.state()
        prefix.forward(*tensors)
        if watch.state() != before:
            watch.run(*tensors)
    for buffer, value in buffers:
        if not torch.equal(buffer, value):
            buffer.copy_(value)
    return watch.found


class _Watcher(fx.Interpreter):
    """Runs a graph node by node and records the nodes that change the random state or a buffer."""

    def __init__(self, module: fx.GraphModule, random: Any, buffers: list[Tensor]) -> None:
        super().__init__(module)
        self.found: set[str] = set()
        self._random = random
        self._buffers = buffers

    def state(self) -> tuple[Any, ...]:
        return (self._random(), versions(self._buffers))

    def run_node(self, n: fx.Node) -> Any:
        before = self.state()
        result = super().run_node(n)
        if self.state() != before:
            self.found.add(n.name)
        return result


def _alike(whole: Tensor, part: Tensor) -> bool:
    if whole.shape != part.shape or whole.dtype != part.dtype:
        return False
    if not whole.is_floating_point() or whole.numel() == 0:
        return torch.equal(whole, part)
    largest = float(whole.abs().max())
    difference = float((whole.double() - part.double()).abs().max())
    return difference <= _TOLERANCE.get(whole.dtype, _HALF_TOLERANCE) * largest
