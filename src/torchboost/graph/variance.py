"""Estimate the size of activations in an untrained network along its data flow."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchboost.core.torch_private import AnyBatchNorm, AnyTransposedConv, parameter_slots
from torchboost.graph.flow import Dataflow, Node
from torchboost.graph.norm_roles import WEIGHTED
from torchboost.graph.structure import norm_tail

__all__ = ["rescale_layers"]

_ONE_SIDED = frozenset(
    {"relu", "relu_", "relu6", "silu", "gelu", "hardswish", "mish", "elu", "celu", "leakyrelu", "leaky_relu", "prelu"}
)


@torch.no_grad()
def rescale_layers(flow: Dataflow, targets: Mapping[int, float], removed: Collection[int] = ()) -> list[nn.Module]:
    """Scale weights by one factor per layer, so that layer outputs have a given mean square.

    Mean and variance are propagated from the input, where they are 0 and 1. A layer gives mean 0 and its input's mean
    square times ``mean_filter(sum w^2)`` (weights are drawn independently with mean zero). A BatchNorm gives those of
    its scale and shift, an addition sums both, and a one-sided activation such as ReLU gives those of a rectified
    normal variable; other operations change nothing. No data is needed, so all ranks get the same weights. Limits:
    this is an estimate, and correlations between branches are ignored.

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
