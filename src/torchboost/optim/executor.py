"""Run a chain of gradient transforms in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from torchboost.optim.gradients import Gradients, GradientTransform, namespaces
from torchboost.optim.memory_layout import writable

__all__ = ["Chain"]


class _Recalled(Gradients):
    """Gradients whose memory is looked up on first access; most transforms need none."""

    __slots__ = ("_recall",)

    def __init__(self, gradients: Gradients, recall: Callable[[], list[dict[str, Any]]]) -> None:
        self.params, self.grads, self.groups = gradients.params, gradients.grads, gradients.groups
        self.share = gradients.share
        self._recall = recall

    @property
    def memory(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._recall()


class Chain:
    """Transforms in order.

    Args:
        transforms: May be empty.
    """

    def __init__(self, transforms: Sequence[GradientTransform]) -> None:
        self.transforms = tuple(transforms)
        self._names = namespaces(self.transforms)

    def check(self, gradients: Gradients) -> list[Tensor]:
        """Run the ``check`` of every transform that has one, before any transform runs.

        Returns:
            The gradients, with stand-ins for entries whose layout a transform is going to change.
        """
        expected = Gradients(gradients.params, list(gradients.grads), gradients.groups, [], gradients.share)
        for transform in self.transforms:
            check = getattr(transform, "check", None)
            if check is not None:
                check(expected)
        return expected.grads

    def run(
        self,
        gradients: Gradients,
        recall: Callable[[str, Sequence[Tensor]], list[dict[str, Any]]],
    ) -> None:
        """Apply the transforms.

        Args:
            gradients: Changed; their ``memory`` is not used.
            recall: Returns the memory of a namespace for each parameter; the transform writes into these dictionaries.
        """
        gradients.grads = _separate(list(map(writable, gradients.grads)))
        for name, transform in zip(self._names, self.transforms, strict=True):
            own = _Recalled(gradients, partial(recall, name, gradients.params))
            transform(own)
            gradients.grads = own.grads


def _separate(grads: list[Tensor]) -> list[Tensor]:
    """Return the gradients, with copies of those that are in the list again, so that each is changed once."""
    if len(set(map(id, grads))) == len(grads):
        return grads
    first = dict(zip(map(id, reversed(grads)), reversed(range(len(grads))), strict=True))
    return [grad if first[id(grad)] == position else grad.clone() for position, grad in enumerate(grads)]
