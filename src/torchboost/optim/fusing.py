"""Fused kernels for the groups of an optimizer, and the care that keeps their steps right."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from torchboost.core.algorithm import Attachment
from torchboost.core.forward import is_our_hook
from torchboost.core.step import after_closure
from torchboost.core.torch_private import UNSUPPORTED_SHARDS, forget_fused_mark, has_fused_mark, step_pre_hooks
from torchboost.core.wrapping import hookable
from torchboost.errors import warn_no_effect
from torchboost.optim.rules import adam, sgd
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.rules.options import miscomputes
from torchboost.optim.tensors import aligned, is_dense, writable
from torchboost.optim.wrapping_optimizer import change_entries

# Rule -> torch's class of the kernel. The most special class comes first, because AdamW is an Adam.
_FUSABLE: dict[type[Optimizer], type[Optimizer]] = {
    **{kind: kind for kind in (AdamW, Adam, SGD, Adagrad)},
    adam.Adam: Adam,
    sgd.SGD: SGD,
}


def care_for_fused(optimizer: Optimizer) -> Attachment:
    """Keep the steps right of groups that are fused already, if memory formats or the set of trained parameters change.

    Without a fused group, and if a :class:`Fusion` does the same, nothing is attached.
    """
    optimizer = hookable(optimizer)
    fused = [bool(group.get("fused")) for group in optimizer.param_groups]
    cared = any(isinstance(getattr(hook, "__self__", None), Fusion) for hook in step_pre_hooks(optimizer).values())
    return Fusion(optimizer, fused) if any(fused) and not cared else Attachment()


class Fusion(Attachment):
    """Fuses the chosen groups, and looks at gradients and state before each step. Other groups keep their form.

    Copies and pickles of the optimizer, which have no hooks, have the flags of the user.
    """

    def __init__(self, optimizer: Optimizer, chosen: list[bool]) -> None:
        super().__init__(undo=self._restore)
        self._optimizer, self._chosen = optimizer, chosen
        self._flags = [_flags(group) for group in optimizer.param_groups]
        self._defaults = _flags(optimizer.defaults)
        self._checks_before = has_fused_mark(optimizer)
        self._seen: dict[int, tuple[Any, ...]] = {}  # each group at the last step: sound while it is the same
        self._lent: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, its gradient, and a copy in its layout
        self._paused: list[tuple[dict[str, Any], dict[str, Any]]] = []  # group, its flags
        self._returns = False
        self._apply(optimizer)
        if all(chosen):
            optimizer.defaults |= _FUSED
        self._state_before = vars(optimizer).get(_STATE)
        vars(optimizer)[_STATE] = self._copied
        self._handles.append(optimizer.register_step_pre_hook(self._prepare))
        self._handles.append(optimizer.register_state_dict_post_hook(self._write_plain, prepend=True))
        self._handles.append(optimizer.register_load_state_dict_post_hook(self._apply))

    def _apply(self, optimizer: Optimizer) -> None:
        """Set the flags. The param groups of a loaded checkpoint bring the flags of the run that wrote it."""
        self._seen.clear()
        for group, chosen in zip(optimizer.param_groups, self._chosen, strict=False):
            if chosen:
                group |= _FUSED
        for group in optimizer.param_groups:
            for parameter in group["params"] if group.get("fused") else ():
                _align_state(optimizer.state.get(parameter, {}), parameter)

    def _prepare(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not (self._returns or torch.compiler.is_compiling()):
            self._returns = True  # not earlier: levers may be attached while torch walks through the hooks after a step
            self._handles.append(optimizer.register_step_post_hook(self._end_step))
        self._go_on()  # after a step that failed
        if not torch.compiler.is_compiling() and self._meets_other_hooks():
            self._pause()
            return None
        return after_closure(args, kwargs, self._arrange)

    def _meets_other_hooks(self) -> bool:
        """Whether hooks of users run after this one, before the step. They may change gradients and state."""
        others = [
            hook for hook in step_pre_hooks(self._optimizer).values() if _is_of(hook, self) or not is_our_hook(hook)
        ]
        if len(others) > 1:
            self._seen.clear()
        return any(_is_of(hook, self) for hook in others[:-1])

    def _pause(self) -> None:
        """Let the next step be unfused: it takes gradients and state in any layout. From then on this comes last."""
        for index, group in enumerate(self._optimizer.param_groups):
            if group.get("fused"):
                self._paused.append((group, _flags(group)))
                group |= self._flags_before(index) | {"fused": None}
                self._to_host([] if group.get("capturable") else group["params"])

    def _go_on(self) -> None:
        """Fuse again what was paused."""
        if self._paused:
            for group, flags in self._paused:
                group |= flags
            self._paused = []
            self._apply(self._optimizer)

    def _end_step(self, *_: Any) -> None:
        self._give_back()
        if self._paused:
            self._go_on()
            hooks = step_pre_hooks(self._optimizer)
            place = next((key for key, hook in hooks.items() if _is_of(hook, self)), None)
            if place is not None:
                hooks[place] = hooks.pop(place)

    def _to_host(self, parameters: Iterable[Tensor]) -> None:
        """Move the step counts of parameters to the host, where unfused steps keep them."""
        for parameter in parameters:
            state = self._optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].cpu()

    def _arrange(self) -> None:
        """Bring gradients, and whatever else has changed, into the layout that the fused kernels assume."""
        self._give_back()  # of a step that failed
        state = self._optimizer.state
        for index, group in enumerate(self._optimizer.param_groups):
            if index == len(self._chosen):  # added after this was attached
                reason = obstacle(self._optimizer, group) if group.get("fused") else None
                self._chosen.append(bool(group.get("fused")) and reason is None)
                if reason is not None:
                    self._give_up(index, group, f"was added and cannot be fused ({reason})")
            if not group.get("fused"):
                continue
            moving = [p for p in group["params"] if p.grad is not None]
            if not all(p.is_contiguous() and p.grad.is_contiguous() for p in moving):
                if any(p.grad.layout is not torch.strided for p in moving):
                    self._give_up(index, group, "has sparse gradients, which the fused kernels do not support")
                    continue
                self._align(moving)
            kinds = {(p.dtype, p.device) for p in moving}
            look = list(map(id, moving)), kinds, [p.stride() for p in moving], len(state)
            late = bool(group.get("momentum")) and any(_has_no_buffer(state, p) for p in moving)
            if (late or self._seen.get(index) != look) and self._is_sound(index, group, moving, kinds):
                self._seen[index] = look

    def _align(self, parameters: list[Tensor]) -> None:
        """Replace gradients in another layout, and note which to put back, as other code may hold their memory.

        State that the loop has written since the last step gets the layout of its parameter too.
        """
        for p in parameters:
            grad: Any = p.grad
            arranged = aligned(grad, p)
            if arranged is not grad:
                p.grad = arranged
                if not grad.requires_grad and writable(grad) is grad:
                    self._lent.append((p, grad, arranged))
            if not p.is_contiguous():
                _align_state(self._optimizer.state.get(p, {}), p)

    @torch.no_grad()
    def _give_back(self) -> None:
        """Put back the gradients of the loop, with their values after the step."""
        while self._lent:
            parameter, grad, arranged = self._lent.pop()
            if parameter.grad is arranged:
                grad.copy_(arranged)
                parameter.grad = grad

    def _is_sound(self, index: int, group: dict[str, Any], parameters: list[Tensor], kinds: set[Any]) -> bool:
        """Prepare the state of a group that has changed, or unfuse it if the kernel would compute wrong steps."""
        gap = next((p for p in parameters if not is_dense(p)), None)
        kind = fused_class(self._optimizer, group)
        wrong = "" if kind is None else next(filter(None, [_wrong(_FUSABLE[kind], *pair) for pair in kinds]), "")
        if gap is not None or wrong:
            self._give_up(index, group, f"can no longer be fused: {wrong if gap is None else _gaps(gap)}")
            return False
        state = self._optimizer.state
        for p in parameters:
            _align_state(state.get(p, {}), p)
        late = [p for p in parameters if _has_no_buffer(state, p)]
        if group.get("momentum") and len(late) < len(parameters):
            for p in late:
                state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return True

    def _give_up(self, index: int, group: dict[str, Any], reason: str) -> None:
        group |= self._flags_before(index) | {"fused": None}
        self._chosen[index] = False
        warn_no_effect(f"fused_optimizer: group {index} {reason}; it stays unfused.")

    def _flags_before(self, index: int) -> dict[str, Any]:
        return self._flags[index] if index < len(self._flags) else self._defaults

    def _set_plain(self, groups: list[dict[str, Any]], every: bool) -> set[Tensor]:
        """Give groups the flags of the user. Return the parameters whose step counts then belong on the host."""
        live = self._optimizer.param_groups
        fused = {p for group in live if group.get("fused") for p in group["params"]}
        for index, group in enumerate(groups):
            if every or index >= len(self._chosen) or self._chosen[index]:
                group |= self._flags_before(index)
            if group.get("capturable") or group.get("fused"):
                fused.difference_update(live[index]["params"])
        return fused

    def _write_plain(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Save the flags of the user: without this, a fused kernel mixes up state in another layout."""
        hosted = self._set_plain(state_dict["param_groups"], every=False)

        def plain(param: Tensor, key: str, value: Any) -> Any:
            return value.cpu() if key == "step" and param in hosted and isinstance(value, Tensor) else value

        change_entries(optimizer, state_dict, plain)

    def _copied(self) -> Any:
        """Return the state that a copy or a pickle of the optimizer gets."""
        optimizer, before = self._optimizer, self._state_before
        state = before() if before is not None else type(optimizer).__getstate__(optimizer)
        if not (isinstance(state, dict) and {"defaults", "state", "param_groups"} <= state.keys()):
            return state  # a class with a form of its own
        state = {name: value for name, value in state.items() if name != _STATE}
        groups = [dict(group) for group in state["param_groups"]]
        hosted = self._set_plain(groups, every=False)
        entries = {p: dict(each) for p, each in state["state"].items()}
        for p in hosted & entries.keys():
            if isinstance(step := entries[p].get("step"), Tensor):
                entries[p]["step"] = step.cpu()
        own = {"defaults": {**state["defaults"], **self._defaults}, "state": defaultdict(dict, entries)}
        return {**state, **own, "param_groups": groups}

    def _restore(self) -> None:
        optimizer = self._optimizer
        vars(optimizer).pop(_STATE, None)
        if self._state_before is not None:
            vars(optimizer)[_STATE] = self._state_before
        self._go_on()
        self._to_host(self._set_plain(optimizer.param_groups, every=True))
        optimizer.defaults |= self._defaults
        if not self._checks_before:
            forget_fused_mark(optimizer)


