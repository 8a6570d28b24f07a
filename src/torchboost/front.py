"""The front door: boost a model and its optimizer in one line; the training loop stays as it was."""

from __future__ import annotations

import functools
import statistics
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.accumulation import Accumulation, Accumulator
from torchboost.algorithms.accumulation.optimizer import AccumulatingOptimizer
from torchboost.config import ConfigSource
from torchboost.core.algorithm import Attached, Scaler, Target
from torchboost.core.arguments import check_loss_fn, check_module, check_optimizer, check_pair, check_scaler
from torchboost.core.step import TrainStep
from torchboost.core.torch_private import step_pre_hooks
from torchboost.core.wrapping import hookable, wrapper_of
from torchboost.errors import IncompatibleError, NoEffectWarning
from torchboost.graph.recording import call
from torchboost.inference import fast_copy
from torchboost.measure.stopwatch import Clock, Warmup, compare
from torchboost.plan import Plan
from torchboost.registry import Facts, Loop

__all__ = ["Boosted", "boost", "boosted_of", "fastest", "prepare"]

_LONG_RUN = 1_000_000
"""Steps that repay what any algorithm costs at its start."""

# By this a second boost of a model finds the first one. Weak on both sides: a model keeps no optimizer alive.
_BOOSTED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Boosted]] = weakref.WeakKeyDictionary()


class Boosted:
    """A boosted model and its optimizer. It unpacks into the pair.

    Attributes:
        model: The model that was given, changed in place.
        optimizer: The optimizer to step: the one that was given, unless gradient accumulation or dimension-reduced
            training put another one in front of it.
        plan: What runs, and what was left out with the reason.
        attached: What was attached, by the name of its algorithm.
        scaler: The loss scaler of the loop: the one that was given, or the one that group loss scaling brings, which
            the loop uses like a ``GradScaler``. None without loss scaling.
    """

    def __init__(self, plan: Plan, target: Target, attached: Attached, given: Optimizer, scaler: Scaler | None) -> None:
        self.plan, self.attached, self._target, self._given = plan, attached, target, given
        self.model, self.scaler = target.model, target.scaler
        self.brings_scaler = target.scaler is not scaler
        self.optimizer = target.optimizer
        if isinstance(target.accumulator, Accumulator):
            front = AccumulatingOptimizer(target.optimizer, target.accumulator)
            attached[Accumulation.name].with_undo(front.direct.remove)
            self.optimizer = front
        for optimizer in {id(o): o for o in (hookable(given), hookable(self.optimizer))}.values():
            if len(attached):
                mark = optimizer.register_step_pre_hook(_Mark(self))
                attached[next(iter(attached))].with_undo(mark.remove)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer))

    def __repr__(self) -> str:
        return f"Boosted(level={self.plan.level!r}, algorithms=[{', '.join(self.attached)}])"

    def explain(self) -> str:
        """Return what is on with its settings, and what was left out with the reason."""
        return self.plan.explain()

    def step(
        self, loss_fn: Callable[..., Tensor | tuple[Tensor, float]] | None = None, model: nn.Module | None = None
    ) -> TrainStep:
        """Return a training step: forward, backward, update. It accumulates and scales the loss if the plan says so.

        Use it in place of a loop that steps :attr:`optimizer`.

        Args:
            loss_fn: Called as ``loss_fn(model(*inputs[:-1]), inputs[-1])``; returns a loss of shape ``()``, or the loss
                and the number of samples or tokens that it is the mean of. Without it the model itself returns that.
            model: The model as the loop calls it, if it was wrapped in DDP after :func:`boost`.

        Raises:
            TypeError: ``loss_fn`` cannot be called, or ``model`` is not a module.
        """
        if loss_fn is not None:
            check_loss_fn(loss_fn)
        if model is not None:
            check_module(model)
            self._target.model = model
            if isinstance(self._target.accumulator, Accumulator):
                self._target.accumulator.model = model
        if isinstance(self.optimizer, AccumulatingOptimizer):
            self.optimizer.direct.remove()  # the step knows when a window is full, and steps the inner optimizer
        target = self._target
        if loss_fn is None:
            return TrainStep(target, lambda *inputs: target.model(*inputs), attached=self.attached)
        return TrainStep(
            target, lambda *inputs: loss_fn(target.model(*inputs[:-1]), inputs[-1]), attached=self.attached
        )

    def eval_model(self, sample: Any = None) -> nn.Module:
        """Return a fast copy for inference, with BatchNorm folded; the model itself can go on training.

        See :func:`torchboost.inference.fast_copy`.

        Args:
            sample: An input of the kind that the copy will be called with: a tensor, a tuple of positional or a dict of
                keyword arguments. With it the form that is fastest on this machine is chosen by measurement.

        Raises:
            TypeError: The model cannot be copied.
            ValueError: The model does not run on ``sample``, or computes NaN or infinities.
        """
        return fast_copy(self.model, sample=sample, pick=fastest)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the state of the model, the optimizer and a scaler of the loop."""
        state: dict[str, Any] = {"attached": self.attached.state_dict()}
        if self.brings_scaler and self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned.

        Raises:
            ValueError: The checkpoint belongs to other algorithms; nothing was loaded.
        """
        present = set(self.state_dict())
        if set(state) != present:
            raise ValueError(
                f"the checkpoint holds {sorted(state)}, this boosted model has {sorted(present)}; boost it with the "
                "level and the configuration that it was written with."
            )
        self.attached.load_state_dict(state["attached"])
        if self.brings_scaler and self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])

    def remove(self) -> None:
        """Take away everything that was attached. BatchNorms that were removed stay away."""
        self.attached.remove()


