"""Transforms of gradients, run in order before each step of any optimizer, by its hooks."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchboost.core.algorithm import Attachment
from torchboost.core.arguments import check_optimizer
from torchboost.core.step import ClosureOptimizer, Replay, after_closure
from torchboost.core.torch_private import foreach, versions
from torchboost.core.wrapping import hookable
from torchboost.errors import IncompatibleError
from torchboost.optim.tensors import forget_scale, values_of, writable


@dataclass(slots=True)
class Gradients:
    """All gradients of one step, as parallel lists across all groups: of each parameter that has one.

    If the shape of a gradient does not change, change it in place, because it may be a view into a communication
    bucket. An entry that is replaced becomes the parameter's ``.grad``.
    """

    params: list[Tensor]
    grads: list[Tensor]
    groups: list[dict[str, Any]]


class GradientTransform(Protocol):
    """One transform of a pipeline, called once per step under ``no_grad``.

    ``scale_free`` says whether the transform has the same effect if the gradients still contain the loss scale: True
    for linear maps of the gradient, False if the gradient is compared with another quantity.

    A transform that compares parameters with each other, such as :class:`~torchboost.optim.ClipNorm`, has
    ``joint = True``. An optimizer that holds a part of the parameters only refuses it.

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


class GradientPipeline:
    """Apply transforms to the gradients right before each step of any optimizer, fused ones included.

    Transforms run in the given order, once per step. With a closure they run after each closure call that made new
    gradients, and never before, so ``step(closure)`` equals ``closure(); step()``, with accumulation too. An optimizer
    that uses gradients before it calls the closure, as some forms of SAM do, uses them untransformed.
    If ``GradScaler`` does not unscale the gradients of a fused optimizer, and a transform needs true gradients, the
    pipeline divides by the loss scale, which costs one read and one write.
    Cost: one pass over the parameter list in Python (about 0.5 microseconds per parameter) plus the transforms.
    ``copy.deepcopy(optimizer)`` drops hooks, so attach the pipeline to the copy again.

    Example:
        >>> from torchboost.optim import Centralize, ClipNorm
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        >>> attachment = GradientPipeline(Centralize(), ClipNorm(1.0)).attach(optimizer)

    Raises:
        TypeError: Something is not a transform.
        ValueError: No transform was given.
    """

    def __init__(self, *transforms: GradientTransform) -> None:
        if not transforms:
            raise ValueError("the pipeline has no transform; give at least one, such as Centralize().")
        check_transforms(transforms)
        self.transforms = transforms

    def __repr__(self) -> str:
        return f"GradientPipeline({', '.join(map(repr, self.transforms))})"

    def attach(self, optimizer: Optimizer) -> Attachment:
        """Run the transforms before ``optimizer.step``. Several pipelines run in the order of their attachment.

        Raises:
            TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.
            IncompatibleError: It neither calls step hooks nor wraps another optimizer.
        """
        check_optimizer(optimizer)
        return _Attached(hookable(optimizer), self.transforms)


