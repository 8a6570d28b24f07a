"""The front door: boost a model and its optimizer in one line. The training loop does not change."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Never

from torchboost.algorithms.grad_accumulation import Accumulator, GradAccumulation
from torchboost.algorithms.grad_accumulation.optimizer import AccumulatingOptimizer
from torchboost.calibration.calibration import Calibrate, resolved
from torchboost.calibration.choice import Choice
from torchboost.calibration.waste import WasteReport
from torchboost.config import BoostConfig, ConfigSource, naming_file
from torchboost.core.algorithm import LEVERS, Algorithm, AttachedAlgorithms, Scaler, Target, restored_on_error
from torchboost.core.arguments import (
    check_loss_fn,
    check_module,
    check_pair,
    check_shapes,
    in_words,
    warn_of_foreign_parameters,
)
from torchboost.core.step import TrainStep
from torchboost.core.torch_private import step_post_hooks
from torchboost.core.wrapping import already_wrapped, hookable, parameters_of, wrapper_of
from torchboost.errors import ConfigError, IncompatibleError, warn_no_effect
from torchboost.graph.trace import shared_traces
from torchboost.inference import fast_copy
from torchboost.levers import Levers
from torchboost.optim.named import check_given, named_optimizer
from torchboost.optim.recipe import apply_recipe
from torchboost.optim.rules.options import hint_for
from torchboost.optim.rules.schedule_free import warn_of_training_weights
from torchboost.plan import Plan
from torchboost.registry import Facts, Host, Loop
from torchboost.tasks import Task, with_task

_LONG_RUN = 1_000_000
"""A run of so many steps repays the start-up cost of every algorithm."""

_HERE = {
    "boost_config_dict": "config=",
    "boost_level": "level=",
    "amp_level": 'config={"extra": {"autocast": True}}',
    "loss_scale_manager": "scaler=",
    "loss_fn": "boosted.step(loss_fn)",
}
"""MindSpore's name of an argument -> its replacement."""

# A second boost of a model finds the first one here. Both sides are weak: a model keeps no optimizer alive.
_BOOSTED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Boosted]] = weakref.WeakKeyDictionary()


