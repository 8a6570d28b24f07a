"""A chain of gradient transforms in front of any optimizer.

The chain hangs on the seams of ``torch.optim.Optimizer``: a step pre-hook changes the gradients, state-dict hooks
carry what the transforms remember. The optimizer object, its groups and its state stay as they are.
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
"""What each transform keeps, by its namespace and by parameter."""


@dataclass(slots=True)
class Gradients:
    """All gradients of one step, as parallel lists, so that a transform may look across groups.

    Parameters without a gradient are left out.

    Args:
        params: The parameters.
        grads: Their gradients. Change an entry in place where the shape stays: it may be a view into a
            communication bucket. An entry that is replaced becomes the parameter's ``.grad``.
        groups: The param group of each parameter.
        memory: What this transform, and no other, keeps per parameter between steps: tensors and plain numbers under
            string keys of its choice. Saved with the optimizer.
        share: The ranks that share the parameters out, if these are one rank's share; for transforms that look
            across parameters. One that calls ``share.exchange`` says in an attribute ``collectives`` how often a step
            does so.
    """

    params: list[Tensor]
    grads: list[Tensor]
    groups: list[dict[str, Any]]
    memory: list[dict[str, Any]]
    share: Share | None = None


class _Recalled(Gradients):
    """Gradients whose memory is looked up if a transform asks for it: most never do."""

    __slots__ = ("_recall",)

    def __init__(self, gradients: Gradients, recall: Callable[[], list[dict[str, Any]]]) -> None:
        self.params, self.grads, self.groups = gradients.params, gradients.grads, gradients.groups
        self.share = gradients.share
        self._recall = recall

    @property
    def memory(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._recall()


class GradientTransform(Protocol):
    """One link of the chain: called once per step, under ``no_grad``.

    ``scale_free`` says whether it has the same effect with the loss scale still in the gradients: true for linear
    maps of the gradient, false for anything that compares it with another quantity.

    A transform may have a second method, ``check(gradients)``, which raises if the transform cannot do its work. The
    checks of the whole chain run before the first transform, so that a step that raises leaves the gradients as they
    were. A check changes no tensor; a transform that is going to change the layout of an entry puts a stand-in of
    the new layout into the list there.
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

    Transforms run in the given order, once per step; with a closure, after each closure call that made new gradients
    and never before, so that ``step(closure)`` equals ``closure(); step()``, with accumulation too. An optimizer that
    uses gradients before it calls the closure, as some forms of SAM do, uses those as they are.
    Cost: one pass over the parameter list in Python (about 0.2 microseconds per parameter) plus the transforms.
    ``copy.deepcopy(optimizer)`` drops hooks, so attach again to a copy.

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
        """Put the chain in front of ``optimizer.step``; several chains run in the order in which they were attached.

        Raises:
            TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.
            IncompatibleError: It calls no hooks and wraps no other optimizer.
        """
        check_optimizer(optimizer)
        return PipelineAttachment(hookable(optimizer), self.transforms)


class PipelineAttachment(Attachment):
    """A pipeline at work on one optimizer, with its memory.

    The memory rides in ``optimizer.state_dict()`` under one extra key, absent while it is empty; an optimizer without
    the pipeline loads such a file, and a file without the key starts with an empty memory. Distributed checkpointing
    drops the key: use this object's own ``state_dict`` there.
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
        """Return the memory by position of the parameter in the optimizer; empty while there is none."""
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
            ValueError: The state was written by other transforms or for more parameters; nothing was loaded.
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
        """Take this pipeline's entry; it counts only once the optimizer has accepted the rest (``_commit``)."""
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
        """Run the chain. A closure makes its gradients inside ``step``, so there the chain runs after the closure.

        Not before it too: a closure that accumulates adds to the gradients that it finds.
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
        """Leave out gradients the chain has changed already: those of the last step, those a closure did not renew."""
        grads = [p.grad for p in _params(self._optimizer) if p.grad is not None]
        same = len(grads) == len(self._seen) and all(
            seen() is grad and version == grad._version for grad, (seen, version) in zip(grads, self._seen, strict=True)
        )
        if same:
            return
        self._apply()
        grads = [p.grad for p in _params(self._optimizer) if p.grad is not None]
        self._seen = [(weakref.ref(grad), grad._version) for grad in grads]

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
            # GradScaler.step does not clean up after an exception, and would multiply a scale left here into the next.
            for name in ("grad_scale", "found_inf"):
                delattr(optimizer, name)
        raise IncompatibleError(
            f"{', '.join(bound)} needs unscaled gradients, but {type(optimizer).__name__} is fused and GradScaler left "
            "the loss scale in them. Call scaler.unscale_(optimizer) before scaler.step(optimizer)."
        )


def check_transforms(transforms: Iterable[GradientTransform]) -> None:
    """Refuse what is no transform.

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
    """Name the memory of each transform, after its class; the second of a class is ``Name#2``."""
    names: list[str] = []
    for transform in transforms:
        name = type(transform).__name__
        earlier = sum(own.partition("#")[0] == name for own in names)
        names.append(f"{name}#{earlier + 1}" if earlier else name)
    return names


def by_namespace(entry: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Give each transform what a checkpoint holds for it, out of entries ``"Name.key"``.

    Older checkpoints have ``"key"`` alone, which all transforms of a chain shared: each gets it.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, value in entry.items():
        name, dot, rest = key.partition(".")
        known = dot and name in names
        for owner in (name,) if known else names:
            found.setdefault(owner, {})[rest if known else key] = value
    return found


def check_chain(transforms: Iterable[GradientTransform], gradients: Gradients) -> list[Tensor]:
    """Let every transform that has a ``check`` refuse before any of them works.

    Returns:
        The gradients, with stand-ins where a transform is going to change the layout.
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
        recall: Returns what the transform of a namespace keeps of each parameter; what it puts into the dictionaries
            is kept.
    """
    gradients.grads = [writable(grad) for grad in gradients.grads]
    for name, transform in zip(namespaces(transforms), transforms, strict=True):
        own = _Recalled(gradients, partial(recall, name, gradients.params))
        transform(own)
        gradients.grads = own.grads


def refuse_sparse(transform: object, gradients: Gradients) -> None:
    """Refuse sparse gradients before anything is changed.

    Raises:
        IncompatibleError: There is one.
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
