"""Fused kernels for the groups of an optimizer, and the care that keeps their steps right."""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from torchboost.core.algorithm import Attachment
from torchboost.core.step import after_closure
from torchboost.core.torch_private import UNSUPPORTED_SHARDS, forget_fused_mark, has_fused_mark, step_pre_hooks
from torchboost.core.wrapping import hookable
from torchboost.errors import NoEffectWarning
from torchboost.optim.memory_layout import aligned, is_dense, writable
from torchboost.optim.rules import adam, sgd
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.rules.checkpoints import change_entries
from torchboost.optim.rules.options import miscomputes

__all__ = ["Fusion", "care_for_fused", "fused_class", "obstacle"]

# Rule -> torch's class of the kernel; the most special class first: AdamW is an Adam.
_FUSABLE: dict[type[Optimizer], type[Optimizer]] = {
    **{kind: kind for kind in (AdamW, Adam, SGD, Adagrad)},
    adam.Adam: Adam,
    sgd.SGD: SGD,
}


def care_for_fused(optimizer: Optimizer) -> Attachment:
    """Keep the steps right of groups that are fused already, if memory formats or the set of trained parameters change.

    See :func:`torchboost.algorithms.fuse_optimizer` for what could go wrong. Without a fused group, and if a
    :class:`Fusion` does the same, nothing is attached.
    """
    optimizer = hookable(optimizer)
    fused = [bool(group.get("fused")) for group in optimizer.param_groups]
    cared = any(isinstance(getattr(hook, "__self__", None), Fusion) for hook in step_pre_hooks(optimizer).values())
    return Fusion(optimizer, fused) if any(fused) and not cared else Attachment()


@dataclass(slots=True)
class _Seen:
    """The state of a group at the last step; while it is the same, only gradients are checked.

    Args:
        params: Those with a gradient.
        kinds: Their precisions and devices.
        strides: Theirs, None for each that is contiguous; empty if all are, with gradients that are.
        states: How many parameters of the optimizer had a state.
    """

    params: list[Tensor] = field(default_factory=list)
    kinds: set[tuple[torch.dtype, torch.device]] = field(default_factory=set)
    strides: list[tuple[int, ...] | None] = field(default_factory=list)
    states: int = 0

    def is_same(self, other: _Seen) -> bool:
        """Compare parameters by identity: tensors compare by value."""
        if (self.kinds, self.strides, self.states) != (other.kinds, other.strides, other.states):
            return False
        if len(self.params) != len(other.params):
            return False
        return all(map(operator.is_, self.params, other.params))


class _Lent(NamedTuple):
    """A gradient in the layout of its parameter, which stands in for the one of the loop while the step runs."""

    parameter: Tensor
    grad: Tensor
    arranged: Tensor


