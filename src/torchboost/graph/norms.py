"""The roles of the BatchNorms in a network, their computation, and replacements for them: scaled weights, a head."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.nn.parameter import is_lazy

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
)
from torchboost.graph.flow import Dataflow, Node

__all__ = [
    "WEIGHTED",
    "NormalizedLinear",
    "ResidualBlock",
    "is_customised",
    "norm_tail",
    "plain_stacks",
    "rescale_layers",
    "residual_blocks",
    "was_trained",
]

_STOCK_NORMS = (AnyBatchNorm.forward, SyncBatchNorm.forward)
_STATE = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def norm_tail(norm: nn.Module) -> tuple[str, ...] | None:
    """Name the modules inside a BatchNorm that its normalised values pass through, in order.

    For torch's own BatchNorm the result is ``()``. For a subclass that adds modules, such as dropout and an activation,
    it is their names, found by running a copy in both modes on random numbers. None means that the computation is not
    known: its ``forward`` returns something else, or runs a module twice, or the instance is customised (hooks, another
    ``forward``, parametrizations).

    Cost: nothing for torch's own classes, a few milliseconds for subclasses.
    """
    if not isinstance(norm, AnyBatchNorm) or is_customised(norm):
        return None
    if {*parameter_slots(norm), *buffer_slots(norm)} != _STATE:
        return None
    if type(norm).forward in _STOCK_NORMS:
        return ()
    modes = (False,) if isinstance(norm, SyncBatchNorm) else (False, True)  # training one asks for ranks and devices
    try:
        copied = copy.deepcopy(norm).to_empty(device="cpu").float()
    except Exception:  # attributes of the user's modules may raise anything
        return None
    tails = {_tail_in_a_run(copied, training) for training in modes}
    tail = tails.pop() if len(tails) == 1 else None
    return None if tail is None or len({child_slots(norm)[name] for name in tail}) < len(tail) else tail


def is_customised(module: nn.Module) -> bool:
    """Whether a call does more than the class's ``forward``: hooks, an instance's ``forward``, parametrizations."""
    watched = any(p is not None and has_gradient_hooks(p) for p in parameter_slots(module).values())
    called = type(module).__call__ is not nn.Module.__call__
    set_on_it = "forward" in vars(module) or "parametrizations" in child_slots(module)
    return any(module_hooks(module)) or watched or called or set_on_it


def _tail_in_a_run(norm: AnyBatchNorm, training: bool) -> tuple[str, ...] | None:
    """Run a norm with random numbers. Return the children that ran, if nothing else did."""
    called: list[str] = []
    for name, child in norm.named_children():
        child.register_forward_hook(lambda *_, name=name: called.append(name))
    norm.train(training)
    for sides in (2, 1, 3, 0):
        called.clear()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for tensor in (*norm.parameters(), *norm.buffers()):
                tensor.copy_(torch.rand(tensor.shape, device="cpu") + 0.5)
            given = torch.randn(4, norm.num_features, *[2] * sides, device="cpu")
            mean, variance = (None if b is None else b.clone() for b in (norm.running_mean, norm.running_var))
            draws = torch.get_rng_state()
            try:
                output = norm.forward(given.clone())
            except Exception:  # another number of dimensions, or any error from the forward of a subclass
                continue
            tail, learns = tuple(called), training or mean is None
            torch.set_rng_state(draws)
            expected = F.batch_norm(given, mean, variance, norm.weight, norm.bias, learns, 0.0, norm.eps)
            for name in tail:
                expected = norm.get_submodule(name)(expected)
        return tail if isinstance(output, Tensor) and torch.equal(output, expected) else None
    return None


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
