"""A chain of gradient transforms that runs before each step of any optimizer.

The chain uses the hooks of ``torch.optim.Optimizer``: a step pre-hook changes the gradients, and state-dict hooks save
the memory of the transforms. The optimizer object, its groups and its state are not changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchboost.core.algorithm import Attachment
from torchboost.core.arguments import check_optimizer
from torchboost.core.closure import ClosureOptimizer, Replay, after_closure
from torchboost.core.torch_private import versions
from torchboost.core.wrapping import hookable
from torchboost.errors import IncompatibleError
from torchboost.optim.memory_layout import writable
from torchboost.optim.shares import Share

__all__ = [
    "GradientPipeline",
    "GradientTransform",
    "Gradients",
    "PipelineAttachment",
    "check_transforms",
    "refuse_sparse",
]

STATE_KEY = "torchboost_gradient_pipelines"

Memories = dict[str, dict[Tensor, dict[str, Any]]]
"""Memory of each transform, by its namespace and by parameter."""


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


class GradientPipeline:
    """Apply transforms to the gradients right before each step of any optimizer, fused ones included.

    Transforms run in the given order, once per step. With a closure they run after each closure call that made new
    gradients, and never before, so ``step(closure)`` equals ``closure(); step()``, with accumulation too. An optimizer
    that uses gradients before it calls the closure, as some forms of SAM do, uses them untransformed.
    Cost: one pass over the parameter list in Python (about 0.2 microseconds per parameter) plus the transforms.
    ``copy.deepcopy(optimizer)`` drops hooks, so attach the pipeline to the copy again.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        >>> attachment = GradientPipeline(Centralize(), ClipNorm(1.0)).attach(optimizer)

    Args:
        *transforms: At least one.

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

    def attach(self, optimizer: Optimizer) -> PipelineAttachment:
        """Run the chain before ``optimizer.step``; several chains run in the order in which they were attached.

        Raises:
            TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.
            IncompatibleError: It neither calls step hooks nor wraps another optimizer.
        """
        check_optimizer(optimizer)
        return PipelineAttachment(hookable(optimizer), self.transforms)


