"""A chain of gradient transforms that runs before each step of any optimizer.

The chain uses the hooks of ``torch.optim.Optimizer``: a step pre-hook changes the gradients, and state-dict hooks save
the memory of the transforms. The optimizer object, its groups and its state are not changed.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchboost.core.algorithm import Attachment
from torchboost.core.arguments import check_optimizer
from torchboost.core.closure import ClosureOptimizer, Replay, after_closure
from torchboost.core.torch_private import step_pre_hook_keys, unscales_in_kernel, versions
from torchboost.core.wrapping import hookable
from torchboost.errors import IncompatibleError
from torchboost.optim.executor import Chain
from torchboost.optim.gradients import Gradients, GradientTransform, by_namespace, check_transforms, namespaces

__all__ = ["GradientPipeline", "PipelineAttachment"]

_DIVIDING = tuple(inspect.unwrap(kind.step) for kind in (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad))
"""Steps whose fused kernels divide the gradients by ``grad_scale``."""

_ABSENT = object()

STATE_KEY = "torchboost_gradient_pipelines"

Memories = dict[str, dict[Tensor, dict[str, Any]]]
"""Memory of each transform, by its namespace and by parameter."""


class GradientPipeline:
    """Apply transforms to the gradients right before each step of any optimizer, fused ones included.

    Transforms run in the given order, once per step. With a closure they run after each closure call that made new
    gradients, and never before, so ``step(closure)`` equals ``closure(); step()``, with accumulation too. An optimizer
    that uses gradients before it calls the closure, as some forms of SAM do, uses them untransformed.
    On the CPU, float32 gradients are unscaled, decayed, centralised and measured in one pass over memory, by a C kernel
    that is compiled at first use, and a fused optimizer of torch clips them on the way; without a compiler the
    transforms run one by one. The results differ by rounding only.
    Cost: one pass over the parameter list in Python (about 0.5 microseconds per parameter) plus the transforms.
    ``copy.deepcopy(optimizer)`` drops hooks, so attach the pipeline to the copy again.

    Example:
        >>> from torchboost.optim import Centralize, ClipNorm
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
        self._chain = Chain(transforms)
        self._memory: Memories = {}
        self._loading: Memories = {}
        self._seen: list[tuple[weakref.ref[Tensor], int]] = []
        self._given: Tensor | None = None  # what this set as the grad_scale of the optimizer ...
        self._scale_before: Any = _ABSENT  # ... and what was there
        self._inside = 0  # steps under way: a step that calls the step of its base class runs the hooks twice
        self._nests = _has_nested_steps(type(optimizer))
        before_step = optimizer.register_step_pre_hook(self._before_step)
        self._key = step_pre_hook_keys(optimizer)[-1]
        super().__init__(
            before_step,
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._write),
            optimizer.register_load_state_dict_pre_hook(self._read),
            optimizer.register_load_state_dict_post_hook(self._commit),
            undo=self._take_back,
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
        if self._nests and self._inside and self._seen and self._is_as_left():
            self._inside += 1
            return None
        self._inside = 1
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
        if self._is_as_left():
            return
        self._apply()
        self._remember()

    def _is_as_left(self) -> bool:
        """Whether the gradients are those that the chain changed last."""
        grads = [p.grad for p in _params(self._optimizer) if p.grad is not None]
        return len(grads) == len(self._seen) and all(
            seen() is grad and version == now
            for grad, now, (seen, version) in zip(grads, versions(grads), self._seen, strict=True)
        )

    def _remember(self) -> None:
        grads = [p.grad for p in _params(self._optimizer) if p.grad is not None]
        self._seen = list(zip(map(weakref.ref, grads), versions(grads), strict=True))

    def _apply(self) -> None:
        self._take_back()
        gradients = self._collect()
        scale = self._scale_inside(gradients)
        before = list(gradients.grads)
        with torch.no_grad():
            self._chain.check(gradients)
            left = self._chain.run(gradients, self._recall, hand_over=self._kernel_divides(), grad_scale=scale)
        self._leave(left, scale)
        for param, old, new in zip(gradients.params, before, gradients.grads, strict=True):
            if new is not old:
                param.grad = new
        if self._nests:
            self._remember()

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

    def _kernel_divides(self) -> bool:
        """Whether nothing but a fused kernel, which divides by ``grad_scale``, sees the gradients after this."""
        optimizer = self._optimizer
        if step_pre_hook_keys(optimizer)[-1] != self._key or isinstance(optimizer, ClosureOptimizer) or self._nests:
            return False
        if inspect.unwrap(type(optimizer).step) not in _DIVIDING:
            return unscales_in_kernel(optimizer)
        return all(group.get("fused") for group in optimizer.param_groups)

    def _leave(self, left: float, scale: float) -> None:
        """Give the kernel what the gradients are still to be divided by, which includes ``scale``."""
        optimizer: Any = self._optimizer
        before = vars(optimizer).get("grad_scale", _ABSENT)  # GradScaler may have set it to None
        there = 1.0 if before is _ABSENT or before is None else float(before)
        wanted = left if scale != 1.0 else left * there
        if wanted != there:
            self._given, self._scale_before = torch.tensor(wanted, device="cpu"), before
            optimizer.grad_scale = self._given

    def _after_step(self, *_: Any) -> None:
        self._inside = max(0, self._inside - 1)
        if not self._inside:
            self._take_back()

    def _take_back(self) -> None:
        """Restore ``grad_scale``, after a step that raised too, unless it has been changed since."""
        optimizer: Any = self._optimizer
        given, before = self._given, self._scale_before
        self._given, self._scale_before = None, _ABSENT
        if given is None or vars(optimizer).get("grad_scale") is not given:
            return
        if before is _ABSENT:
            del optimizer.grad_scale
        else:
            optimizer.grad_scale = before

    def _scale_inside(self, gradients: Gradients) -> float:
        """Return the loss scale to remove on the way; ``GradScaler`` leaves fused optimizers ``grad_scale``.

        Raises:
            IncompatibleError: A transform needs unscaled gradients, and the chain cannot remove the scale.
        """
        optimizer = self._optimizer
        scale = getattr(optimizer, "grad_scale", None)
        if scale is None:
            return 1.0
        bound = [type(t).__name__ for t in self._transforms if not t.scale_free]
        if not bound:
            return 1.0
        if self._kernel_divides() and self._chain.takes_scale(gradients):
            return float(scale)
        if hasattr(optimizer, "found_inf"):
            # GradScaler.step does not clean up after an exception; the next step would multiply by a scale left here.
            for name in ("grad_scale", "found_inf"):
                delattr(optimizer, name)
        raise IncompatibleError(
            f"{', '.join(bound)} needs unscaled gradients, but {type(optimizer).__name__} is fused and GradScaler left "
            "the loss scale in them. Call scaler.unscale_(optimizer) before scaler.step(optimizer)."
        )


def _has_nested_steps(kind: type) -> bool:
    """Whether the step of a class may call that of its base class; torch's own wrappers of one step do not count."""
    classes = [base for base in kind.__mro__ if base is not Optimizer]
    return len({inspect.unwrap(vars(base)["step"]) for base in classes if "step" in vars(base)}) > 1


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("closure") is not None or any(callable(value) for value in args[1:])


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
