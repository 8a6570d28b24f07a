"""Split a model into an ordered list of blocks of parameters, by module structure and execution order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from torchboost.core.torch_private import AnyConv
from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.graph.flow import Dataflow
from torchboost.graph.trace import trace

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_STACK = 4
"""A container of this many layers is a stack that is cut between layers. Residual bodies have up to three."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Block:
    """Parameters that are frozen together.

    Args:
        modules: All modules in it, containers included.
        parameters: Each parameter belongs to exactly one block of a model.
        cut: Modules in it that use a parameter of a later block (tied weights). While this block is frozen their
            outputs must be detached, or the backward pass would run through the block to reach that parameter.
    """

    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    cut: tuple[nn.Module, ...] = ()


def blocks_of(model: nn.Module) -> tuple[Block, ...]:
    """Return the blocks of a model, wrapped or not, in the order in which they run. They hold every parameter once.

    A block is a module without repeated blocks inside (a residual block, a transformer layer), or a single layer of a
    plain stack. Normalisations join the layer before them. The order is the order of the traced data flow
    (:func:`torchboost.graph.trace.trace`). If the model can be neither traced nor run, and under FSDP2, it is the order
    of registration. Tied weights belong to the block that uses them last.

    Cost: one symbolic trace of the forward pass, or one forward pass on two samples.
    """
    sharded = wrapper_of(model) == "fully_shard"
    network = _core(unwrap(model))
    units = [unit for unit in _units(network) if unit.parameters]
    flow = Dataflow("structure") if sharded else trace(network)
    return _owned(_joined(_in_order(units, flow)))


def group_starts(blocks: int, groups: int) -> tuple[int, ...]:
    """Return the first block of each group. Groups are as even as possible, and at most as many as blocks.

    Example:
        >>> group_starts(8, 3)
        (0, 2, 5)
    """
    count = max(1, min(groups, blocks))
    return tuple(index * blocks // count for index in range(count))


@dataclass(slots=True)
class _Unit:
    roots: list[nn.Module]
    parameters: list[nn.Parameter]

    def modules(self) -> Iterator[nn.Module]:
        for root in self.roots:
            yield from root.modules()


def _core(model: nn.Module) -> nn.Module:
    """Return the innermost module that still holds every parameter, if it has children: skips losses and wrappers."""
    while next(model.parameters(recurse=False), None) is None:
        holders = [child for child in model.children() if next(child.parameters(), None) is not None]
        if len(holders) != 1 or next(holders[0].children(), None) is None:
            break
        model = holders[0]
    return model


def _units(module: nn.Module) -> Iterator[_Unit]:
    """Split a module into its children, recursively for children that hold blocks."""
    direct = list(module.parameters(recurse=False))
    for child in module.children():
        if isinstance(child, _LISTS) or _holds_blocks(child):
            inner = list(_units(child))
        else:
            inner = [_Unit([child], list(child.parameters()))]
        if direct and inner and inner[0].parameters:
            inner[0].parameters = direct + inner[0].parameters
            direct = []
        yield from inner
    if direct:
        yield _Unit([module], direct)


def _holds_blocks(module: nn.Module) -> bool:
    """Whether a module has parts to freeze one by one: a list of two or more blocks, or a stack of layers."""
    for container in module.modules():
        if isinstance(container, _LISTS):
            children = list(container.children())
            matrices = [sum(parameter.ndim > 1 for parameter in child.parameters()) for child in children]
            if sum(count > 1 for count in matrices) > 1:
                return True
            if sum(isinstance(child, (AnyConv, nn.Linear)) for child in children) >= _STACK:
                return True
    return False


def _in_order(units: list[_Unit], flow: Dataflow) -> list[_Unit]:
    """Sort units by the last call of any of their modules. Units without a call follow their predecessor."""
    keys, last = [], -1
    for unit in units:
        calls = [call for module in unit.modules() for call in flow.calls(module)]
        last = max(calls, default=last)
        keys.append(last)
    return [unit for _, unit in sorted(zip(keys, units, strict=True), key=lambda pair: pair[0])]


def _joined(units: list[_Unit]) -> list[_Unit]:
    """Merge units that hold only vectors (normalisations, scales) into the unit before them."""
    joined: list[_Unit] = []
    for unit in units:
        if joined and all(parameter.ndim < 2 for parameter in unit.parameters):
            joined[-1].roots += unit.roots
            joined[-1].parameters += unit.parameters
        else:
            joined.append(unit)
    return joined


def _owned(units: list[_Unit]) -> tuple[Block, ...]:
    """Assign tied parameters to the last unit that uses them, and record the earlier users."""
    owner: dict[Tensor, int] = {p: index for index, unit in enumerate(units) for p in unit.parameters}
    blocks = []
    for index, unit in enumerate(units):
        modules = tuple(dict.fromkeys(unit.modules()))
        own = tuple(dict.fromkeys(p for p in unit.parameters if owner[p] == index))
        cut = tuple(m for m in modules if any(owner[p] > index for p in m.parameters(recurse=False) if p in owner))
        if own:
            blocks.append(Block(modules=modules, parameters=own, cut=cut))
        elif blocks:
            before = blocks[-1]
            blocks[-1] = replace(before, modules=(*before.modules, *modules), cut=(*before.cut, *cut))
        else:
            units[index + 1].roots = unit.roots + units[index + 1].roots  # a tied embedding comes first
    return tuple(blocks)
