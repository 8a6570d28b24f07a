"""Gradient centralisation: gradients of weight matrices and kernels get zero mean per output row."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits, attach_each
from torchboost.core.torch_private import AnyConv
from torchboost.errors import warn_no_effect
from torchboost.graph.norms import NormalizedLinear
from torchboost.optim.pipeline import GradientPipeline
from torchboost.optim.transforms import Centralize, has_rows


def centralize_gradients(optimizer: Optimizer, *, skip: Collection[Tensor] = ()) -> Attachment:
    """Subtract from each kernel's gradient its mean over all but the first axis, before every step.

    ``g -= mean(g, axes 1...)`` for gradients with more than one entry per row (Yong et al., 2020). This keeps the sum
    of each filter's weights where it started, a mild regulariser that often improves generalisation of convolutional
    nets. Not changed: parameters with one axis, those with one entry per row, vectors such as ``(1, n, 1, 1)``, and
    param groups with ``"grad_centralization": False``. Cost: one read and one write of the gradients. Works with any
    optimizer. The result is the same if gradients are still scaled.

    Args:
        optimizer: The optimizer. A pre-hook of its ``step`` does the work.
        skip: Parameters to skip, such as those that :func:`depthwise_and_normalized` returns.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> attachment = centralize_gradients(optimizer)
        >>> attachment.remove()
    """
    return GradientPipeline(Centralize(skip=skip)).attach(optimizer)


_HOLDERS = (
    *(AnyConv, nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag),
    *(nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase),
)
"""Modules whose matrices and kernels have a filter, or an output, per row."""


def centralizable(param: Tensor, owner: nn.Module | None) -> bool:
    """Whether the gradient of ``param``, which ``owner`` holds, has row means worth removing.

    True for the kernels and matrices of torch's convolutions, linear layers, embeddings, attention and recurrent
    layers, unless their rows have no mean that may go (:func:`~torchboost.optim.transforms.has_rows`: fewer than two
    axes, one entry per row, or a vector). False for depthwise convolutions (one input channel per filter), for the
    ``NormalizedLinear`` head, and for parameters that other modules hold themselves: they may be a scale, a token or a
    table of positions. If the owner is not known, the shape decides. Names never do.
    """
    if owner is None:
        return has_rows(param)
    depthwise = isinstance(owner, AnyConv) and owner.groups > 1 and owner.groups == owner.in_channels
    return has_rows(param) and isinstance(owner, _HOLDERS) and not depthwise and not isinstance(owner, NormalizedLinear)


def depthwise_and_normalized(model: nn.Module) -> set[Tensor]:
    """Return the parameters of ``model`` that should not be centralised: not :func:`centralizable` for any owner."""
    held = [(param, module) for module in model.modules() for param in module.parameters(recurse=False)]
    chosen = {param for param, module in held if centralizable(param, module)}
    return {param for param, _ in held if param not in chosen}


@dataclass(frozen=True, kw_only=True)
class GradientCentralization(Algorithm):
    """Centralise the gradients of all kernels and weight matrices of the model. See :func:`centralize_gradients`.

    Not changed: :func:`depthwise_and_normalized`, and param groups with ``"grad_centralization": False``. Nothing is
    added to checkpoints.
    """

    name: ClassVar[str] = "gradient_centralization"
    traits: ClassVar[Traits] = Traits(order=40, withdrawn=3, each_optimizer=True)

    def attach(self, target: Target) -> Attachment:
        """Register a pre-hook of each optimizer's step. Warn if none holds a parameter to centralise."""
        skip = depthwise_and_normalized(target.model)
        groups = [group for optimizer in target.optimizers for group in optimizer.param_groups]
        held = [(param, group) for group in groups for param in group["params"]]
        centralize = Centralize(skip=skip)
        if not any(centralize.applies(param, group) for param, group in held):
            warn_no_effect(
                f"'{self.name}' found no kernel or weight matrix among the {len(held)} parameters of the optimizer, "
                "but for groups with 'grad_centralization': False."
            )
        return attach_each(target.optimizers, functools.partial(centralize_gradients, skip=skip))