class PipelineAttachment(Attachment):
    """A pipeline attached to one optimizer, with its memory.

    The memory is saved in ``optimizer.state_dict()`` under one extra key, which is absent while the memory is empty.
    An optimizer without the pipeline can load such a file; from a file without the key the pipeline starts with an
    empty memory. Distributed checkpointing drops the key: use the ``state_dict`` of this object there.
    """

    def __init__(self, optimizer: Optimizer, transforms: tuple[GradientTransform, ...]) -> None:
        self._optimizer = optimizer
        self._transforms = transforms
        self._memory: Memories = {}
        self._loading: Memories = {}
        self._seen: list[tuple[weakref.ref[Tensor], int]] = []
        super().__init__(
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_state_dict_post_hook(self._write),
            optimizer.register_load_state_dict_pre_hook(self._read),
            optimizer.register_load_state_dict_post_hook(self._commit),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the memory by position of the parameter in the optimizer; ``{}`` if there is none."""
        params = _params(self._optimizer)
        memory: dict[int, dict[str, Any]] = {}
        for name, kept in self._memory.items():
            for i, param in enumerate(params):
                for key, value in kept.get(param, {}).items():
                    memory.setdefault(i, {})[f"{name}.{key}"] = value
        return {"transforms": self._names(), "memory": memory} if memory else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; the tensors are copied.

        Raises:
            ValueError: The state is of other transforms or of more parameters; nothing was loaded.
        """
        if state and list(state.get("transforms", ())) != self._names():
            raise ValueError(
                f"the state was written by the transforms {list(state.get('transforms', ()))}, but the attached "
                f"transforms are {self._names()}; attach the same pipeline before loading."
            )
        self._memory = self._copied(state)

    def _names(self) -> list[str]:
        return [type(transform).__name__ for transform in self._transforms]

    def _copied(self, state: Mapping[str, Any]) -> Memories:
        params = _params(self._optimizer)
        entries = {int(i): entry for i, entry in state.get("memory", {}).items()}
        if entries and max(entries) >= len(params):
            raise ValueError(
                f"the pipeline's memory has an entry for parameter {max(entries)}, but the optimizer has {len(params)} "
                "parameters; load it into an optimizer of the same parameters."
            )
        found: Memories = {}
        for i, entry in entries.items():
            for name, own in by_namespace(entry, namespaces(self._transforms)).items():
                device = params[i].device
                found.setdefault(name, {})[params[i]] = {
                    key: value.detach().clone().to(device) if isinstance(value, Tensor) else value
                    for key, value in own.items()
                }
        return found

    def _write(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        own = self.state_dict()
        if own:
            state_dict[STATE_KEY] = [*state_dict.get(STATE_KEY, ()), own]

    def _read(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take this pipeline's entry; ``_commit`` applies it after the optimizer has accepted the rest."""
        entries = list(state_dict.get(STATE_KEY, ()))
        names = self._names()
        mine = next((i for i, entry in enumerate(entries) if list(entry["transforms"]) == names), None)
        self._loading = self._copied({} if mine is None else entries.pop(mine))
        return {**state_dict, STATE_KEY: entries}

    def _commit(self, optimizer: Optimizer) -> None:
        self._memory, self._loading = self._loading, {}

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run the chain, or, if ``step`` gets a closure, after the closure, which makes the gradients.

        It must not run before the closure as well: a closure that accumulates adds to existing gradients.
        """
        if isinstance(optimizer, ClosureOptimizer) and _has_closure(args, kwargs):
            self._apply_before(optimizer, kwargs.get("closure", args[-1]))
            return None
        return after_closure(args, kwargs, self._apply_if_new if _has_closure(args, kwargs) else self._apply)

    def _apply_before(self, optimizer: Optimizer, closure: Any) -> None:
        """Run the chain for an optimizer that reads the gradients first, and then calls the closure for its loss."""
        if not isinstance(closure, Replay) or closure.loss is None:
            names = ", ".join(self._names())
            raise IncompatibleError(
                f"{type(optimizer).__name__}.step(closure) runs the backward pass itself, so {names} cannot reach the "
                "gradients. Use TrainStep, or remove the pipeline."
            )
        self._apply()

    def _apply_if_new(self) -> None:
        """Run the chain unless it has changed these gradients already, as when a closure did not renew them."""
        grads = [p.grad for p in _params(self._optimizer) if p.grad is not None]
        same = len(grads) == len(self._seen) and all(
            seen() is grad and version == now
            for grad, now, (seen, version) in zip(grads, versions(grads), self._seen, strict=True)
        )
        if same:
            return
        self._apply()
        grads = [p.grad for p in _params(self._optimizer) if p.grad is not None]
        self._seen = list(zip(map(weakref.ref, grads), versions(grads), strict=True))

    def _apply(self) -> None:
        self._refuse_scaled()
        gradients = self._collect()
        before = list(gradients.grads)
        with torch.no_grad():
            check_chain(self._transforms, gradients)
            run_chain(self._transforms, gradients, self._recall)
        for param, old, new in zip(gradients.params, before, gradients.grads, strict=True):
            if new is not old:
                param.grad = new

    def _collect(self) -> Gradients:
        gradients = Gradients([], [], [], [])
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                gradients.params.append(param)
                gradients.grads.append(grad)
                gradients.groups.append(group)
        return gradients

    def _recall(self, name: str, params: Sequence[Tensor]) -> list[dict[str, Any]]:
        kept = self._memory.setdefault(name, {})
        return [kept.setdefault(param, {}) for param in params]

    def _refuse_scaled(self) -> None:
        """Fused optimizers unscale inside their kernel; ``GradScaler`` leaves them the scale as ``grad_scale``."""
        optimizer = self._optimizer
        if getattr(optimizer, "grad_scale", None) is None:
            return
        bound = [type(t).__name__ for t in self._transforms if not t.scale_free]
        if not bound:
            return
        if hasattr(optimizer, "found_inf"):
            # GradScaler.step does not clean up after an exception; the next step would multiply by a scale left here.
            for name in ("grad_scale", "found_inf"):
                delattr(optimizer, name)
        raise IncompatibleError(
            f"{', '.join(bound)} needs unscaled gradients, but {type(optimizer).__name__} is fused and GradScaler left "
            "the loss scale in them. Call scaler.unscale_(optimizer) before scaler.step(optimizer)."
        )


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


def by_namespace(entry: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
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


def check_chain(transforms: Iterable[GradientTransform], gradients: Gradients) -> list[Tensor]:
    """Run the ``check`` of every transform that has one, before any transform runs.

    Returns:
        The gradients, with stand-ins for entries whose layout a transform is going to change.
    """
    expected = Gradients(gradients.params, list(gradients.grads), gradients.groups, [], gradients.share)
    for transform in transforms:
        check = getattr(transform, "check", None)
        if check is not None:
            check(expected)
    return expected.grads


def run_chain(
    transforms: Sequence[GradientTransform],
    gradients: Gradients,
    recall: Callable[[str, Sequence[Tensor]], list[dict[str, Any]]],
) -> None:
    """Apply the transforms in order.

    Args:
        transforms: The chain.
        gradients: Changed; their ``memory`` is not used.
        recall: Returns the memory of a namespace for each parameter; the transform writes into these dictionaries.
    """
    gradients.grads = [writable(grad) for grad in gradients.grads]
    for name, transform in zip(namespaces(transforms), transforms, strict=True):
        own = _Recalled(gradients, partial(recall, name, gradients.params))
        transform(own)
        gradients.grads = own.grads


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


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("closure") is not None or any(callable(value) for value in args[1:])


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