class _Mark:
    """A hook that does nothing: by it, whoever gets only the optimizer finds what was boosted."""

    def __init__(self, boosted: Boosted) -> None:
        self.boosted = boosted

    def __call__(self, *_: Any) -> None:
        pass


def boosted_of(optimizer: Optimizer) -> Boosted | None:
    """Return what a call of :func:`boost` made of an optimizer that was given to it or returned by it."""
    marks = [hook for hook in step_pre_hooks(hookable(optimizer)) if isinstance(hook, _Mark)]
    return marks[-1].boosted if marks else None


def boost(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    level: str = "O1",
    total_steps: int | None = None,
    config: ConfigSource | None = None,
    scaler: Scaler | None = None,
    loop: Loop = "own",
) -> Boosted:
    """Make the training of a model faster within the accuracy that a level promises. The loop stays as it was.

    Call it on the bare model, on the device that it will train on, before DDP and ``torch.compile``. For FSDP2, which
    replaces the parameters, see :func:`prepare`. A second call for the same model first takes away what the first one
    attached.

    Args:
        model: Changed in place.
        optimizer: Any ``torch.optim.Optimizer`` over parameters of the model. It follows parameters that are replaced.
        level: ``"O0"`` changes nothing, ``"O1"`` keeps the accuracy within 0.5 points, ``"O2"`` within 3 points. See
            ``docs/levels.md`` for what each level turns on, and for the measurements.
        total_steps: Number of updates of the whole run. Gradient freezing and compilation need it.
        config: Settings that override the level: a dict, a path to a JSON file, JSON text, or a :class:`BoostConfig`.
        scaler: The ``GradScaler`` of the loop; autocast to float16 needs one.
        loop: Who owns the training loop: ``"own"``, or a trainer: ``"transformers"``, ``"lightning"`` or
            ``"accelerate"``. A trainer accumulates gradients and scales the loss itself, so both are left out.

    Returns:
        The boosted pair: ``model, optimizer = boost(...)``, or keep the object for ``explain()``, ``state_dict()``,
        ``remove()``, ``eval_model()`` and ``step(loss_fn)``.

    Raises:
        TypeError: Not a module, an optimizer, a scaler or a number of steps.
        ValueError: No parameter of the optimizer belongs to the model, or ``total_steps`` is below 1.
        ConfigError: An unknown level, section, key or setting, or a value of a wrong type or out of range.
        IncompatibleError: The model is wrapped already, or an algorithm cannot work on this pair; nothing was changed.

    Warns:
        NoEffectWarning: Algorithms of the level were left out because ``total_steps`` is not given.

    Example:
        >>> import torch, torchboost
        >>> layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 6 * 6, 2)]
        >>> model = torch.nn.Sequential(*layers)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = torchboost.boost(model, optimizer, level="O1", total_steps=10_000)
        >>> loss = torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.tensor([0, 1, 0, 1]))
        >>> loss.backward()
        >>> optimizer.step()
    """
    made = attach(model, optimizer, level=level, total_steps=total_steps, config=config, scaler=scaler, loop=loop)
    _warn_of_missing_length(made, config, total_steps, loop)
    return made


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    level: str,
    total_steps: int | None,
    config: ConfigSource | None,
    scaler: Scaler | None,
    loop: Loop,
    name: str = "model",
    caller: str = "torchboost.boost",
) -> Boosted:
    """Do what :func:`boost` does, without its warning; messages use the names of the caller."""
    check_pair(model, optimizer, name=name)
    check_scaler(scaler)
    plan = Plan.of(level, config, Facts.measure(model, loop=loop), total_steps=total_steps)
    wrapper = wrapper_of(model)
    if wrapper is not None and any(algorithm.needs_transform(model) for algorithm in plan.algorithms):
        raise IncompatibleError(
            f"the {name} is already wrapped by {wrapper}; move the line with {caller}(...) before the line that wraps "
            f"it: give it the bare {name}, and wrap what it returns."
        )
    earlier = boosted_of(optimizer)
    given = optimizer if earlier is None else earlier._given
    for module in model.modules():
        before = _BOOSTED.get(module, _nothing)()
        if before is not None:
            before.remove()
    if earlier is not None:
        earlier.remove()
    target = Target(model, given, scaler)
    plan = Plan.of(level, config, Facts.measure(model, loop=loop), total_steps=total_steps).fit(model, given)
    made = Boosted(plan, target, plan.attach(target), given, scaler)
    _BOOSTED[model] = weakref.ref(made)
    return made


