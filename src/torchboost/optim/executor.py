"""Run a chain of gradient transforms: its first part in one pass over memory if it can be, the rest one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from torchboost.optim.gradient_pass import Pass
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
        self._first = Pass.of(self.transforms)

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
        *,
        hand_over: bool = False,
        grad_scale: float = 1.0,
    ) -> float:
        """Apply the transforms.

        Args:
            gradients: Changed; their ``memory`` is not used.
            recall: Returns the memory of a namespace for each parameter; the transform writes into these dictionaries.
            hand_over: Whether the caller can divide the gradients by a number in a later pass, as torch's fused
                kernels do.
            grad_scale: Loss scale that the gradients contain; other than 1 only if :meth:`takes_scale` says so.

        Returns:
            What is left for the caller to divide by; 1 without ``hand_over``.
        """
        gradients.grads = _separate(list(map(writable, gradients.grads)))
        first, done, left = self._first, 0, 1.0
        if first is not None and first.fits(gradients):
            done = first.length
            left = first.run(gradients, hand_over=hand_over and self._is_one_pass, grad_scale=grad_scale)
        for name, transform in zip(self._names[done:], self.transforms[done:], strict=True):
            own = _Recalled(gradients, partial(recall, name, gradients.params))
            transform(own)
            gradients.grads = own.grads
        return left

    def takes_scale(self, gradients: Gradients) -> bool:
        """Whether :meth:`run` can remove a loss scale on the way, so that all transforms see true gradients."""
        return self._first is not None and self._is_one_pass and self._first.fits(gradients)

    @property
    def _is_one_pass(self) -> bool:
        return self._first is not None and self._first.length == len(self.transforms)


def _separate(grads: list[Tensor]) -> list[Tensor]:
    """Return the gradients, with copies of those that are in the list again, so that each is changed once."""
    if len(set(map(id, grads))) == len(grads):
        return grads
    first = dict(zip(map(id, reversed(grads)), reversed(range(len(grads))), strict=True))
    return [grad if first[id(grad)] == position else grad.clone() for position, grad in enumerate(grads)]
