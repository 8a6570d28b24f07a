"""The size of activations in an untrained network, followed through its data flow."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd

from torchboost.core.flow import Dataflow, Node
from torchboost.core.norm_roles import WEIGHTED

__all__ = ["rescale_layers"]

_ONE_SIDED = frozenset(
    {"relu", "relu_", "relu6", "silu", "gelu", "hardswish", "mish", "elu", "celu", "leakyrelu", "leaky_relu", "prelu"}
)


@torch.no_grad()
def rescale_layers(flow: Dataflow, targets: Mapping[int, float], removed: Collection[int] = ()) -> list[nn.Module]:
    """Scale weights, by one number per layer, so that layers put out activations of a given mean square.

    The mean square is followed from the input, taken as 1: times ``mean_filter(sum w^2)`` through a layer (weights
    are drawn independently with mean zero), half behind a one-sided activation such as ReLU, that of scale and
    shift behind a BatchNorm, summed by an addition, unchanged by anything else. No data is needed, so all ranks
    get the same weights. Limits: an estimate; correlations between branches are left out.

    Args:
        flow: The data flow.
        targets: Node of a layer -> mean square that its output should have, biases aside.
        removed: BatchNorm nodes that are about to become the identity.

    Returns:
        The layers that were changed, in execution order.
    """
    squares: list[float] = []
    changed: list[nn.Module] = []
    for node in flow.nodes:
        incoming = [squares[source] for source in node.inputs]
        square = sum(incoming) if node.kind == "add" else max(incoming, default=1.0)
        module = node.module
        if isinstance(module, WEIGHTED) and isinstance(module._parameters.get("weight"), nn.Parameter):
            square *= _gain(module)
            target = targets.get(node.index)
            if target is not None and square > 0:
                module._parameters["weight"].mul_((target / square) ** 0.5)  # pyright: ignore[reportOptionalMemberAccess]
                changed.append(module)
                square = target
        elif isinstance(module, _BatchNorm):
            square = square if node.index in removed else _of_norm(module)
        elif _is_one_sided(node):
            square /= 2
        squares.append(square)
    return changed


def _gain(layer: nn.Module) -> float:
    weight = layer._parameters["weight"]
    assert weight is not None
    if weight.is_meta:
        return 0.0
    total = float(weight.float().square().sum())
    if isinstance(layer, _ConvTransposeNd):  # a stride spreads every input over fewer outputs
        for stride in layer.stride:
            total /= stride
        return total / layer.out_channels
    return total / weight.shape[0]


def _of_norm(norm: _BatchNorm) -> float:
    square = 1.0
    if norm.weight is not None and not norm.weight.is_meta:
        square = float(norm.weight.float().square().mean()) + float(norm.bias.float().square().mean())
    return square


def _is_one_sided(node: Node) -> bool:
    return (node.label if node.module is None else type(node.module).__name__).lower() in _ONE_SIDED
