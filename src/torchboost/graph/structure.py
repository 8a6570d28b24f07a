"""Facts from the module tree without a forward pass: the modules inside a BatchNorm, and an assumed data flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.overrides import TorchFunctionMode

from torchboost.core.torch_private import (
    AnyBatchNorm,
    AnyConv,
    buffer_slots,
    child_slots,
    has_gradient_hooks,
    module_hooks,
    parameter_slots,
    share_attributes,
)
from torchboost.graph.flow import Dataflow, FlowBuilder

__all__ = ["assume", "is_customised", "norm_tail"]

_STOCK_NORMS = (AnyBatchNorm.forward, SyncBatchNorm.forward)
_STATE = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def norm_tail(norm: nn.Module) -> tuple[str, ...] | None:
    """Name the modules inside a BatchNorm that its normalised values pass through, in order.

    For torch's own BatchNorm the result is ``()``. For a subclass that adds modules, such as dropout and an activation,
    it is their names, found by recording its ``forward`` in both modes on a tensor without data. None means that the
    computation is not known: its ``forward`` does something else, such as running a module twice, or the instance is
    customised (hooks, another ``forward``, parametrizations).

    Cost: nothing for torch's own classes, a few milliseconds for subclasses.
    """
    if (
        not isinstance(norm, AnyBatchNorm)
        or is_customised(norm)
        or {*parameter_slots(norm), *buffer_slots(norm)} != _STATE
    ):
        return None
    if type(norm).forward in _STOCK_NORMS:
        return ()
    modes = (False,) if isinstance(norm, SyncBatchNorm) else (False, True)  # training one asks for ranks and devices
    tails = {_watched_tail(norm, training) for training in modes}
    tail = tails.pop() if len(tails) == 1 else None
    return None if tail is None or len({child_slots(norm)[name] for name in tail}) < len(tail) else tail


def is_customised(module: nn.Module) -> bool:
    """Whether a call does more than the class's ``forward``: hooks, an instance's ``forward``, parametrizations."""
    watched = any(p is not None and has_gradient_hooks(p) for p in parameter_slots(module).values())
    called = type(module).__call__ is not nn.Module.__call__
    set_on_it = "forward" in vars(module) or "parametrizations" in child_slots(module)
    return any(module_hooks(module)) or watched or called or set_on_it


def _watched_tail(norm: AnyBatchNorm, training: bool) -> tuple[str, ...] | None:
    """Run the forward of a subclass with stand-ins for its children on an empty tensor, and record the calls."""
    twin = norm.__new__(type(norm))  # shares the parameters, but not what the forward changes
    buffers = {name: None if buffer is None else buffer.clone() for name, buffer in buffer_slots(norm).items()}
    for sides in (2, 1, 3, 0):
        source = torch.empty(2, norm.num_features, *[2] * sides, device="meta")
        watch = _Watch(twin, source)
        children = {name: None if child is None else _Step(name, watch) for name, child in child_slots(norm).items()}
        share_attributes(twin, norm, buffers=buffers, children=children)
        twin.training = training
        try:
            with torch.no_grad(), watch:
                output = twin.forward(source)
        except Exception:  # another number of dimensions, or any error from the forward of a subclass
            continue
        return tuple(watch.tail) if watch.normalised and output is watch.current and not watch.strange else None
    return None


class _Watch(TorchFunctionMode):
    """Follow one tensor: first into ``batch_norm``, which is not computed, then from child to child."""

    def __init__(self, norm: AnyBatchNorm, source: Tensor) -> None:
        super().__init__()
        self._norm = norm
        self.current: Tensor | None = source
        self.normalised = False
        self.strange = False
        self.tail: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm and not self.normalised and args and args[0] is self.current:
            self.normalised = True
            self.strange |= not _with_its_own(self._norm, args, kwargs or {})
            self.current = torch.empty_like(args[0])
            return self.current
        result = func(*args, **(kwargs or {}))
        touched = any(value is self.current for value in (*args, *(kwargs or {}).values()))
        self.strange |= touched and (result is None or isinstance(result, Tensor))  # sizes and the like do no harm
        return result


def _with_its_own(norm: AnyBatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``batch_norm`` is called with the statistics, affine map and ``eps`` of this norm."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = {"training": False, "eps": 1e-5, **dict(zip(names, args, strict=False)), **kwargs}
    own = all(given.get(name) is getattr(norm, name) for name in ("weight", "bias", "running_mean", "running_var"))
    return own and given["eps"] == norm.eps and given["training"] is (norm.training or norm.running_mean is None)


class _Step(nn.Module):
    """Replace a child of the watched module; returns a new tensor."""

    def __init__(self, name: str, watch: _Watch) -> None:
        super().__init__()
        self._name = name
        self._watch = watch

    def forward(self, value: Tensor) -> Tensor:
        watch = self._watch
        watch.strange |= value is not watch.current or not watch.normalised
        watch.tail.append(self._name)
        watch.current = None
        watch.current = torch.empty_like(value)
        return watch.current


def assume(model: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> Dataflow:
    """Assume that modules run in the order of registration, and that blocks of matching widths are residual.

    A block counts as residual if its convolutions end with as many channels as they start with, at the same
    resolution, or if one 1x1 convolution in addition to the others maps the block's input to its output. This is a
    guess: right for the usual residual and plain networks, proved for none. Nothing that must be exact may
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
    """Return main branch and shortcut of a block; None for containers and modules that hold a residual block."""
    if isinstance(block, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return None
    inner = [m for m in block.modules() if m is not block]
    if any(_residual(m) is not None for m in inner):
        return None
    every = [m for m in inner if isinstance(m, AnyConv)]
    normalised = [c for c in every if _width_behind(inner, c) == c.out_channels]  # leaves out squeeze-and-excitation
    return _split(inner, normalised) or _split(inner, every)


def _split(inner: list[nn.Module], convolutions: Sequence[AnyConv]) -> tuple[list[nn.Module], list[nn.Module]] | None:
    if len(convolutions) < 2:
        return None
    for projection in (convolutions[-1], convolutions[0]):
        others = [c for c in convolutions if c is not projection]
        if _projects(projection, others):
            return _without(inner, projection)
    same = convolutions[0].in_channels == convolutions[-1].out_channels and _stride(convolutions) == 1
    return (inner, []) if same and _fit(convolutions) else None


def _width_behind(modules: list[nn.Module], convolution: AnyConv) -> int | None:
    """Return the channels of the normalisation registered right after a convolution, if there is one."""
    behind = modules[modules.index(convolution) + 1 :][:1]
    return getattr(behind[0], "num_features", None) if behind else None


def _projects(candidate: AnyConv, others: Sequence[AnyConv]) -> bool:
    return (
        len(others) > 0
        and set(candidate.kernel_size) == {1}
        and candidate.in_channels == others[0].in_channels
        and candidate.out_channels == others[-1].out_channels
        and _stride([candidate]) == _stride(others)
        and _fit(others)
    )


def _without(modules: list[nn.Module], projection: AnyConv) -> tuple[list[nn.Module], list[nn.Module]]:
    """Remove a projection and the normalisation registered right after it from a block."""
    at = modules.index(projection)
    length = 2 if _width_behind(modules, projection) == projection.out_channels else 1
    return modules[:at] + modules[at + length :], modules[at : at + length]


def _fit(convolutions: Sequence[AnyConv]) -> bool:
    return all(a.out_channels == b.in_channels for a, b in pairwise(convolutions))


def _stride(convolutions: Sequence[AnyConv]) -> int:
    product = 1
    for convolution in convolutions:
        product *= convolution.stride[0]
    return product
