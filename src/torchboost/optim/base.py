"""The base of all optimizers here: parameters, groups, learning rates, gradient transforms; a rule adds the update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchboost.errors import IncompatibleError
from torchboost.optim.learning_rates import resolve_lr
from torchboost.optim.options import check_options
from torchboost.optim.pipeline import Gradients, GradientTransform, check_transforms

__all__ = ["Batch", "Nonfinite", "UpdateRule"]

aten = torch.ops.aten

Nonfinite = Literal["ignore", "skip", "raise"]
Schedule = Callable[[int], float]

SCHEDULED = ("lr", "weight_decay")
"""Options that may be a list or a function of the update."""

LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Batch:
    """The parameters of a group that have a gradient, as parallel lists.

    Args:
        params: What is updated in place: the parameters, or their float32 masters.
        grads: Their gradients, in the precision of ``params``.
        states: Their state.
    """

    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]

    def state(self, key: str) -> list[Tensor]:
        """Return one entry of all states."""
        return [state[key] for state in self.states]


class UpdateRule(Optimizer):
    """State handling, closures, gathering and dispatch. A rule adds :meth:`init_state` and :meth:`update`.

    Everything a user knows from ``torch.optim`` holds: ``param_groups`` is a plain list whose entries may be written
    at any time, ``state_dict`` has torch's layout, hooks, schedulers, ``GradScaler``, ``deepcopy`` and pickling work.

    A step checks everything first and changes nothing when it raises.

    Args:
        params: Parameters, named parameters or groups.
        defaults: Options of a group that does not set its own. ``"lr"`` and ``"weight_decay"`` may be a float, a
            list with an element per update, or a function of the update (counted from 0).
        transforms: Applied to the gradients of all groups together before the update, in order, in place.
        nonfinite: What to do about inf and nan in the gradients: ``"ignore"`` them as torch does, ``"skip"`` the
            update, or ``"raise"`` before it. The check is one more read of the gradients.

    Raises:
        TypeError, ValueError: An option that makes no sense, or a transform that is none.
    """

    own_form: bool = False
    """Whether the update applies the transforms itself."""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        transforms: Sequence[GradientTransform] = (),
        nonfinite: Nonfinite = "ignore",
    ) -> None:
        if nonfinite not in ("ignore", "skip", "raise"):
            raise ValueError(f"nonfinite: found {nonfinite!r}; allowed are 'ignore', 'skip' and 'raise'.")
        check_transforms(transforms)
        self.transforms = tuple(transforms)
        self.nonfinite: Nonfinite = nonfinite
        self._schedules: list[dict[str, Schedule]] = []
        self._default_schedules = _take_schedules(defaults)
        super().__init__(params, defaults)

    def init_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a parameter starts with; ``param`` is its float32 master where there is one."""
        raise NotImplementedError

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """Change the parameters and states of a batch in place."""
        raise NotImplementedError

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse options that exclude each other under this rule.

        Raises:
            ValueError: Such options.
        """

    def check_grad(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        """Refuse a gradient the rule cannot use; the default takes dense ones, and sparse ones before a transform.

        Raises:
            IncompatibleError: The gradient cannot be used.
        """
        if grad.layout is not torch.strided and not self.transforms:
            raise IncompatibleError(
                f"{type(self).__name__} works on dense gradients, found layout {grad.layout} for a parameter of shape "
                f"{tuple(param.shape)}. Use LazyAdam, sparse=False, or transforms=(Coalesce(dense=True),)."
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; missing options are the defaults.

        Raises:
            TypeError, ValueError: An option that makes no sense; nothing was added.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group: found {type(param_group).__name__}; give a dict with the key 'params'.")
        group = dict(param_group)
        schedules = {key: rule for key, rule in self._default_schedules.items() if key not in group}
        schedules |= _take_schedules(group)
        if schedules:
            group.setdefault("updates", 0)
        complete = {**self.defaults, **group}
        check_options(complete)
        self.check_group(complete)
        super().add_param_group(group)
        self._schedules.append(schedules)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the loss and its gradients once more, and returns the loss.

        Raises:
            IncompatibleError: A gradient the rule cannot use.
            FloatingPointError: Inf or nan in the gradients where ``nonfinite="raise"``.
            ValueError: A list of learning rates is used up, or an option was set to something senseless.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scheduled = self._scheduled()
        for group in self.param_groups:
            check_options(group)
            self.check_group(group)
            for param in group["params"]:
                if param.grad is not None:
                    self.check_grad(param, param.grad, group)
        for group, values in zip(self.param_groups, scheduled, strict=True):
            group.update(values)
        work = [self._gather(group) for group in self.param_groups]
        if not self._transformed(work):
            return loss
        for group, batch in zip(self.param_groups, work, strict=True):
            if batch.params:
                self.update(group, batch)
            self._write_back(group, batch)
        for group in self.param_groups:
            if "updates" in group:
                group["updates"] += 1
        return loss

    def __getstate__(self) -> dict[str, Any]:
        own = {key: self.__dict__[key] for key in ("transforms", "nonfinite", "_schedules", "_default_schedules")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint of this rule, or of torch's where the rule is the same.

        Entries keep the precision they were saved with, float32 moments of bfloat16 parameters too.

        Raises:
            ValueError: Other groups, or a state whose shape is not that of its parameter; nothing was changed.
        """
        pairs = self._paired(state_dict)
        super().load_state_dict(state_dict)
        for param, saved in pairs:
            for key, value in saved.items():
                own = self.state[param].get(key) if param in self.state else None
                if isinstance(own, Tensor) and isinstance(value, Tensor) and own.dtype != value.dtype:
                    self.state[param][key] = value.detach().clone().to(own.device)

    def _paired(self, state_dict: Mapping[str, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
        """Return each parameter with its saved state, in the order torch pairs them."""
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        if len(saved) != len(params):
            return []  # torch refuses it, with its own words
        pairs = [(p, state_dict["state"][i]) for p, i in zip(params, saved, strict=True) if i in state_dict["state"]]
        for position, (param, state) in enumerate(pairs):
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim and value.numel() not in (param.numel(), param.shape[0]):
                    raise ValueError(
                        f"the checkpoint's {key!r} of parameter {position} has shape {tuple(value.shape)}, "
                        f"the parameter has {tuple(param.shape)}; give the parameters in the order it was written with."
                    )
        return pairs

    def _scheduled(self) -> list[dict[str, float]]:
        values = []
        for group, schedules in zip(self.param_groups, self._schedules, strict=True):
            if "lr" in schedules and "initial_lr" in group:
                raise IncompatibleError(
                    "a learning-rate scheduler is attached to a group whose lr is a list or a function itself; "
                    "use one of the two."
                )
            values.append({key: schedule(group["updates"]) for key, schedule in schedules.items()})
        return values

    def _gather(self, group: dict[str, Any]) -> Batch:
        params = [param for param in group["params"] if param.grad is not None]
        states = []
        masters = bool(group.get("master_weights"))
        batch = Batch([], [], states)
        for param in params:
            state = self.state[param]
            wide = masters and param.dtype in LOW_PRECISION
            if wide and "master" not in state:
                state["master"] = param.detach().float()
            worked = state["master"] if wide else param
            for key, value in self.init_state(worked, group).items() if self._incomplete(state, group) else ():
                state.setdefault(key, value)
            batch.params.append(worked)
            batch.grads.append(param.grad.float() if wide else param.grad)
            states.append(state)
        return batch

    def _incomplete(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
        return any(key not in state for key in self.state_keys(group))

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the entries that :meth:`init_state` returns under these options."""
        raise NotImplementedError

    def _transformed(self, work: Sequence[Batch]) -> bool:
        """Apply the transforms; False where the update is to be left out."""
        if self.transforms and not self.own_form:
            self._transform(work)
        if self.nonfinite == "ignore" or self.own_form:
            return True
        grads = [grad._values() if grad.is_sparse else grad for batch in work for grad in batch.grads]
        if not grads or _finite(grads):
            return True
        if self.nonfinite == "raise":
            raise FloatingPointError("the gradients contain inf or nan; the update was left out.")
        return False

    def _transform(self, work: Sequence[Batch]) -> None:
        gradients = Gradients([], [], [], [])
        for group, batch in zip(self.param_groups, work, strict=True):
            gradients.params += batch.params
            gradients.grads += batch.grads
            gradients.groups += [group] * len(batch.params)
            gradients.memory += batch.states
        for transform in self.transforms:
            transform(gradients)
        start = 0
        for batch in work:
            batch.grads[:] = gradients.grads[start : start + len(batch.grads)]
            start += len(batch.grads)

    def _write_back(self, group: Mapping[str, Any], batch: Batch) -> None:
        if not group.get("master_weights"):
            return
        params = [param for param in group["params"] if param.grad is not None]
        pairs = [(p, m) for p, m in zip(params, batch.params, strict=True) if m is not p]
        if pairs:
            aten._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])


def _finite(grads: Sequence[Tensor]) -> bool:
    # Sparse gradients of a batch without ids have no entry, and torch no maximum of nothing.
    filled = [grad for grad in grads if grad.numel()]
    return not filled or all(bool(norm.isfinite()) for norm in aten._foreach_norm(filled, float("inf")))


def _single(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _take_schedules(options: dict[str, Any]) -> dict[str, Schedule]:
    """Replace lists and functions in the options by their first value and return them."""
    # A tensor with one element is a rate on a device, as in torch, not a list of one.
    given = {k: options[k] for k in SCHEDULED if k in options and not _single(options[k])}
    found = {key: resolve_lr(value, name=key) for key, value in given.items()}
    schedules = {key: schedule for key, schedule in found.items() if schedule is not None}
    for key, schedule in schedules.items():
        options[key] = schedule(0)
    return schedules
