"""The data flow a module tree suggests: the last resort where a model can be neither traced nor run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn
from torch.nn.modules.conv import _ConvNd

from torchboost.core.flow import Dataflow, FlowBuilder

__all__ = ["assume"]


def assume(model: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> Dataflow:
    """Assume that modules run in the order they were registered, and that blocks of fitting widths are residual.

    A block is residual where its convolutions end with as many channels as they start with, at the same
    resolution, or where one 1x1 convolution beside the others maps the block's input to its output. This is a
    guess: right for the usual residual and plain networks, not proved for any. Nothing that must be exact may
    rely on it.

    Args:
        model: Any module.
        is_leaf: Which modules become one node.
    """
    builder = FlowBuilder()
    last = _walk(model, builder, builder.add("input", "input"), is_leaf)
    builder.add("output", "output", [last])
    return builder.build("structure")


def _walk(module: nn.Module, builder: FlowBuilder, entry: int, is_leaf: Callable[[nn.Module], bool]) -> int:
    if is_leaf(module):
        return builder.add("module", type(module).__name__, [entry], module)
    split = _residual(module)
    if split is not None:
        main, shortcut = split
        ends = [_chain([m for m in path if is_leaf(m)], builder, entry) for path in (main, shortcut)]
        return builder.add("add", "add", ends)
    for child in module.children():
        entry = _walk(child, builder, entry, is_leaf)
    return entry


def _chain(modules: Sequence[nn.Module], builder: FlowBuilder, entry: int) -> int:
    for module in modules:
        entry = builder.add("module", type(module).__name__, [entry], module)
    return entry


def _residual(block: nn.Module) -> tuple[list[nn.Module], list[nn.Module]] | None:
    """Main branch and shortcut of a block, or None. Containers and whatever holds a residual block are none."""
    if isinstance(block, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return None
    inner = [m for m in block.modules() if m is not block]
    if any(_residual(m) is not None for m in inner):
        return None
    every = [m for m in inner if isinstance(m, _ConvNd)]
    normalised = [c for c in every if _width_behind(inner, c) == c.out_channels]  # leaves out squeeze-and-excitation
    return _split(inner, normalised) or _split(inner, every)


def _split(inner: list[nn.Module], convolutions: Sequence[_ConvNd]) -> tuple[list[nn.Module], list[nn.Module]] | None:
    if len(convolutions) < 2:
        return None
    for projection in (convolutions[-1], convolutions[0]):
        others = [c for c in convolutions if c is not projection]
        if _projects(projection, others):
            return _without(inner, projection)
    same = convolutions[0].in_channels == convolutions[-1].out_channels and _stride(convolutions) == 1
    return (inner, []) if same and _fit(convolutions) else None


def _width_behind(modules: list[nn.Module], convolution: _ConvNd) -> int | None:
    """Channels of the normalisation registered right behind a convolution, if there is one."""
    behind = modules[modules.index(convolution) + 1 :][:1]
    return getattr(behind[0], "num_features", None) if behind else None


def _projects(candidate: _ConvNd, others: Sequence[_ConvNd]) -> bool:
    return (
        len(others) > 0
        and set(candidate.kernel_size) == {1}
        and candidate.in_channels == others[0].in_channels
        and candidate.out_channels == others[-1].out_channels
        and _stride([candidate]) == _stride(others)
        and _fit(others)
    )


def _without(modules: list[nn.Module], projection: _ConvNd) -> tuple[list[nn.Module], list[nn.Module]]:
    """Take a projection and the normalisation registered right behind it out of a block."""
    at = modules.index(projection)
    length = 2 if _width_behind(modules, projection) == projection.out_channels else 1
    return modules[:at] + modules[at + length :], modules[at : at + length]


def _fit(convolutions: Sequence[_ConvNd]) -> bool:
    return all(a.out_channels == b.in_channels for a, b in pairwise(convolutions))


def _stride(convolutions: Sequence[_ConvNd]) -> int:
    product = 1
    for convolution in convolutions:
        product *= convolution.stride[0]
    return product
