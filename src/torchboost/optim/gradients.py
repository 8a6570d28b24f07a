"""The gradients of one step, what a transform of them is, and how each transform names its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchboost.errors import IncompatibleError
from torchboost.optim.shares import Share

__all__ = ["GradientTransform", "Gradients", "by_namespace", "check_transforms", "namespaces", "refuse_sparse"]


@dataclass(slots=True)
class Gradients:
    """All gradients of one step, as parallel lists across all groups.

    Parameters without a gradient are not included.

    Args:
        params: The parameters.
        grads: Their gradients. If the shape does not change, change an entry in place, because it may be a view into a
            communication bucket. An entry that is replaced becomes the parameter's ``.grad``.
        groups: The param group of each parameter.
        memory: What this transform keeps per parameter between steps: tensors and plain numbers under string keys of
            its choice. Not shared with other transforms; saved with the optimizer.
        share: If these are one rank's share of the parameters, the ranks that share them; for transforms that look
            across parameters. A transform that calls ``share.exchange`` has an attribute ``collectives``, the number
            of calls per step.
    """

    params: list[Tensor]
    grads: list[Tensor]
    groups: list[dict[str, Any]]
    memory: list[dict[str, Any]]
    share: Share | None = None


class GradientTransform(Protocol):
    """One transform of the chain, called once per step under ``no_grad``.

    ``scale_free`` says whether the transform has the same effect if the gradients still contain the loss scale: True
    for linear maps of the gradient, False if the gradient is compared with another quantity.

    A transform may have a second method, ``check(gradients)``, which raises if the transform cannot be applied. All
    checks run before the first transform, so a step that raises does not change the gradients. A check must not change
    tensors. If the transform is going to change the layout of an entry, its check puts a stand-in of the new layout
    into the list.
    """

    @property
    def scale_free(self) -> bool:
        """Whether scaling the gradients before or after makes no difference."""
        ...

    def __call__(self, gradients: Gradients) -> None:
        """Change ``gradients`` in place."""
        ...


def check_transforms(transforms: Iterable[GradientTransform]) -> None:
    """Refuse objects that are not transforms.

    Raises:
        TypeError: Something is not a transform.
    """
    for transform in transforms:
        if isinstance(transform, type):
            raise TypeError(f"found the class {transform.__name__}; give an instance: {transform.__name__}(...).")
        if not callable(transform) or not isinstance(getattr(transform, "scale_free", None), bool):
            raise TypeError(
                f"found {transform!r}; a transform must be callable with Gradients and have a boolean 'scale_free'."
            )


def namespaces(transforms: Iterable[GradientTransform]) -> list[str]:
    """Name the memory of each transform after its class; the second of a class is ``Name#2``."""
    names: list[str] = []
    for transform in transforms:
        name = type(transform).__name__
        earlier = sum(own.partition("#")[0] == name for own in names)
        names.append(f"{name}#{earlier + 1}" if earlier else name)
    return names


def by_namespace(entry: Mapping[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """Split the entries ``"Name.key"`` of a checkpoint by transform.

    Older checkpoints have ``"key"`` alone, which all transforms of a chain shared; each transform gets it.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, value in entry.items():
        name, dot, rest = key.partition(".")
        known = dot and name in names
        for owner in (name,) if known else names:
            found.setdefault(owner, {})[rest if known else key] = value
    return found


def refuse_sparse(transform: object, gradients: Gradients) -> None:
    """Refuse sparse gradients before anything is changed.

    Raises:
        IncompatibleError: A gradient is sparse.
    """
    for param, grad in zip(gradients.params, gradients.grads, strict=True):
        if grad.layout is not torch.strided:
            raise IncompatibleError(
                f"{type(transform).__name__} needs dense gradients, found layout {grad.layout} for a parameter of "
                f"shape {tuple(param.shape)}. Use sparse=False, or give the parameter a separate optimizer."
            )