class Boosted:
    """A boosted model and its optimizer. It unpacks into the pair.

    Attributes:
        model: The given model, changed in place.
        optimizer: The optimizer to schedule and to step. This is the given optimizer, unless a recipe has built another
            one, or gradient accumulation or dimension-reduced training wraps it in another one. If a list was given,
            the list of its optimizers.
        levers: The attachments, the open decisions, and who decided. See :class:`~torchboost.levers.Levers`.
        scaler: The loss scaler of the loop: the given one, or the one that group loss scaling adds. The loop uses
            either like a ``GradScaler``. None without loss scaling.
    """

    def __init__(
        self,
        levers: Levers,
        target: Target,
        given: Optimizer,
        scaler: Scaler | None,
        *,
        replaced: Sequence[Optimizer] = (),
        listed: bool = False,
    ) -> None:
        self.levers, self._target, self._given, self._replaced = levers, target, given, tuple(replaced)
        self.model, self.scaler = target.model, target.scaler
        self._called: nn.Module = target.model
        self._warned = False
        self.brings_scaler = target.scaler is not scaler
        self._first: Optimizer = target.optimizer
        if isinstance(target.accumulator, Accumulator):
            front = AccumulatingOptimizer(target.optimizer, target.accumulator)
            self.attached[GradAccumulation.name].with_undo(front.direct.remove)
            self._first = front
        self.optimizer: Any = [self._first, *target.others] if listed else self._first
        for optimizer in {id(o): o for o in map(hookable, (given, self._first, *target.others, *replaced))}.values():
            if len(self.attached) or levers.due or levers.asked.built:
                self.attached.with_undo(optimizer.register_step_post_hook(_Mark(self)).remove)

    @property
    def plan(self) -> Plan:
        """The algorithms that run, and with reasons those that do not, such as levers that wait for the trial."""
        return self.levers.plan

    @property
    def steps(self) -> int | None:
        """The number of updates to train: ``recipe.length`` of ``total_steps``. None without ``total_steps``."""
        return self.levers.asked.total_steps

    @property
    def attached(self) -> AttachedAlgorithms:
        """The attachments, by the name of their algorithm."""
        return self.levers.attached

    @property
    def choice(self) -> Choice | None:
        """The choice of speed levers, by the trial or from a checkpoint. None before the first training call."""
        return self.levers.choice

    @property
    def checks(self) -> dict[str, str]:
        """Lever -> how far its step is from the plain one, in words, as compared at the first training call."""
        return self.levers.checks

    @property
    def withdrawn(self) -> dict[str, str]:
        """The algorithms that :meth:`withdraw` took out of this run, with the reasons."""
        return self.levers.withdrawn

    @property
    def _all_given(self) -> tuple[Optimizer, ...]:
        return self._given, *self._target.others

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer))

    def __repr__(self) -> str:
        return f"Boosted(level={self.plan.level!r}, algorithms=[{', '.join(self.attached)}])"

    def explain(self) -> str:
        """Return a table: what runs, its effect and exactness, then what does not run and why, and what to do next.

        A notebook shows the same for the object itself.
        """
        return str(self.levers.explanation().sheet)

    def _repr_html_(self) -> str:
        return self.levers.explanation().sheet._repr_html_()

    def step(
        self, loss_fn: Callable[..., Tensor | tuple[Tensor, float]] | None = None, model: nn.Module | None = None
    ) -> TrainStep:
        """Return a training step: forward, backward, update, with accumulation and loss scaling if the plan has them.

        Use it instead of a loop that steps :attr:`optimizer`.

        Args:
            loss_fn: Called as ``loss_fn(model(*inputs[:-1]), inputs[-1])``. It returns a loss of shape ``()``, or the
                loss and the number of samples or tokens over which it is averaged. If it is None, the model itself must
                return this.
            model: The model as the loop calls it, if it was wrapped in DDP after :func:`boost`.

        Raises:
            TypeError: ``loss_fn`` cannot be called, or ``model`` is not a module.
        """
        if loss_fn is not None:
            check_loss_fn(loss_fn)
        if model is not None:
            check_module(model)
            self._called = model  # the target keeps the bare model: the trial copies it, and levers are attached to it
            if isinstance(self._target.accumulator, Accumulator):
                self._target.accumulator.model = model
        if isinstance(self._first, AccumulatingOptimizer):
            self._first.direct.remove()  # the step knows when a window is full, and steps the inner optimizer

        def loss(*inputs: Any) -> Tensor | tuple[Tensor, float]:
            return self._called(*inputs) if loss_fn is None else loss_fn(self._called(*inputs[:-1]), inputs[-1])

        return TrainStep(self._target, loss, attached=self.attached)

    def eval_model(self, sample: Any = None) -> nn.Module:
        """Return a fast copy for inference with BatchNorm folded. The model itself can continue to train.

        See :func:`torchboost.inference.fast_copy`, also for the errors.

        Args:
            sample: An example input of the copy: a tensor, a tuple of positional arguments or a dict of keyword
                arguments. If it is given, the fastest form on this machine is chosen by measurement.

        Warns:
            UserWarning: Once, if a schedule-free optimizer is in training mode, so that the copy is not of its average.
        """
        what = "the copy for inference has"
        for optimizer in self._target.optimizers:
            self._warned = self._warned or warn_of_training_weights(optimizer, what, stacklevel=3)
        return fast_copy(self.model, sample=sample)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without the states of model, optimizer and the loop's scaler."""
        state: dict[str, Any] = {"attached": dict(self.levers.final or self.attached.state_dict())}
        levers = state["attached"].pop(LEVERS, None)
        if self.choice is not None:
            state["choice"] = self.choice.model_dump_json()
        elif levers:
            state["levers"] = levers
        if self.withdrawn:
            state["withdrawn"] = dict(self.withdrawn)
        if self.brings_scaler and self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. Algorithms that had been withdrawn are withdrawn here too.

        Raises:
            ValueError: The checkpoint is of other algorithms or damaged. Only what it had withdrawn is withdrawn.
        """
        scalers = [self.scaler] if self.brings_scaler and self.scaler is not None else []
        needed, written = {"attached", *(["scaler"] if scalers else [])}, set(state) - {"choice", "levers", "withdrawn"}
        if written != needed:
            found = [f"has {' and '.join(sorted(written - needed))}"] if written - needed else []
            found += [f"lacks {' and '.join(sorted(needed - written))}"] if needed - written else []
            raise ValueError(
                f"the checkpoint {' and '.join(found)}, unlike this boosted model; boost the model with the level, the "
                "configuration and the scaler that the checkpoint was written with."
            )
        chosen = Choice.saved(state)
        for name, reason in state.get("withdrawn", {}).items():
            self.withdraw(name, reason)
        with restored_on_error(*scalers):
            for scaler in scalers:
                scaler.load_state_dict(state["scaler"])
            self.attached.load_state_dict(state["attached"], awaited=chosen.kept if chosen is not None else ())
        self.levers.follow(chosen)

    def withdraw(self, name: str, reason: str) -> None:
        """Remove one algorithm from the run, also a lever that waits. No later trial turns it on again.

        The checkpoint keeps that. If the plan does not have the algorithm, nothing happens. :meth:`explain` shows the
        reason.
        """
        self.levers.withdraw(name, reason)

    def figures(self) -> dict[str, float]:
        """Return numbers for a log: 1 for each algorithm that is on, the state of each, and the loss scale.

        For TensorBoard: ``for name, value in boosted.figures().items(): writer.add_scalar(name, value, step)``.
        """
        figures = dict.fromkeys((f"boost/{name}" for name in self.attached), 1.0)
        for name in self.attached:
            figures |= {f"boost/{name}/{key}": value for key, value in self.attached[name].figures().items()}
        if self.scaler is not None:
            figures["boost/loss_scale"] = float(self.scaler.get_scale())
        return figures

    def waste(self, *args: Any, **kwargs: Any) -> WasteReport:
        """Measure the work of a training step that cannot change its result. Nothing changes.

        It looks for padding, the output head at positions without a label, masks that mask nothing, activation
        checkpointing that the memory does not need, the forward pass of frozen layers, and host synchronisations. Work
        that can be skipped is timed in pairs of steps. Call it in training mode with the arguments of a training call:
        ``print(boosted.waste(*inputs))``, or ``**batch`` for a dict. ``torchboost doctor`` measures the wait for data.

        Returns:
            Each kind with its seconds and its share of a plain step, how it was found and what removes it. From then
            on, :meth:`explain` shows the kinds above 10 % that remain.

        Raises:
            IncompatibleError: The call is not a training call, a part of the model is compiled or sharded, the memory
                does not suffice, two equal passes of the model differ, or a step of the optimizer needs a closure.

        Cost: at least 20 steps, and up to some seconds for each kind that is there.

        Example:
            >>> import torch, torchboost
            >>> model = torch.nn.Linear(4, 2)
            >>> boosted = torchboost.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=2000)
            >>> [waste.kind for waste in boosted.waste(torch.ones(3, 4)).kinds][0]
            'padding'
        """
        return self.levers.waste((args, kwargs))

    def remove(self) -> None:
        """Remove everything that was attached. BatchNorm layers that ``less_bn`` removed do not come back.

        Rates that a recipe has scaled are given back, unless they have changed since, as by a schedule. An optimizer
        that a recipe has built is unchanged and may train on. The given one, which never moved, may be stepped again.
        """
        self.attached.remove()


class _Mark:
    """A hook that tells of updates. It leads from an optimizer to the :class:`Boosted` that it belongs to."""

    def __init__(self, boosted: Boosted) -> None:
        self.boosted, self._checked = boosted, False

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._checked:
            self._checked = True
            warn_of_foreign_parameters(self.boosted.model, optimizer)
        self.boosted.levers.note_update()


def boosted_of(optimizer: Optimizer) -> Boosted | None:
    """Return the :class:`Boosted` of an optimizer that :func:`boost` received or returned. None without one."""
    marks = [hook for hook in step_post_hooks(hookable(optimizer)).values() if isinstance(hook, _Mark)]
    return marks[-1].boosted if marks else None


def boost(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | str,
    level: str = "O1",
    *,
    lr: float | None = None,
    adamw_lr: float | None = None,
    task: Task | None = None,
    total_steps: int | None = None,
    config: ConfigSource | None = None,
    scaler: Scaler | None = None,
    loop: Loop = "own",
    calibrate: Calibrate = "auto",
    verify: bool = True,
    **_unknown: Never,
) -> Boosted:
    """Make the training of a model faster within the accuracy that a level promises. The loop does not change.

    Call it on the bare model, on the device that it will train on, before DDP and ``torch.compile``. For FSDP2, which
    replaces the parameters, see :func:`prepare`. A second call for the same model first removes the attachments of the
    first one. If several optimizers train the model, pass them all in one call.

    Args:
        model: Changed in place.
        optimizer: Any ``torch.optim.Optimizer`` over parameters of the model. It follows parameters that are replaced.
            Or the name of one to build: ``"muon"`` or ``"schedule_free_adamw"``
            (:func:`~torchboost.optim.named_optimizer`). No level changes the optimizer by itself. Or a list of
            optimizers, each over parameters of its own, such as Muon for the matrices and AdamW for the rest: the loop
            steps all of them. Algorithms that work with one optimizer only, such as gradient freezing, are then
            dropped.
        level: ``"O0"`` changes nothing. ``"O1"`` turns on switches, which change neither the network nor the update
            rule. The accuracy remains within 0.5 points. ``"O2"`` also removes BatchNorms, centralises gradients and
            freezes the first blocks late in the run. The accuracy remains within 3 points. See ``docs/levels.md`` for
            the algorithms of each level and the measurements.
        lr: Learning rate of an optimizer that is given by name. With ``"muon"`` it is the rate of the hidden matrices,
            and None takes 0.02. Otherwise None takes 0.001.
        adamw_lr: Learning rate of the parameters that ``"muon"`` leaves to AdamW. None takes 0.001.
        task: ``"fine_tune"`` freezes and caches the first half of the blocks (:func:`torchboost.fine_tuning`).
        total_steps: Number of updates in the whole run. Gradient freezing and compilation need it. In a run of fewer
            than 1,000 ``"O2"`` turns on what ``"O1"`` does. None counts as a long run.
        config: Settings that override the level: a dict, a path to a JSON file, JSON text, or a :class:`BoostConfig`.
            If it has a recipe, as the result of :func:`torchboost.tune` may have, the optimizer is built and its rates
            are scaled first. Build the schedule after this call, on ``boosted.optimizer``, for ``boosted.steps``
            updates, and train as many.
        scaler: The ``GradScaler`` of the loop. Autocast to float16 needs one.
        loop: Who owns the training loop: ``"own"``, or a trainer: ``"transformers"``, ``"lightning"`` or
            ``"accelerate"``. A trainer accumulates gradients and scales the loss itself, so both are dropped.
        calibrate: Whether to measure which speed levers pay, such as unpadding, autocast and compilation. The first
            training call tries them with the inputs that arrive, and attaches those that make a step faster. ``"auto"``
            spends at most 1 % of ``total_steps`` and at most 60 s on it, in runs of fewer than 4,000 updates up to 40
            steps and 4 %, and without ``total_steps`` the time of 30 steps. Below 300 updates it measures nothing. A
            number is the seconds to spend. False measures nothing. Levers that are not measured are chosen by the kind
            of the machine and the model. Levers that ``config`` names under ``extra`` are not measured.
        verify: Whether to compare, at the first training call, a step with the speed levers that are on with a plain
            one: all outputs and every gradient, on the inputs that arrive. Levers must agree up to rounding, autocast
            within a stated bound (``docs/calibration.md``). A lever that does not is dropped with the number. It costs
            6 to 24 steps, and is repeated once when the shapes of the inputs change.

    Returns:
        The boosted pair: ``model, optimizer = boost(...)``, or keep the object for ``explain()``, ``state_dict()``,
        ``remove()``, ``eval_model()`` and ``step(loss_fn)``.

    Raises:
        TypeError: An argument is not a module, an optimizer, a scaler or a number of steps.
        ValueError: No parameter of an optimizer belongs to the model, two optimizers hold the same parameter, the list
            is empty, ``total_steps`` is below 1, there is no optimizer of this name, a module is lazy, or a learning
            rate is given with an optimizer that has its own.
        ConfigError: An unknown level, section, key or setting, or a value of a wrong type or out of range.
        IncompatibleError: The model is already wrapped, the optimizer was boosted with another model, or an algorithm
            or the recipe cannot work on this pair, such as one with a schedule that was built before. Nothing is
            changed, except that an earlier boost of the pair may be removed.

    Warns:
        NoEffectWarning: Algorithms of the level were dropped, or the recipe does not shorten the run, because
            ``total_steps`` is not given. Or the recipe finds no hidden matrix for Muon. Or the model was boosted with
            another optimizer, over other parameters, or with a list that now lacks one, and that boost is removed.

    Example:
        >>> import torch, torchboost
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = torchboost.boost(model, optimizer, level="O1", total_steps=10_000)
        >>> loss = torch.nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.tensor([0, 1, 0, 1]))
        >>> loss.backward()
        >>> optimizer.step()
    """
    for argument in _unknown:
        raise TypeError(f"boost takes no {argument!r}{hint_for(argument, _TAKEN, _HERE)}")
    if isinstance(optimizer, str):
        with naming_file(config):
            if (other := BoostConfig.load(config).recipe.optimizer) is not None:
                told = {"found": f"{other!r}, and the optimizer {optimizer!r} by name", "allowed": "one of them"}
                raise ConfigError("recipe.optimizer", **told, hint="Give the usual optimizer.")
        optimizer = named_optimizer(optimizer, model, lr, adamw_lr=adamw_lr)
    else:
        check_given(optimizer, lr=lr, adamw_lr=adamw_lr)
    with nullcontext(config) if task is None else with_task(config, task, model) as chosen:
        boosted = attach(
            model,
            optimizer,
            level=level,
            total_steps=total_steps,
            config=chosen,
            scaler=scaler,
            host=Host(loop=loop),
            calibrate=calibrate,
            verify=verify,
        )
    warn_of_missing_length(boosted, chosen, total_steps, loop)
    return boosted


_TAKEN = {name: one for name, one in inspect.signature(boost).parameters.items() if name != "_unknown"}
vars(boost)["__signature__"] = inspect.signature(boost).replace(parameters=list(_TAKEN.values()))


def prepare(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    level: str = "O1",
    total_steps: int | None = None,
    config: ConfigSource | None = None,
) -> Plan:
    """Change the modules of a bare model before it is sharded or wrapped, and return the plan to attach later.

    FSDP2 replaces the parameters, so the optimizer is built after sharding. Prepare the bare model, shard it, build the
    optimizer, then call ``plan.attach(torchboost.Target(model, optimizer))``. Nothing is measured: rules choose levers.

    Args:
        model: Changed in place. It must be on the device that it will train on.
        optimizer: If it exists already, it follows the parameters that are replaced.
        level: See :func:`torchboost.boost`, also for ``total_steps``, ``config`` and the errors.
        total_steps: Updates of the whole run.
        config: Settings that override the level.

    Raises:
        IncompatibleError: The model is already wrapped, or the configuration has a recipe, which only
            :func:`torchboost.boost` applies. Nothing is changed.
    """
    plan = Plan.of(level, config, Facts.measure(model, loop="own"), total_steps=total_steps)
    plan.check_recipe()
    changing = [a for a in plan.algorithms if type(a).applied is not Algorithm.applied]
    idle = [a.name for a in changing if not (a.needs_transform(model) or a.applied(model))]
    plan = replace(plan.without(dict.fromkeys(idle, "it finds nothing to change in this model")), levers=())
    plan.transform(model, optimizer)
    return plan


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    level: str,
    total_steps: int | None,
    config: ConfigSource | None,
    scaler: Scaler | None,
    host: Host,
    calibrate: Calibrate = False,
    verify: bool = True,
    name: str = "model",
    caller: str = "torchboost.boost",
    transformed: bool = False,
) -> Boosted:
    """Do what :func:`boost` does, without its warning. Messages use the caller's names.

    If the modules were ``transformed`` before the model was sharded, algorithms that found nothing to change then are
    dropped.
    """
    listed = isinstance(optimizer, Sequence)
    optimizers: list[Optimizer] = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    if not optimizers:
        raise ValueError("optimizer: found an empty list; give the optimizers that train the model.")
    for one in optimizers:
        check_pair(model, one, name=name)
    calibrate = resolved(calibrate)
    plan = Plan.of(level, config, host.facts(model), total_steps=total_steps)
    if plan.algorithms:
        check_shapes(model)
    wrapper = wrapper_of(model)
    pending = [a.name for a in plan.algorithms if wrapper is not None and a.needs_transform(model)]
    idle = dict.fromkeys(pending, "it found nothing to change before the model was sharded")
    if idle and wrapper is not None and not transformed:
        raise already_wrapped(name, wrapper, caller)
    earlier = {one: before for one in optimizers if (before := boosted_of(one)) is not None}
    for before in earlier.values():
        _check_one_model(before, model, name)
    # An optimizer that stands in front of the user's since an earlier boost gives way to it.
    fronts = {one: before for one, before in earlier.items() if one not in before._replaced}
    inner = {one: before._given for one, before in fronts.items() if not before._target.others}
    given, *others = (inner.get(one, one) for one in optimizers)
    target = Target(model, given, scaler, others=tuple(others))
    at_work = (*(_BOOSTED.get(module, lambda: None)() for module in model.modules()), *earlier.values())
    for before in (removed := [one for one in at_work if one is not None]):
        _warn_of_other_parameters(before, target, caller)
        before.remove()
    if removed:
        plan = Plan.of(level, config, host.facts(model), total_steps=total_steps)
    asked = (given, *others)
    applied = apply_recipe(plan.recipe, asked, model, total_steps=plan.total_steps)
    given, *others = applied.optimizers
    target = replace(target, optimizer=given, others=tuple(others))
    plan = replace(plan.without(idle), built=applied.built)
    try:
        with shared_traces():
            levers = Levers(plan, target, calibrate=calibrate, verify=verify, wrapper=wrapper, host=host)
    except BaseException:
        applied.undo()
        raise
    replaced = [one for one in asked if one not in applied.optimizers]
    boosted = Boosted(levers, target, given, scaler, replaced=replaced, listed=listed)
    boosted.attached.with_undo(applied.undo)
    _BOOSTED[model] = weakref.ref(boosted)
    return boosted


def _warn_of_other_parameters(before: Boosted, target: Target, caller: str) -> None:
    """Warn if an earlier boost goes and an optimizer of it holds other parameters. The loop may step it too."""
    if before.levers.state == "removed" or (not len(before.attached) and not before.levers.due):
        return
    earlier, later = in_words(before._all_given), in_words(target.optimizers)
    held = set(parameters_of(*target.optimizers))
    left = [name for name, one in zip(earlier, before._all_given, strict=True) if held.isdisjoint(parameters_of(one))]
    if left:
        warn_no_effect(
            f"the boost of this model with {' and '.join(earlier)} is removed by the one with {' and '.join(later)}, "
            f"without the parameters of {' and '.join(left)}. If all of them train the model, boost it once, with a "
            f"list: {caller}(model, [first, second]).",
            above=3,
        )


def _check_one_model(earlier: Boosted, model: nn.Module, name: str) -> None:
    """Refuse an optimizer that another model was boosted with. One of them may be a part of the other."""
    if earlier.model in set(model.modules()) or model in set(earlier.model.modules()):
        return
    raise IncompatibleError(
        f"the optimizer of this {name} was boosted with another model, a {type(earlier.model).__name__}; give each its "
        "own optimizer, or put both into one module and boost that; to give up the first boost, call its remove()."
    )


def warn_of_missing_state(boosted: Boosted, log: logging.Logger) -> None:
    """Name the algorithms that start again because a trainer's checkpoint does not have their state."""
    counting = [name for name, state in boosted.state_dict()["attached"].items() if state]
    if counting:
        log.warning(
            "the checkpoint was written without torchboost, so these start as in a new run: %s.", ", ".join(counting)
        )


def warn_of_missing_length(boosted: Boosted, config: ConfigSource | None, total_steps: int | None, loop: Loop) -> None:
    """Warn about algorithms that the level dropped only because ``total_steps`` is missing."""
    if total_steps is not None or not any("total_steps" in entry.reason for entry in boosted.levers.asked.dropped):
        return
    running, facts = {a.name for a in boosted.levers.asked.algorithms}, Facts.measure(boosted.model, loop=loop)
    plan = Plan.of(boosted.plan.level, config, replace(facts, total_steps=_LONG_RUN))
    plan = plan.fit(boosted.model, *boosted._all_given, but=running)
    missed = [algorithm.name for algorithm in plan.algorithms if algorithm.name not in running]
    if missed:
        warn_no_effect(
            f"{boosted.plan.level} runs without {' and '.join(missed)}, which must know the length of the run. "
            "Pass boost(..., total_steps=...), the number of updates.",
            above=2,
        )