def _is_of(hook: Any, owner: Fusion) -> bool:
    return getattr(hook, "__self__", None) is owner


def _has_no_buffer(state: Mapping[Tensor, Any], parameter: Tensor) -> bool:
    return state.get(parameter, {}).get("momentum_buffer") is None


_FUSED = {"fused": True, "foreach": None}
_STATE = "__getstate__"
"""Attribute of an optimizer that is fused. ``copy`` and ``pickle`` ask the instance before its class."""


def _flags(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in _FUSED if key in group}


def obstacle(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Return why torch cannot fuse this group, or None."""
    kind = fused_class(optimizer, group)
    name = type(optimizer.rule_for(group) if isinstance(optimizer, UpdateRule) else optimizer).__name__
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


def fused_class(optimizer: Optimizer, group: dict[str, Any]) -> type[Optimizer] | None:
    """Return the class of the rule of a group, if it has a fused form."""
    rule = optimizer.rule_for(group) if isinstance(optimizer, UpdateRule) else optimizer
    return next((kind for kind in _FUSABLE if isinstance(rule, kind)), None)


def _wrong(kind: type[Optimizer], dtype: torch.dtype, device: torch.device) -> str | None:
    if torch.compiler.is_compiling() or not miscomputes(kind, dtype, device):
        return None
    return f"torch's fused {kind.__name__} computes wrong steps in {dtype} on {device}"


def _gaps(parameter: Tensor) -> str:
    return (
        f"a parameter of shape {tuple(parameter.shape)} with strides {parameter.stride()}, which has gaps in its "
        "memory that the fused kernel would write into; give it memory of its own (p.data = p.data.contiguous())"
    )


def _probe(kind: type[Optimizer], sample: Tensor) -> str | None:
    """Try one step on zeros: which devices, dtypes and sharded tensors work differs between versions of torch."""
    try:
        parameter = torch.zeros_like(sample).requires_grad_()
        parameter.grad = torch.zeros_like(sample)
        trial = kind([parameter], lr=0.0, fused=True)  # pyright: ignore[reportCallIssue]
        with torch.no_grad():
            inspect.unwrap(kind.step)(trial)  # hooks of users on all optimizers do not see it
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