class _Attached(Attachment):
    """A pipeline attached to one optimizer."""

    def __init__(self, optimizer: Optimizer, transforms: tuple[GradientTransform, ...]) -> None:
        self._optimizer = optimizer
        self._transforms = transforms
        self._seen: list[tuple[weakref.ref[Tensor], int]] = []
        self._inside = 0  # steps under way: a step that calls the step of its base class runs the hooks twice
        self._nests = _has_nested_steps(type(optimizer))
        super().__init__(
            optimizer.register_step_pre_hook(self._before_step), optimizer.register_step_post_hook(self._after_step)
        )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Transform the gradients, after a closure and never before it: one that accumulates adds to existing ones."""
        if self._nests and self._inside and self._seen and self._is_as_left():
            self._inside += 1
            return None
        self._inside = 1
        has_closure = kwargs.get("closure") is not None or any(callable(value) for value in args[1:])
        if not (has_closure and isinstance(optimizer, ClosureOptimizer)):
            return after_closure(args, kwargs, self._apply_if_new if has_closure else self._apply)
        # It reads the gradients first, and then calls the closure for its loss.
        closure = kwargs.get("closure", args[-1])
        if not isinstance(closure, Replay) or closure.loss is None:
            names = ", ".join(type(transform).__name__ for transform in self._transforms)
            raise IncompatibleError(
                f"{type(optimizer).__name__}.step(closure) runs the backward pass itself, so "
                f"{names} cannot reach the gradients. Use TrainStep, or remove the pipeline."
            )
        self._apply()
        return None

    def _after_step(self, *_: Any) -> None:
        self._inside = max(0, self._inside - 1)

    def _apply_if_new(self) -> None:
        """Transform unless these gradients are changed already, as when a closure did not renew them."""
        if not self._is_as_left():
            self._apply()
            self._remember()

    def _is_as_left(self) -> bool:
        """Whether the transforms changed these gradients last."""
        grads = self._gradients().grads
        return len(grads) == len(self._seen) and all(
            seen() is grad and version == now
            for grad, now, (seen, version) in zip(grads, versions(grads), self._seen, strict=True)
        )

    def _remember(self) -> None:
        grads = self._gradients().grads
        self._seen = list(zip(map(weakref.ref, grads), versions(grads), strict=True))

    def _gradients(self) -> Gradients:
        gradients = Gradients([], [], [])
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    gradients.params.append(param)
                    gradients.grads.append(param.grad)
                    gradients.groups.append(group)
        return gradients

    def _apply(self) -> None:
        gradients = self._gradients()
        before = list(gradients.grads)
        try:
            with torch.no_grad():
                check_gradients(self._transforms, gradients)
                self._unscale(gradients)
                transform_gradients(self._transforms, gradients)
        except BaseException:
            forget_scale(self._optimizer)
            raise
        for param, old, new in zip(gradients.params, before, gradients.grads, strict=True):
            if new is not old:
                param.grad = new
        if self._nests:
            self._remember()

    def _unscale(self, gradients: Gradients) -> None:
        """Divide by the loss scale that ``GradScaler`` gives a fused kernel, if a transform needs true gradients."""
        optimizer: Any = self._optimizer
        scale = getattr(optimizer, "grad_scale", None)
        if scale is None or not gradients.grads or all(transform.scale_free for transform in self._transforms):
            return
        gradients.grads = _separate(gradients.grads)
        foreach.mul_(list(map(values_of, gradients.grads)), 1.0 / float(scale))
        optimizer.grad_scale = torch.ones_like(scale)


def check_transforms(transforms: Iterable[object]) -> None:
    """Refuse objects that are not transforms."""
    for transform in transforms:
        if isinstance(transform, type):
            raise TypeError(f"found the class {transform.__name__}; give an instance: {transform.__name__}(...).")
        if not callable(transform) or not isinstance(getattr(transform, "scale_free", None), bool):
            raise TypeError(
                f"found {transform!r}; a transform must be callable with Gradients and have a boolean 'scale_free'."
            )


def check_gradients(transforms: Iterable[GradientTransform], gradients: Gradients) -> list[Tensor]:
    """Run the ``check`` of every transform that has one, and return the gradients with the stand-ins of these."""
    expected = Gradients(gradients.params, list(gradients.grads), gradients.groups)
    for transform in transforms:
        check = getattr(transform, "check", None)
        if check is not None:
            check(expected)
    return expected.grads


def transform_gradients(transforms: Iterable[GradientTransform], gradients: Gradients) -> None:
    """Apply transforms in order."""
    gradients.grads = _separate(gradients.grads)
    for transform in transforms:
        transform(gradients)


def refuse_sparse(transform: object, gradients: Gradients) -> None:
    """Refuse sparse gradients before anything is changed."""
    for param, grad in zip(gradients.params, gradients.grads, strict=True):
        if grad.layout is not torch.strided:
            raise IncompatibleError(
                f"{type(transform).__name__} needs dense gradients, found layout {grad.layout} for a parameter of "
                f"shape {tuple(param.shape)}. Use sparse=False, or give the parameter a separate optimizer."
            )


def _separate(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients that can be changed in place, with copies of repeated entries."""
    grads = list(map(writable, grads))
    if len(set(map(id, grads))) == len(grads):
        return grads
    first = dict(zip(map(id, reversed(grads)), reversed(range(len(grads))), strict=True))
    return [grad if first[id(grad)] == position else grad.clone() for position, grad in enumerate(grads)]


def _has_nested_steps(kind: type) -> bool:
    """Whether the step of a class may call its base class's step. torch's own wrappers of one step do not count."""
    classes = [base for base in kind.__mro__ if base is not Optimizer]
    return len({inspect.unwrap(vars(base)["step"]) for base in classes if "step" in vars(base)}) > 1
