"""Base class of the optimizers: parameters, groups, learning rates, gradient transforms. A rule adds the update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchboost.core.torch_private import not_traced
from torchboost.errors import IncompatibleError
from torchboost.optim.pipeline import (
    Gradients,
    GradientTransform,
    check_gradients,
    check_transforms,
    transform_gradients,
)
from torchboost.optim.rules.loading import Saved, check_entry, check_number_entry, hide, in_order
from torchboost.optim.rules.masters import (
    IN_CACHE,
    LOW_PRECISION,
    Stamps,
    check_narrow,
    has_master,
    pieces,
    widened,
)
from torchboost.optim.rules.options import (
    Nonfinite,
    Schedule,
    check_group_names,
    check_options,
    full_signature,
    take_schedules,
)
from torchboost.optim.tensors import Batch, Checked, all_finite, forget_scale, holds_a_part, stand_in
from torchboost.optim.transforms import with_centralization

SET_BY_SCHEDULE = "scheduled_"
"""Prefix of a group's key for the value a schedule wrote last. If the option differs, it was set by hand."""


class UpdateRule(Optimizer):
    """Base class of the optimizers. A rule implements :meth:`init_state` and :meth:`update`.

    It behaves like an optimizer of ``torch.optim``: ``param_groups`` is a plain list whose entries may be set at any
    time, ``state_dict`` has torch's layout, and hooks, schedulers, ``GradScaler``, ``deepcopy`` and pickling work.

    A step checks everything first. If it raises, nothing was changed.

    All rules of this package have ``maximize``, to maximize the objective instead of minimizing it, and
    ``master_weights``, to keep a float32 copy of bfloat16 and float16 parameters, and their state in float32.

    Args:
        params: Parameters, named parameters or groups.
        defaults: Options that a group does not set. ``"lr"`` and ``"weight_decay"`` are at least 0, and may be a float,
            a list with an element per update, or a function of the update (counted from 0), and ``"lr"`` also a tensor
            with one element.
        transforms: Applied to the gradients of all groups together before the update, in order, in place. A group with
            ``"grad_centralization": True`` is centralised even if ``Centralize`` is not among them.
        nonfinite: Handling of inf and nan in the gradients: ``"ignore"`` as torch does, ``"skip"`` the update, or
            ``"raise"`` before it. The check costs one more read of the gradients.

    Raises:
        TypeError, ValueError: An option or a transform is invalid.
    """

    kernel_unscales: bool = False
    """Whether the fused form of the update divides by ``grad_scale`` and honours ``found_inf``."""

    in_pieces: bool = False
    """Whether :meth:`update` gets CPU parameters a few at a time, for rules that read their tensors many times."""

    real_only: bool = False
    """Whether complex parameters are refused."""

    late: tuple[str, ...] = ()
    """Entries of the state that are None until the first gradient."""

    keeps_weights: bool = False
    """Whether the state holds weights, from which an update computes the new ones."""

    numbers: tuple[str, ...] = ()
    """Entries of the state, other than ``"step"``, that are numbers and keep their precision when they are loaded."""

    kept: tuple[str, ...] = ("transforms", "nonfinite", "_schedules", "_default_schedules")
    """Attributes that a copy or a pickle includes, in addition to those of ``torch.optim.Optimizer``."""

    @property
    def title(self) -> str:
        """The name of the rule, in words."""
        return type(self).__name__

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__signature__ = full_signature(cls)

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
        self._stamps = Stamps()
        self._checked = Checked()
        defaults.setdefault("differentiable", False)  # torch adds it when it unpickles
        self._default_schedules = take_schedules(defaults)
        super().__init__(params, defaults)

    def init_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the initial state of a parameter or its master: zeros, for each name of :meth:`state_keys`."""
        near = group.get("fused") or group.get("capturable")
        step = torch.zeros((), dtype=torch.float32, device=param.device if near else "cpu")
        keys = self.state_keys(group)
        zeros = {key: torch.zeros_like(param, memory_format=torch.preserve_format) for key in keys if key != "step"}
        return {"step": step, **zeros} if "step" in keys else zeros

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the entries that :meth:`init_state` returns with these options."""
        raise NotImplementedError

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """Change the parameters and states of a batch in place."""
        raise NotImplementedError

    def rule_for(self, group: Mapping[str, Any]) -> UpdateRule:
        """Return the rule of a param group: this one, unless groups may differ."""
        return self

    def defaults_for(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of a param group that does not set them, including its rule's."""
        return {**self.rule_for(group).defaults, **self.defaults}

    def adopted(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group of a checkpoint as this rule reads it. Called by :meth:`load_state_dict`."""
        now = {key: value for key, value in group.items() if key != "moments_8bit"}  # an option of earlier versions
        return {**now, "master_weights": True} if now.get("master_weights") == "stochastic" else now

    def described_groups(self) -> list[dict[str, Any]]:
        """Return copies of the param groups with schedules instead of the values of the last update.

        A value that was set by hand over a schedule remains a number.
        """
        described = []
        for group, rules in zip(self.param_groups, self._schedules, strict=True):
            acting = {key: rule for key, rule in rules.items() if not _by_hand(group, key)}
            kept = {key: value for key, value in group.items() if not key.startswith(SET_BY_SCHEDULE)}
            described.append({**kept, **acting})
        return described

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} (", f"transforms: {self.transforms!r}", f"nonfinite: {self.nonfinite!r}"]
        for number, group in enumerate(self.described_groups()):
            options = [(key, group[key]) for key in sorted(group) if key != "params"]
            lines += [f"Parameter Group {number}", *(f"    {key}: {value!r}" for key, value in options)]
        return "\n".join([*lines, ")"])

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse options that exclude each other in this rule, with ``ValueError``."""

    def check_grad(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        """Refuse a gradient that the rule cannot use. By default only dense ones of the parameter's precision pass.

        Called after the transforms. ``param`` is the float32 master if there is one. Not called again for dense
        gradients of the same parameters and precision, until a flag of the group or the layout of a parameter changes.

        Raises:
            IncompatibleError: The gradient cannot be used.
        """
        if grad.layout is not torch.strided:
            raise IncompatibleError(
                f"{type(self).__name__} needs dense gradients, found layout {grad.layout} for a parameter of shape "
                f"{tuple(param.shape)}. Use LazyAdam, sparse=False, or transforms=(Coalesce(dense=True),)."
            )
        if self.real_only and param.is_complex():
            raise IncompatibleError(
                f"{type(self).__name__} needs real parameters, found {param.dtype} of shape {tuple(param.shape)}."
            )
        if grad.dtype != param.dtype:
            raise IncompatibleError(
                f"{type(self).__name__} found a gradient in {grad.dtype} for a parameter in {param.dtype} of shape "
                f"{tuple(param.shape)}. Give both the same precision."
            )

    def _check_state(self, param: Tensor, state: Mapping[str, Any]) -> None:
        """Refuse a saved state that the rule cannot use, with ``ValueError``, before anything is loaded."""
        if "past" in state:
            raise ValueError(
                f"the checkpoint is of a LazyAdam whose rows have steps to make, which {type(self).__name__} cannot "
                "do; load it into LazyAdam, call catch_up(), and save it again."
            )

    @property
    def chain(self) -> tuple[GradientTransform, ...]:
        """The transforms, including centralisation if a group has ``"grad_centralization": True``."""
        return with_centralization(self.transforms, self.param_groups)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler reads this name: if True, the fused kernel unscales and skips. If something here needs
        # unscaled gradients, or must know whether there was an update, GradScaler unscales and skips before the step.
        needs_truth = self.chain or self.nonfinite != "ignore" or any(self._schedules)
        return self.kernel_unscales and not needs_truth and all(group.get("fused") for group in self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Missing options get the defaults.

        A schedule of the new group starts at the update that the other groups have reached. To start it at its
        beginning, give ``"updates": 0`` in the group.

        Raises:
            TypeError, ValueError: An option is invalid. Nothing was added.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group: found {type(param_group).__name__}; give a dict with the key 'params'.")
        if param_group.keys() == {"order_params"}:  # MindSpore's, but no update depends on the order
            known = {param for group in self.param_groups for param in group["params"]}
            if not known.issuperset(param_group["order_params"]):
                raise ValueError("order_params: found a parameter that is in no group before it; add its group first.")
            return
        defaults = self.defaults_for(param_group)
        check_group_names(param_group, defaults)
        if "params" not in param_group:
            raise ValueError(f"param_group: found the keys {sorted(param_group)}; give 'params' too.")
        members = param_group["params"]
        group = {**param_group, "params": [members] if isinstance(members, Tensor) else list(members)}
        schedules = {key: rule for key, rule in self._default_schedules.items() if key not in group}
        schedules |= take_schedules(group)
        if schedules and "updates" not in group:
            steps = [state["step"] for state in self.state.values() if "step" in state]
            counted = [other["updates"] for other in self.param_groups if "updates" in other]
            group["updates"] = int(max(counted or steps, default=0))
        complete = {**defaults, **group}
        complete |= {SET_BY_SCHEDULE + key: complete[key] for key in schedules}
        bare = [param[1] if isinstance(param, tuple) else param for param in group["params"]]  # some are named
        self._check_values({**complete, "params": bare})
        super().add_param_group(complete)
        self._schedules.append(schedules)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, after the closure, which renews them and returns the loss.

        Raises:
            IncompatibleError: The rule cannot use a gradient.
            FloatingPointError: The gradients contain inf or nan, and ``nonfinite="raise"``.
            IndexError: A list of learning rates has no entry for this update.
            TypeError, ValueError: An option in a group is invalid or was removed.
        """
        if torch.compiler.is_compiling():
            wide = any(group.get("master_weights") for group in self.param_groups)
            if wide or self.chain or self.nonfinite != "ignore":  # traced, it would not do the same
                return _untraced(self, closure)
        return self._take_step(closure)

    def _take_step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scheduled = self._scheduled()
        before = list(map(dict, self.param_groups))
        fresh: list[tuple[Tensor, dict[str, Any]]] = []
        perform = None
        try:
            self._check_whole()
            for number, (group, values) in enumerate(zip(self.param_groups, scheduled, strict=True)):
                group.update(values)
                self._checked.options(number, group, self._check_options)
            work = [self._gather(group, fresh) for group in self.param_groups]
            perform = self.prepare(work)
        except BaseException:
            forget_scale(self)
            raise
        finally:
            if perform is None:
                for group, old in zip(self.param_groups, before, strict=True):
                    group.clear()
                    group.update(old)
        if perform is None:
            return loss
        self.state.update(fresh)
        perform()
        for group, batch in zip(self.param_groups, work, strict=True):
            if group.get("master_weights"):
                self._stamps.write_back(group, batch)
            if "updates" in group:
                group["updates"] += 1
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {key: self.__dict__[key] for key in self.kept if key in self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stamps, self._checked = Stamps(), Checked()  # the loaded state may be of another model
        for group, schedules in zip(self.param_groups, self._schedules, strict=True):
            for key, value in self.defaults_for(group).items():
                group.setdefault(key, value)
            states = {param: self.state[param] for param in group["params"] if param in self.state}
            for param, entries in states.items():
                for key, value in entries.items():
                    if isinstance(value, Saved):
                        entries[key] = self._loaded(param, group, key, value.value)
            if schedules:  # torch's checkpoints do not count updates, except in Adam's state
                counts = [int(entries.get("step", 0)) for entries in states.values()]
                group.setdefault("updates", max(counts, default=0))

    def _loaded(self, param: Tensor, group: Mapping[str, Any], key: str, value: Any) -> Any:
        """Return an entry of a checkpoint in the precision and on the device that it has here."""
        rule = self.rule_for(group)
        if key == "step":
            # Read at each update: on a device, it would be waited for. A kernel reads its steps there itself.
            near = group.get("fused") or group.get("capturable")
            # SparseAdam's is a number.
            return torch.as_tensor(value, dtype=torch.float32).to(param.device if near else "cpu", copy=True)
        if not isinstance(value, Tensor):
            return deepcopy(value)
        if key in rule.numbers:
            return value.to("cpu", copy=True)
        wide = has_master(param, group) or not param.is_floating_point()
        cast = key in rule.state_keys(group) and value.is_floating_point() and not wide
        return value.to(param.device, param.dtype if cast else value.dtype, copy=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this rule, or of torch's if the rule is the same. Tensors are copied.

        If both sides name their parameters, states are matched by name, otherwise by position as in torch. The state
        of low-precision parameters with masters remains in float32. A file of torch's SGD does not hold the number of
        updates: with a list or function as ``lr``, set ``"updates"`` in the groups after loading it.

        Raises:
            ValueError: The groups differ, a state is of another rule or damaged, has not the shape of its parameter, or
                moments are in 8 bits, as earlier versions could keep them. Nothing was changed.
        """
        state_dict = in_order(state_dict, self.param_groups)
        if len(state_dict["param_groups"]) == len(self.param_groups):  # torch refuses others
            rules = [self.rule_for(group) for group in self.param_groups]
            groups = [rule.adopted(saved) for rule, saved in zip(rules, state_dict["param_groups"], strict=True)]
            state_dict = {**state_dict, "param_groups": groups}
            _check_states(state_dict, rules, self.param_groups)
        handle = self.register_load_state_dict_pre_hook(hide)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def _check_options(self, group: Mapping[str, Any]) -> None:
        missing = self.defaults_for(group).keys() - group.keys()
        if missing:
            raise ValueError(f"a param group has no {sorted(missing)[0]!r}; add groups with add_param_group.")
        self._check_values(group)

    def _check_values(self, group: Mapping[str, Any]) -> None:
        check_options(group)
        self.rule_for(group).check_group(group)

    def _scheduled(self) -> list[dict[str, float]]:
        if len(self._schedules) != len(self.param_groups):
            raise ValueError(
                f"found {len(self.param_groups)} param groups, but {len(self._schedules)} were added. The entries of a "
                "group may change; add groups with add_param_group, and do not remove any."
            )
        values = []
        for group, schedules in zip(self.param_groups, self._schedules, strict=True):
            if "lr" in schedules and "initial_lr" in group:
                raise IncompatibleError(
                    "a learning-rate scheduler is attached to a group whose lr is already a list or a function; use "
                    "one of the two. A trainer that creates its own scheduler accepts yours instead, for example "
                    "transformers.Trainer(optimizers=(optimizer, torchboost.optim.ScheduleLR(optimizer, schedule)))."
                )
            due = {key: rule(group["updates"]) for key, rule in schedules.items() if not _by_hand(group, key)}
            values.append(due | {SET_BY_SCHEDULE + key: value for key, value in due.items()})
        return values

    def _gather(self, group: dict[str, Any], fresh: list[tuple[Tensor, dict[str, Any]]]) -> Batch:
        """Return the batch of a group. States that are new or get new entries are only listed in ``fresh``."""
        rule = self.rule_for(group)
        keys = frozenset(rule.state_keys(group))
        params = [param for param in group["params"] if param.grad is not None]
        known: list[Any] = list(map(self.state.get, params))
        batch = Batch(params, [param.grad for param in params], known)
        masters = group.get("master_weights") and not set(LOW_PRECISION).isdisjoint(map(attrgetter("dtype"), params))
        for position, kept in enumerate(known):
            if not masters and kept is not None and keys <= kept.keys() and "master" not in kept:
                continue  # the usual case, kept fast: a model may have thousands of small parameters
            param = params[position]
            worked, grad, state = self._worked(param, {} if kept is None else kept, group)
            if not keys <= state.keys():
                state = {**rule.init_state(worked, group), **state}
            if state is not kept:
                fresh.append((param, state))
            params[position], batch.grads[position], known[position] = worked, grad, state
        return batch

    def _worked(
        self, param: Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return the tensor to update (the parameter or its master), its gradient and its state."""
        wide = has_master(param, group)
        if not wide and "master" in state:
            check_narrow(param, state, ("master",))
        if not wide:
            return param, param.grad, state
        if "master" not in state:
            state = {key: widened(value) for key, value in state.items()} | {"master": param.detach().float()}
        elif (master := self._stamps.current(param, state["master"])) is not state["master"]:
            state = {**state, "master": master}
        # Merging rows loses less in float32. Dense gradients are cast later, piece by piece.
        grad = param.grad
        return state["master"], widened(grad) if grad is not None and grad.is_sparse else grad, state

    def prepare(self, work: Sequence[Batch]) -> Callable[[], None] | None:
        """Do everything that can fail. Return a function that does the update, or None if it must be skipped."""
        chain = self.chain
        if not chain:
            grads = [grad for batch in work for grad in batch.grads]
            self._check_grads(work, grads)
            return partial(self._update_all, work) if self._usable(grads) else None
        # Transforms look at all gradients, for masters in the master's precision.
        gradients = Gradients([], [], [])
        for group, batch in zip(self.param_groups, work, strict=True):
            pairs = zip(batch.grads, batch.states, strict=True)
            batch.grads[:] = [widened(grad) if "master" in state else grad for grad, state in pairs]
            gradients.params += batch.params
            gradients.grads += batch.grads
            gradients.groups += [group] * len(batch.params)
        expected = check_gradients(chain, gradients)
        foretold = all(hasattr(transform, "check") for transform in chain)
        if foretold:
            self._check_grads(work, expected)
        if not self._usable(gradients.grads):
            return None
        transform_gradients(chain, gradients)
        start = 0
        for batch in work:
            batch.grads[:] = gradients.grads[start : start + len(batch.grads)]
            start += len(batch.grads)
        if not foretold:
            self._check_grads(work, gradients.grads)
        return partial(self._update_all, work) if self._usable(gradients.grads) else None

    def _check_whole(self) -> None:
        """Refuse to look across parameters if this optimizer holds a part of them only."""
        joint = [repr(transform) for transform in self.transforms if getattr(transform, "joint", False)]
        joint += [] if self.nonfinite == "ignore" else [f"nonfinite={self.nonfinite!r}"]
        if not joint or self.__dict__.get("_whole") or torch.compiler.is_compiling():
            return
        if holds_a_part(self):
            raise IncompatibleError(
                f"ZeroRedundancyOptimizer gives this rank a part of the parameters, and {joint[0]} looks at all of "
                "them. Attach GradientPipeline to the ZeroRedundancyOptimizer, or use fully_shard (FSDP2)."
            )
        self._whole = True

    def _check_grads(self, work: Sequence[Batch], grads: Sequence[Tensor]) -> None:
        """Run :meth:`check_grad` on each gradient as it will be. A master gets one of its precision."""
        start = 0
        for number, (group, batch) in enumerate(zip(self.param_groups, work, strict=True)):
            part = grads[start : start + len(batch.params)]
            start += len(part)
            batch.layout = self._checked.layout(number, batch.params, part)
            if batch.layout is not None:
                continue
            rule = self.rule_for(group)
            for param, grad, state in zip(batch.params, part, batch.states, strict=True):
                if param.dtype in LOW_PRECISION and not group.get("master_weights"):
                    check_narrow(param, state, rule.state_keys(group))
                narrow = state.get("master") is param and grad.dtype in LOW_PRECISION and not grad.is_sparse
                rule.check_grad(param, stand_in(grad, param.dtype) if narrow else grad, group)
            self._checked.note(number, batch.params, part)

    def _usable(self, grads: Sequence[Tensor]) -> bool:
        """Whether ``nonfinite`` allows an update with these gradients."""
        if self.nonfinite == "ignore" or all_finite(grads):
            return True
        if self.nonfinite == "raise":
            raise FloatingPointError("the gradients contain inf or nan; the update was skipped.")
        return False

    def _update_all(self, work: Sequence[Batch]) -> None:
        for group, batch in zip(self.param_groups, work, strict=True):
            rule = self.rule_for(group)
            for part in pieces(batch, IN_CACHE if rule.in_pieces else None) if batch.params else ():
                rule.update(group, part)


@not_traced
def _untraced(optimizer: UpdateRule, closure: Callable[[], Any] | None) -> Any:
    return optimizer._take_step(closure)


def _by_hand(group: Mapping[str, Any], key: str) -> bool:
    """Whether the group's value differs from the one that the schedule wrote."""
    return SET_BY_SCHEDULE + key in group and bool(group[key] != group[SET_BY_SCHEDULE + key])  # not in older files


def _check_states(
    state_dict: Mapping[str, Any], rules: Sequence[UpdateRule], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse damaged states, and those of another rule, in which zeros would replace the missing entries."""
    position = 0
    for rule, group, saved in zip(rules, groups, state_dict["param_groups"], strict=True):
        names = rule.state_keys({**rule.defaults, **saved})
        for param, index in zip(group["params"], saved["params"], strict=False):
            state = state_dict["state"].get(index, {})
            if "exp_avg_scale" in state:
                raise ValueError(
                    "the checkpoint holds moments in 8 bits, which are not supported any more; in the version that "
                    "wrote it, set moments_8bit=False in the groups, make a step, and save it again."
                )
            missing = [key for key in rule.state_keys(rule.defaults) if key in names and key not in state]
            if state and missing:
                raise ValueError(
                    f"the checkpoint holds {sorted(state)} of a parameter, but not {missing[0]!r}, so it was "
                    f"written by another rule than {type(rule).__name__}; load it with that rule, or begin without it."
                )
            for key in (key for key in (*names, "master") if key in state):
                if key == "step" or key in rule.numbers:
                    check_number_entry(param, key, state[key])
                elif state[key] is not None or key not in rule.late:
                    check_entry(param, key, state[key], position)
            if state:
                rule._check_state(param, state)
            position += 1
