"""The roles of the BatchNorms in a network, their computation, and replacements for them: scaled weights, a head."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from torchboost.core.torch_private import (
    PADDING,
    POOLING,
    AnyBatchNorm,
    AnyConv,
    AnyTransposedConv,
    buffer_slots,
    child_slots,
    has_gradient_hooks,
    module_hooks,
    parameter_slots,
    share_attributes,
)
from torchboost.graph.flow import Dataflow, Node

_STOCK_NORMS = (AnyBatchNorm.forward, SyncBatchNorm.forward)
NORM_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def norm_tail(norm: nn.Module) -> tuple[str, ...] | None:
    """Name the modules inside a BatchNorm that its normalised values pass through, in order.

    For torch's own BatchNorm the result is ``()``. For a subclass that adds modules, such as dropout and an activation,
    it is their names, found by recording its ``forward`` in both modes on a tensor without data. None means that the
    computation is not known: its ``forward`` does something else, such as running a module twice, or the instance is
    customised (hooks, another ``forward``, parametrizations).

    Cost: nothing for torch's own classes, a few milliseconds for subclasses.
    """
    if not isinstance(norm, AnyBatchNorm) or is_customised(norm):
        return None
    if {*parameter_slots(norm), *buffer_slots(norm)} != {*NORM_TENSORS}:
        return None
    if type(norm).forward in _STOCK_NORMS:
        return ()
    modes = (False,) if isinstance(norm, SyncBatchNorm) else (False, True)  # training one asks for ranks and devices
    tails = {_watched_tail(norm, training) for training in modes}
    tail = tails.pop() if len(tails) == 1 else None
    return None if tail is None or len({child_slots(norm)[name] for name in tail}) < len(tail) else tail


def why_unknown(flow: Dataflow, norm: AnyBatchNorm) -> str | None:
    """Return why the computation of a BatchNorm, or its place in a data flow, is not known. None if both are."""
    calls = flow.calls(norm)
    if norm_tail(norm) is None:
        return f"{type(norm).__name__} has its own forward, or hooks"
    if flow.traced == "structure":
        return "the data flow could not be traced; pass an input as sample="
    if norm.running_mean is None or norm.running_var is None:
        return "it keeps no running statistics"
    if len(calls) != 1:
        return f"it is used {len(calls)} times" if calls else "the traced pass does not reach it"
    return None


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


WEIGHTED = (AnyConv, nn.Linear)
_TRANSPARENT = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_RESHAPING = (nn.Flatten, nn.Upsample, *PADDING)
_LINEAR_CALLS = frozenset(
    {"pad", "view", "reshape", "flatten", "permute", "transpose", "contiguous", "to", "clone", "dropout", "interpolate"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualBlock:
    """One residual addition.

    Args:
        paths: All nodes of each branch.
        mains: For every main branch its convolution and linear nodes, in execution order.
        norms: For every main branch its BatchNorm nodes, in execution order.
        shortcut_norms: BatchNorm nodes of the shortcuts.
        projects: Whether a shortcut changes its input, so that resolution or width may change here.
    """

    paths: tuple[frozenset[int], ...]
    mains: tuple[tuple[int, ...], ...]
    norms: tuple[tuple[int, ...], ...]
    shortcut_norms: tuple[int, ...]
    projects: bool


def was_trained(model: nn.Module) -> bool:
    """Whether any BatchNorm's statistics or counter differ from their initial values.

    One forward pass in training mode is enough. Values on the device ``meta`` and of lazy layers count as initial.
    """
    return any(isinstance(module, AnyBatchNorm) and _moved(module) for module in model.modules())


def _moved(norm: AnyBatchNorm) -> bool:
    mean, variance, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
    if mean is None or variance is None or mean.is_meta or is_lazy(mean):
        return False
    counted = count is not None and not count.is_meta and bool(count > 0)
    return counted or bool(mean.any()) or bool((variance != 1).any())


def residual_blocks(flow: Dataflow) -> list[ResidualBlock]:
    """Return the innermost residual blocks in execution order.

    A block is an addition whose inputs split at one fork, with at least one branch that has layers. The branch with the
    most weights is the main branch. Another branch counts as a shortcut if it has at most one layer with weights,
    otherwise as a second main branch. An addition around a smaller block (a long skip) is not a block.
    """
    blocks: list[ResidualBlock] = []
    joins: set[int] = set()
    for node in flow.nodes:
        branches = flow.branches(node.index) if node.kind == "add" else None
        if branches is None or any(joins & path for path in branches.paths):
            continue
        layers = [_of(flow, path, WEIGHTED) for path in branches.paths]
        sizes = [(len(of), sum(_weights(flow.nodes[index]) for index in of)) for of in layers]
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        if not layers[largest]:
            continue
        mains = [at for at, of in enumerate(layers) if at == largest or len(of) > 1]
        shortcuts = [path for at, path in enumerate(branches.paths) if at not in mains]
        carried = [all(isinstance(flow.nodes[index].module, _TRANSPARENT) for index in path) for path in shortcuts]
        blocks.append(
            ResidualBlock(
                paths=branches.paths,
                mains=tuple(layers[at] for at in mains),
                norms=tuple(_of(flow, branches.paths[at], AnyBatchNorm) for at in mains),
                shortcut_norms=tuple(sorted(index for path in shortcuts for index in _of(flow, path, AnyBatchNorm))),
                projects=not shortcuts or not all(carried),
            )
        )
        joins.add(node.index)
    return blocks


def _of(flow: Dataflow, path: frozenset[int], kind: type | tuple[type, ...]) -> tuple[int, ...]:
    return tuple(index for index in sorted(path) if isinstance(flow.nodes[index].module, kind))


def _weights(node: Node) -> int:
    return 0 if node.module is None else sum(p.numel() for p in node.module.parameters())


def plain_stacks(flow: Dataflow, blocks: list[ResidualBlock]) -> Iterator[tuple[list[int | None], bool]]:
    """Yield the runs of layers with weights outside residual blocks.

    Layers belong to one run if the output of each reaches only the next, through activations, pooling, flattening and
    gates (squeeze-and-excitation). A run also ends after a BatchNorm that no activation follows, which is the end of an
    inverted residual without skip.

    Yields:
        For every layer the BatchNorm node directly after it, or None, and whether the last BatchNorm feeds a layer or
        an addition without an activation in between, so that the run is one block.
    """
    onwards = _onwards(flow)
    in_block = {index for block in blocks for path in block.paths for index in path}
    free = [n.index for n in flow.instances(WEIGHTED) if n.index not in in_block]
    following = {index: _next_layer(flow, index, onwards) for index in free}
    followers = set(following.values())
    for start in free:
        if start in followers:
            continue
        norms: list[int | None] = []
        layer: int | None = start
        while layer is not None and layer not in in_block:
            norms.append(_norm_behind(flow, layer))
            linear, layer = _ends_linearly(flow, norms[-1]), following[layer]
            if linear or layer is None or layer in in_block:
                yield norms, linear
                norms = []


def _onwards(flow: Dataflow) -> list[int | None]:
    """Return for every node the single node that uses its output. Gates around it are skipped."""
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


def _norm_behind(flow: Dataflow, layer: int) -> int | None:
    consumers = flow.consumers[layer]
    return consumers[0] if len(consumers) == 1 and isinstance(flow.nodes[consumers[0]].module, AnyBatchNorm) else None


def _ends_linearly(flow: Dataflow, norm: int | None) -> bool:
    if norm is None:
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
        moving = (*_TRANSPARENT, *_RESHAPING, *POOLING)  # or dropping values, but no activation
        if node.label in _LINEAR_CALLS if node.module is None else isinstance(node.module, moving):
            waiting += flow.consumers[node.index]
    return False


_ONE_SIDED = frozenset(
    {"relu", "relu_", "relu6", "silu", "gelu", "hardswish", "mish", "elu", "celu", "leakyrelu", "leaky_relu", "prelu"}
)


@torch.no_grad()
def rescale_layers(flow: Dataflow, targets: Mapping[int, float], removed: Collection[int] = ()) -> list[nn.Module]:
    """Scale weights by one factor per layer, so that layer outputs have a given mean square.

    Mean and variance are propagated from the input, where they are 0 and 1. A layer gives mean 0 and its input's mean
    square times ``mean_filter(sum w^2)`` (weights are drawn independently with mean zero). A BatchNorm gives the
    moments of its scale and shift, an addition sums both, and a one-sided activation such as ReLU gives the moments of
    a rectified normal variable. Other operations change nothing. No data is needed, so all ranks get the same weights.
    Limits: this is an estimate, and correlations between branches are ignored.

    Args:
        flow: The data flow.
        targets: Node of a layer -> mean square of its output without the bias.
        removed: BatchNorm nodes that are about to become the identity.

    Returns:
        The layers that were changed, in execution order.
    """
    known: list[_Moments] = []
    changed: list[nn.Module] = []
    for node in flow.nodes:
        moments = _joined(node, [known[source] for source in node.inputs])
        module = node.module
        weight = parameter_slots(module).get("weight") if isinstance(module, WEIGHTED) else None
        if module is not None and weight is not None:
            square = moments.square * _gain(module, weight)
            target = targets.get(node.index)
            if target is not None and square > 0:
                weight.mul_((target / square) ** 0.5)
                changed.append(module)
                square = target
            moments = _Moments(0.0, square)
        elif isinstance(module, AnyBatchNorm):
            moments = moments if node.index in removed else _of_norm(module)
            if any(_is_one_sided(type(module.get_submodule(name)).__name__) for name in norm_tail(module) or ()):
                moments = _rectified(moments)
        elif _is_one_sided(node.label if node.module is None else type(node.module).__name__):
            moments = _rectified(moments)
        known.append(moments)
    return changed


class _Moments(NamedTuple):
    mean: float
    variance: float

    @property
    def square(self) -> float:
        return self.mean**2 + self.variance


def _joined(node: Node, incoming: list[_Moments]) -> _Moments:
    if node.kind == "add":
        return _Moments(sum(m.mean for m in incoming), sum(m.variance for m in incoming))
    return max(incoming, key=lambda m: m.square, default=_Moments(0.0, 1.0))


def _rectified(moments: _Moments) -> _Moments:
    """Return the moments of ``max(x, 0)`` for a normal ``x``."""
    mean, deviation = moments.mean, moments.variance**0.5
    if not deviation:
        return moments
    ratio = mean / deviation
    above = (1 + math.erf(ratio / math.sqrt(2))) / 2  # probability of x > 0
    density = math.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)
    rectified = mean * above + deviation * density
    square = moments.square * above + mean * deviation * density
    return _Moments(rectified, max(square - rectified**2, 0.0))


def _gain(layer: nn.Module, weight: Tensor) -> float:
    if weight.is_meta:
        return 0.0
    total = float(weight.float().square().sum())
    if isinstance(layer, AnyTransposedConv):  # a stride spreads every input over fewer outputs
        for stride in layer.stride:
            total /= stride
        return total / layer.out_channels
    return total / weight.shape[0]


def _of_norm(norm: AnyBatchNorm) -> _Moments:
    if norm.weight is None or norm.weight.is_meta:
        return _Moments(0.0, 1.0)
    mean, spread = float(norm.bias.float().mean()), float(norm.bias.float().var(correction=0))
    return _Moments(mean, float(norm.weight.float().square().mean()) + spread)


def _is_one_sided(name: str) -> bool:
    return name.lower() in _ONE_SIDED


class NormalizedLinear(nn.Module):
    """A last layer whose logits depend only on directions: ``multiplier * (x/|x| (w/|w|)^T + bias)``.

    Input rows and weight rows are L2-normalised, so the logits are bounded and need no normalisation layer before them.
    ``multiplier`` is a trainable factor of shape ``(1,)`` (FSDP2 shards no scalars). Norms below 0.01 count as 0.01.
    Cost: one more pass over input and weight.

    Args:
        linear: The layer whose weight and bias this one takes over. No random number is drawn.
        multiplier: Its start value.
    """

    __constants__ = ("smallest_norm",)
    smallest_norm = 1e-2

    if TYPE_CHECKING:  # TorchScript reads class annotations and does not accept strings
        bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, multiplier: float = 1.0) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.multiplier = nn.Parameter(linear.weight.new_full((1,), multiplier))
        self.training = linear.training

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        smallest = self.smallest_norm
        cosines = F.linear(F.normalize(x, dim=-1, eps=smallest), F.normalize(self.weight, dim=-1, eps=smallest))
        return self.multiplier * (cosines if self.bias is None else cosines + self.bias)

    def extra_repr(self) -> str:
        """Return the sizes, for ``repr``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