def prepare(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    level: str = "O1",
    total_steps: int | None = None,
    config: ConfigSource | None = None,
) -> Plan:
    """Change the modules of a bare model, before it is sharded with FSDP2 or wrapped; return the plan to attach later.

    FSDP2 replaces the parameters, so the optimizer is built after sharding. Prepare the bare model, shard it, build the
    optimizer, then attach the plan::

        plan = torchboost.prepare(model, level="O1", total_steps=10_000)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        attached = plan.attach(torchboost.Target(model, optimizer))

    Args:
        model: Changed in place; on the device that it will train on.
        optimizer: If there is one already, it follows the parameters that are replaced.
        level: See :func:`boost`.
        total_steps: See :func:`boost`.
        config: See :func:`boost`.

    Raises:
        TypeError: Not a module, or not an optimizer.
        ConfigError: See :func:`boost`.
        IncompatibleError: The model is wrapped already; nothing was changed.
    """
    check_module(model)
    if optimizer is not None:
        check_optimizer(optimizer)
    plan = Plan.of(level, config, Facts.measure(model, loop="own"), total_steps=total_steps)
    plan.transform(model, optimizer)
    return plan


def fastest(forms: Mapping[str, nn.Module], sample: Any) -> str:
    """Name the form with the shortest call on a sample; the forms are timed side by side."""
    device = next((p.device for form in forms.values() for p in form.parameters()), torch.device("cpu"))
    calls = {name: torch.inference_mode()(functools.partial(call, form, sample)) for name, form in forms.items()}
    warmup = Warmup(least=2, window=1, limit=4, seconds=10)
    times = compare(calls, baselines=[], pairs=8, warmup=warmup, clock=Clock.of(device)).samples
    return min(times, key=lambda name: statistics.median(times[name]))


def _nothing() -> None:
    return None


def _warn_of_missing_length(made: Boosted, config: ConfigSource | None, total_steps: int | None, loop: Loop) -> None:
    """Name what the level has left out only because nobody said how long the run is."""
    if total_steps is not None:
        return
    facts = replace(Facts.measure(made.model, loop=loop), total_steps=_LONG_RUN)
    inner, running = hookable(made._given), {algorithm.name for algorithm in made.plan.algorithms}
    others = [a for a in Plan.of(made.plan.level, config, facts).algorithms if a.name not in running]
    missed = [algorithm.name for algorithm in others if algorithm.idle(made.model, inner) is None]
    if missed:
        warnings.warn(
            f"{made.plan.level} runs without {' and '.join(missed)}, which must know the length of the run: "
            "give boost(..., total_steps=...), the number of updates.",
            NoEffectWarning,
            stacklevel=3,
        )