class Fusion(Attachment):
    """Fuses groups, and looks at gradients and state before each step.

    Args:
        optimizer: It calls hooks.
        chosen: For each group, whether it is fused. Other groups keep their form.
    """

    def __init__(self, optimizer: Optimizer, chosen: list[bool]) -> None:
        super().__init__(undo=self._restore)
        self._optimizer = optimizer
        self._chosen = chosen
        self._flags = [_flags(group) for group in optimizer.param_groups]
        self._defaults = _flags(optimizer.defaults)
        self._checks_before = has_fused_mark(optimizer)
        self._seen: dict[int, _Seen] = {}
        self._lent: list[_Lent] = []
        self._apply(optimizer)
        if all(chosen):
            optimizer.defaults |= _FUSED
        self._handles.append(optimizer.register_step_pre_hook(self._prepare))
        self._handles.append(optimizer.register_state_dict_post_hook(self._write_plain, prepend=True))
        self._handles.append(optimizer.register_load_state_dict_post_hook(self._apply))
        self._returns = False

    def _apply(self, optimizer: Optimizer) -> None:
        """Set the flags; the param groups of a loaded checkpoint bring those it was written with."""
        self._seen.clear()
        for group, chosen in zip(optimizer.param_groups, self._chosen, strict=False):
            if chosen:
                group |= _FUSED
        for group in self._fused_groups():
            for parameter in group["params"]:
                _align_state(optimizer.state.get(parameter, {}), parameter)

    def _fused_groups(self) -> Iterator[dict[str, Any]]:
        return (group for group in self._optimizer.param_groups if group.get("fused"))

    def _prepare(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not (self._returns or torch.compiler.is_compiling()):
            self._returns = True  # not earlier: levers may be attached while torch walks through the hooks after a step
            self._handles.append(optimizer.register_step_post_hook(self._give_back))
        return after_closure(args, kwargs, self._arrange)

    def _arrange(self) -> None:
        """Bring gradients, and whatever else has changed, into the layout that the fused kernels assume."""
        self._give_back()  # of a step that failed
        groups = self._optimizer.param_groups
        for index in range(len(self._chosen), len(groups)):
            self._admit(index, groups[index])
        for index, group in enumerate(groups):
            if not group.get("fused"):
                continue
            moving = [p for p in group["params"] if p.grad is not None]
            contiguous = [p.is_contiguous() for p in moving]
            strides: list[tuple[int, ...] | None] = []
            if not (all(contiguous) and all(p.grad.is_contiguous() for p in moving)):
                if any(p.grad.layout is not torch.strided for p in moving):
                    self._give_up(index, group, "has sparse gradients, which the fused kernels do not support")
                    continue
                strides = [None if plain else p.stride() for p, plain in zip(moving, contiguous, strict=True)]
                self._lent += _align_gradients(moving)
                _align_written_state(self._optimizer.state, moving, strides)
            now = _Seen(moving, {(p.dtype, p.device) for p in moving}, strides, len(self._optimizer.state))
            if index not in self._seen or not now.is_same(self._seen[index]):
                self._look_closely(index, group, now)

    @torch.no_grad()
    def _give_back(self, *_: Any) -> None:
        """Put back the gradients of the loop, with the numbers that the step leaves."""
        while self._lent:
            parameter, grad, arranged = self._lent.pop()
            if parameter.grad is arranged:
                grad.copy_(arranged)
                parameter.grad = grad

    def _admit(self, index: int, group: dict[str, Any]) -> None:
        """Decide about a group that was added after this was attached."""
        found = obstacle(self._optimizer, group) if group.get("fused") else None
        self._chosen.append(bool(group.get("fused")) and found is None)
        if found is not None:
            self._give_up(index, group, f"was added and cannot be fused ({found})")

    def _look_closely(self, index: int, group: dict[str, Any], now: _Seen) -> None:
        gap = next((p for p in now.params if not is_dense(p)), None)
        if gap is not None:
            self._give_up(index, group, f"can no longer be fused: {_gaps(gap)}")
            return
        kernel = _kernel(self._optimizer, group)
        wrong = next((text for pair in now.kinds if kernel and (text := _wrong(kernel, *pair))), None)
        if wrong is not None:
            self._give_up(index, group, f"can no longer be fused: {wrong}")
            return
        state = self._optimizer.state
        for parameter in now.params:
            if parameter in state:
                _align_state(state[parameter], parameter)
        if group.get("momentum"):
            _start_momentum(state, now.params)
        # The buffers of a first step do not exist yet.
        self._seen[index] = _Seen(now.params, now.kinds, now.strides, len(state))

    def _give_up(self, index: int, group: dict[str, Any], reason: str) -> None:
        group |= self._flags_before(index) | {"fused": None}
        self._chosen[index] = False
        warnings.warn(f"fused_optimizer: group {index} {reason}; it stays unfused.", NoEffectWarning, stacklevel=2)

    def _write_plain(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Save the flags of the user: without this, a fused kernel mixes up state in another layout."""
        fused = {p for group in self._fused_groups() for p in group["params"]}
        for index, group in enumerate(state_dict["param_groups"]):
            if index >= len(self._chosen) or self._chosen[index]:
                group |= self._flags_before(index)
            if group.get("capturable") or group.get("fused"):
                fused.difference_update(optimizer.param_groups[index]["params"])

        def plain(param: Tensor, key: str, value: Any) -> Any:
            return value.cpu() if key == "step" and param in fused and isinstance(value, Tensor) else value

        change_entries(optimizer, state_dict, plain)

    def _flags_before(self, index: int) -> dict[str, Any]:
        return self._flags[index] if index < len(self._flags) else self._defaults

    def _restore(self) -> None:
        optimizer = self._optimizer
        ours = [p for group in self._fused_groups() for p in group["params"]]
        for index, group in enumerate(optimizer.param_groups):
            group |= self._flags_before(index)
        optimizer.defaults |= self._defaults
        staying = (group for group in optimizer.param_groups if group.get("capturable") or group.get("fused"))
        on_device = {p for group in staying for p in group["params"]}
        for parameter in (p for p in ours if p not in on_device):
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].cpu()
        if not self._checks_before:
            forget_fused_mark(optimizer)


_FUSED = {"fused": True, "foreach": None}


def _flags(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in _FUSED if key in group}


def obstacle(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Return why torch cannot fuse this group, or None."""
    kind = fused_class(optimizer, group)
    name = type(_of_group(optimizer, group)).__name__
    if kind is None or inspect.unwrap(type(optimizer).step) is not inspect.unwrap(kind.step):
        return f"{name} has no fused form in torch.optim; SGD, Adam, AdamW and Adagrad have one"
    if isinstance(optimizer, UpdateRule):
        try:
            optimizer.rule_for(group).check_group({**group, **_FUSED})
        except ValueError as error:
            return str(error)
    if group.get("differentiable"):
        return f"{name} was built with differentiable=True, which excludes fusing"
    if group.get("dampening"):
        damping = group["dampening"]
        return f"{name} has dampening={damping}, for which a fused step differs if a parameter starts later"
    if isinstance(group.get("weight_decay"), Tensor):
        return f"{name} has a tensor as weight_decay; fused kernels take a float"
    gap = next((p for p in group["params"] if not is_dense(p)), None)
    if gap is not None:
        return f"{name} has {_gaps(gap)}"
    samples: dict[tuple[Any, ...], Tensor] = {}
    for p in sorted(group["params"], key=Tensor.numel):
        samples.setdefault((type(p), p.device, p.dtype), p)
    return next((text for sample in samples.values() if (text := _probe(_FUSABLE[kind], sample))), None)


def _of_group(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    return optimizer.rule_for(group) if isinstance(optimizer, UpdateRule) else optimizer


def fused_class(optimizer: Optimizer, group: dict[str, Any]) -> type[Optimizer] | None:
    """Return the class of the rule of a group, if it has a fused form."""
    rule = _of_group(optimizer, group)
    return next((kind for kind in _FUSABLE if isinstance(rule, kind)), None)


def _kernel(optimizer: Optimizer, group: dict[str, Any]) -> type[Optimizer] | None:
    """Return torch's class whose kernel a group uses."""
    kind = fused_class(optimizer, group)
    return None if kind is None else _FUSABLE[kind]


def _wrong(kind: type[Optimizer], dtype: torch.dtype, device: torch.device) -> str | None:
    if torch.compiler.is_compiling() or not miscomputes(kind, dtype, device):
        return None
    return f"torch's fused {kind.__name__} computes wrong steps in {dtype} on {device}"


def _gaps(parameter: Tensor) -> str:
    return (
        f"a parameter of shape {tuple(parameter.shape)} with strides {parameter.stride()}, which has gaps in its "
        "memory that the fused kernel would write into; give it memory of its own (p.data = p.data.contiguous())"
    )


def _align_gradients(parameters: list[Tensor]) -> list[_Lent]:
    """Replace gradients in another layout; return those to put back, as other code may hold their memory."""
    lent: list[_Lent] = []
    for p in parameters:
        grad: Any = p.grad
        arranged = aligned(grad, p)
        if arranged is grad:
            continue
        p.grad = arranged
        if not grad.requires_grad and writable(grad) is grad:
            lent.append(_Lent(p, grad, arranged))
    return lent


def _probe(kind: type[Optimizer], sample: Tensor) -> str | None:
    """Try one step on zeros: which devices, dtypes and sharded tensors work differs between versions of torch."""
    try:
        parameter = torch.zeros_like(sample).requires_grad_()
        parameter.grad = torch.zeros_like(sample)
        made = kind([parameter], lr=0.0, fused=True)  # pyright: ignore[reportCallIssue]
        with torch.no_grad():
            inspect.unwrap(kind.step)(made)  # hooks of users on all optimizers do not see it
    except UNSUPPORTED_SHARDS as error:
        what = f"{sample.dtype} {type(sample.data).__name__} on {sample.device}"
        return f"{kind.__name__} cannot be fused for {what}: {str(error).splitlines()[0]}"
    return _wrong(kind, sample.dtype, sample.device)


def _align_state(state: dict[str, Any], parameter: Tensor) -> None:
    """Bring existing state into the layout that the fused kernels assume."""
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if key == "step":
            state[key] = value.to(parameter.device, torch.float32)
        elif value.layout is torch.strided and value.shape == parameter.shape:
            state[key] = aligned(value, parameter)


def _align_written_state(
    states: dict[Tensor, dict[str, Any]], parameters: list[Tensor], strides: list[tuple[int, ...] | None]
) -> None:
    """Bring state that the loop has written since the last step into the layout of its parameter, if that has one."""
    for p, stride in zip(parameters, strides, strict=True):
        if stride is None or p not in states:
            continue
        held = states[p].values()
        if any(isinstance(v, Tensor) and v.dim() == p.dim() and v.stride() != stride for v in held):
            _align_state(states[p], p)


def _start_momentum(state: dict[Tensor, dict[str, Any]], parameters: list[Tensor]) -> None:
    late = [p for p in parameters if state.get(p, {}).get("momentum_buffer") is None]
    if 0 < len(late) < len(parameters):
        for p in late:
            state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
