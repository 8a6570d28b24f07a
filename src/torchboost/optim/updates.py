"""Transforms of updates: what happens between a rule and the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from torchboost.core.arguments import check_number
from torchboost.core.torch_private import foreach, foreach_norm

__all__ = [
    "AddDecay",
    "Cautious",
    "ScaleByTrustRatio",
    "UpdateTransform",
    "Updates",
    "check_update_transforms",
    "together",
]


@dataclass(slots=True)
class Updates:
    """The updates of some parameters of one group, as parallel lists, before they are subtracted times the rate.

    Args:
        params: The parameters, or their float32 masters, before the update.
        updates: Change them in place, or replace them.
        grads: The gradients that the rule used.
        group: The param group.
        measured: What :class:`ScaleByTrustRatio` takes the norm of; None for the updates themselves.
    """

    params: Sequence[Tensor]
    updates: list[Tensor]
    grads: Sequence[Tensor]
    group: dict[str, Any]
    measured: list[Tensor] | None = None


class UpdateTransform(Protocol):
    """One transform of the updates of a group, called under ``no_grad`` with a few parameters at a time."""

    def __call__(self, updates: Updates) -> None:
        """Change ``updates``."""
        ...


@dataclass(frozen=True)
class AddDecay:
    """Add ``weight_decay * w`` to the updates, so that later transforms see the decay.

    Args:
        weight_decay: At least 0; None takes that of the param group, for rules that do not decay weights themselves.

    Raises:
        TypeError: Not a number.
        ValueError: Negative or not finite.
    """

    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if self.weight_decay is not None:
            check_number("weight_decay", self.weight_decay)

    def __call__(self, updates: Updates) -> None:
        """Add in place."""
        decay = float(updates.group["weight_decay"] if self.weight_decay is None else self.weight_decay)
        for changed in (updates.updates, updates.measured):
            if decay and changed is not None:
                foreach.add_(changed, updates.params, alpha=decay)


@dataclass(frozen=True, kw_only=True)
class ScaleByTrustRatio:
    """Scale each update to the size of its weights: ``u *= min(|w| / |u|, max_ratio)``, as LAMB does.

    If ``|w|`` or ``|u|`` is 0, the update stays. Groups with ``adapt=False`` are skipped.
    Cost: one read of weights and updates for the norms, and one read and write of the updates.

    Source: Y. You et al., "Large Batch Optimization for Deep Learning", arXiv 1904.00962, algorithm 2.

    Args:
        max_ratio: Largest ratio, at least 0; None takes that of the param group.

    Raises:
        TypeError: Not a number.
        ValueError: Negative or not finite.
    """

    max_ratio: float | None = 10.0

    def __post_init__(self) -> None:
        if self.max_ratio is not None:
            check_number("max_ratio", self.max_ratio)

    def __call__(self, updates: Updates) -> None:
        """Scale in place."""
        if not updates.group.get("adapt", True):
            return
        most = updates.group["max_ratio"] if self.max_ratio is None else self.max_ratio
        measured = updates.updates if updates.measured is None else updates.measured
        ratios = together(partial(_ratio, most=float(most)), foreach_norm(updates.params), foreach_norm(measured))
        foreach.mul_(updates.updates, ratios)


@dataclass(frozen=True)
class Cautious:
    """Leave out entries of an update that point against the gradient, and enlarge the others to make up for them.

    The updates are multiplied by ``mask / mean(mask)``, of which the mean is at least ``least``.
    Cost: two reads of updates and gradients, and one write of the updates.

    Source: K. Liang et al., "Cautious Optimizers: Improving Training with One Line of Code", arXiv 2411.16085.

    Args:
        least: Smallest mean that is divided by, above 0.

    Raises:
        TypeError: Not a number.
        ValueError: Not above 0, or not finite.
    """

    least: float = 1e-3

    def __post_init__(self) -> None:
        check_number("least", self.least, above=True)

    def __call__(self, updates: Updates) -> None:
        """Mask in place."""
        for update, grad in zip(updates.updates, updates.grads, strict=True):
            mask = (update * grad > 0).to(update.dtype)
            update.mul_(mask).div_(mask.mean().clamp(min=self.least))


def check_update_transforms(transforms: Iterable[UpdateTransform]) -> None:
    """Refuse objects that are not transforms.

    Raises:
        TypeError: Something is not a transform.
    """
    for transform in transforms:
        if isinstance(transform, type):
            raise TypeError(f"found the class {transform.__name__}; give an instance: {transform.__name__}(...).")
        if not callable(transform):
            raise TypeError(f"found {transform!r}; a transform of updates must be callable with Updates.")


def _ratio(size: Tensor, steepness: Tensor, most: float) -> Tensor:
    usable = (size > 0) & (steepness > 0)
    return torch.where(usable, (size / steepness).clamp(max=most), torch.ones_like(size))


def together(function: Callable[..., Tensor], *lists: Sequence[Tensor]) -> list[Tensor]:
    """Apply an elementwise function to lists of scalars, in a few operations instead of a few per scalar.

    Args:
        function: Elementwise; given tensors of equal shape, returns one of that shape.
        lists: Tensors of shape ``()``; all lists have the same length.

    Returns:
        Tensors of shape ``()``. Scalars that differ in type, device or precision are processed one by one.
    """
    kinds = {(type(number), number.device, number.dtype) for numbers in lists for number in numbers}
    if [kind for kind, _, _ in kinds] == [Tensor]:
        return list(function(*(torch.stack(list(numbers)) for numbers in lists)).unbind())
    return [function(*numbers) for numbers in zip(*lists, strict=True)]
