"""The training step: forward, backward and, when the accumulation window is full, the update.

An optimizer may evaluate the loss again during its step. It receives the forward pass of the step, to repeat it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchboost.core.algorithm import AttachedAlgorithms, Target, restored_on_error
from torchboost.core.hardware import generator_states, set_generator_states
from torchboost.core.wrapping import parameters_of, unwrap
from torchboost.errors import IncompatibleError, warn_no_effect

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SHOWN = 5
"""Most parameter names that a warning lists."""


class ClosureOptimizer(Optimizer):
    """An optimizer whose ``step`` needs a function of the loss, as :class:`TrainStep` passes it: a :class:`Replay`."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights. ``closure`` is called under ``no_grad`` after each trial move of the weights."""
        raise NotImplementedError


class Replay:
    """Repeats a forward pass with the same random numbers, of the host and a device: dropout drops the same entries.

    ``loss`` is the detached loss of the first pass. None before that pass.
    """

    def __init__(self, forward: Callable[[], Tensor], device: torch.device) -> None:
        self._forward = forward
        self._device = device
        self._devices = [device] if device.type not in ("cpu", "meta") else []
        self._kind = device.type if self._devices else "cuda"
        self._generators: list[Tensor] = []
        self.loss: Tensor | None = None

    def first(self) -> Tensor:
        """Run the pass with autograd, and save the states of the generators.

        Raises:
            TypeError: The pass does not return a tensor.
            ValueError: The pass returns more than one number, or a number without a gradient.
        """
        self._generators = generator_states(self._devices)
        torch.clear_autocast_cache()
        loss: Any = self._forward()
        if not isinstance(loss, Tensor):
            raise TypeError(f"the closure returned a {type(loss).__name__}; it must return the loss, a tensor.")
        if loss.numel() != 1:
            raise ValueError(f"the closure returned a loss of shape {tuple(loss.shape)}; reduce it, as with .mean().")
        if not loss.requires_grad:
            raise ValueError("the closure returned a loss without a gradient; leave out no_grad() and detach().")
        self.loss = loss.detach()
        return loss

    def backward(self, parameters: Sequence[Tensor]) -> None:
        """Run the pass and its backward pass. Gradients start at None.

        Raises:
            TypeError, ValueError: As for :meth:`first`, and if the closure ran the backward pass itself.
        """
        for parameter in parameters:
            parameter.grad = None
        with torch.enable_grad():
            loss = self.first()
            if any(parameter.grad is not None for parameter in parameters):
                raise ValueError(
                    "the closure called backward(), as for torch.optim.LBFGS; it must only return the loss, "
                    "which is evaluated several times."
                )
            with torch.autocast(self._device.type, enabled=False):  # backward ops take the precisions of the forward
                loss.backward()

    def told(self, loss: Tensor) -> None:
        """Take the loss of a first pass that the caller ran. Later passes use the random numbers from here on."""
        self._generators = generator_states(self._devices)
        self.loss = loss.detach()

    def __call__(self) -> Tensor:
        """Return the loss of another pass. The states of the generators are restored afterwards."""
        with torch.random.fork_rng(self._devices, device_type=self._kind):
            set_generator_states(self._generators, self._devices)
            # If autocast surrounds the step, its cache holds casts of the weights from before the move.
            torch.clear_autocast_cache()
            return self._forward()


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` cannot be called without a closure, as in LBFGS."""
    closure = list(inspect.signature(type(optimizer).step).parameters.values())[1:2]
    return bool(closure) and closure[0].default is inspect.Parameter.empty and closure[0].kind in _NAMED


def after_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], act: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call ``act`` when the gradients of a step exist: now, or after each call of the closure that computes them.

    For step pre-hooks of optimizers, whose arguments it takes and whose result it returns: the arguments with the
    closure wrapped, or None without a closure.
    """
    named = kwargs.get("closure")
    closure = named if named is not None else next((value for value in args[1:] if callable(value)), None)
    if closure is None:
        act()
        return None

    def evaluate() -> Any:
        result = closure()
        act()
        return result

    if named is not None:
        return args, {**kwargs, "closure": evaluate}
    return tuple(evaluate if value is closure else value for value in args), kwargs


class StepOutput(NamedTuple):
    """The result of one step. Every entry is a detached tensor of shape ``()``.

    Attributes:
        loss: The loss of this call, not scaled, in its own dtype.
        overflow: Whether the update was skipped because a gradient was not finite (bool).
        loss_scale: The loss scale after the step (float32), 1 without a scaler.
    """

    loss: Tensor
    overflow: Tensor
    loss_scale: Tensor


class TrainStep:
    """Train on one batch per call: an ordinary loop body that does not depend on any algorithm.

    A call does the following, with ``s`` the scaler and ``a`` the accumulator::

        loss = loss_fn(*inputs);  s.scale(a.share(loss)).backward()
        when the window is full:  s.unscale_(opt); s.step(opt); s.update(); opt.zero_grad()

    Algorithms act through hooks on the model and the optimizer, so this step gives the same weights as the same lines
    written by hand. An optimizer with a line search (:class:`ClosureOptimizer`) receives the forward pass of the batch.
    Gradients are always unscaled before the hooks of the optimizer see them. Step schedulers after this step, if
    ``updated`` is true.

    Args:
        target: The handles of the loop. They are read at every call, so algorithms may replace them.
        loss: Called with the inputs of the step. Returns the loss, a tensor of shape ``()``, or the loss and the number
            of samples or tokens in its mean. An accumulator weighs the loss by this number. Without an accumulator the
            number is ignored.
        attached: The attachments, which :meth:`state_dict` saves together with the scaler and the accumulator.

    Attributes:
        updated: Whether the last call updated the weights: the window was full and no gradient overflowed.

    Raises:
        IncompatibleError: One of several optimizers needs the loss as a function.

    Warns:
        NoEffectWarning: The model has trainable parameters that the optimizer does not hold. The warning names them.

    Cost: a few microseconds per call more than the same loop written by hand. The scalers of this package synchronise
    with the device once per update, and ``GradScaler`` once more for each reading of its scale. Without a scaler there
    is no synchronisation.
    """

    def __init__(
        self,
        target: Target,
        loss: Callable[..., Tensor | tuple[Tensor, float]],
        *,
        attached: AttachedAlgorithms | None = None,
    ) -> None:
        if target.others and any(isinstance(one, ClosureOptimizer) for one in target.optimizers):
            raise IncompatibleError(
                f"one of the {len(target.optimizers)} optimizers needs the loss as a function, which a training step "
                "gives to a single optimizer only; use one optimizer, or write the step by hand."
            )
        _announce_untrained(target)
        self.target = target
        self.attached = attached if attached is not None else AttachedAlgorithms()
        self.updated = False
        self._loss = loss
        self._replay: Replay | None = None
        self._last = torch.full((), torch.nan, device="cpu")
        self._clean = torch.zeros((), dtype=torch.bool, device="cpu")
        self._unit_scale = torch.ones((), device="cpu")

    def __call__(self, *inputs: Any) -> StepOutput:
        """Train on one batch.

        Args:
            *inputs: Passed to the loss function unchanged.

        Raises:
            TypeError: The loss is not a tensor. Nothing is changed.
            ValueError: The loss is not a single number. Nothing is changed.
        """
        accumulator, scaler = self.target.accumulator, self.target.scaler
        with nullcontext() if accumulator is None else accumulator.micro_step():
            self._forward_backward(inputs)
        if accumulator is None or accumulator.ready:
            return self._update()
        self.updated = False
        scale = self._unit_scale if scaler is None else torch.tensor(scaler.get_scale(), device="cpu")
        return StepOutput(self._last, self._clean, scale)

    def flush(self) -> StepOutput | None:
        """Update with a partial window, for example at the end of an epoch. Return None if the window is empty.

        The loss comes from the last call. All ranks must flush together.
        """
        accumulator, scaler = self.target.accumulator, self.target.scaler
        if accumulator is not None and accumulator.flush():
            if scaler is not None:
                scaler.scale(self._last)  # the scaler must have a scale, even if only other ranks hold gradients
            return self._update()
        self.updated = False
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the attachments, the scaler and the accumulator, as far as they exist."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        Raises:
            ValueError: The checkpoint belongs to a step with other parts, or is damaged. Nothing is loaded.
        """
        parts = self._parts
        if set(state) != set(parts):
            raise ValueError(
                f"the checkpoint of the step holds {sorted(state)}, this step has {sorted(parts)}; "
                "build the step with the same scaler and accumulation before loading."
            )
        scalers, before = [parts["scaler"]] if "scaler" in parts else [], self.attached.state_dict()
        with restored_on_error(*scalers):
            for scaler in scalers:
                scaler.load_state_dict(state["scaler"])
            self.attached.load_state_dict(state["attached"])
            try:
                if "accumulator" in parts:  # it drops gradients, so it is last
                    parts["accumulator"].load_state_dict(state["accumulator"])
            except BaseException:
                self.attached.load_state_dict(before)
                raise

    @property
    def _parts(self) -> dict[str, Any]:
        parts = {"attached": self.attached, "scaler": self.target.scaler, "accumulator": self.target.accumulator}
        return {name: part for name, part in parts.items() if part is not None}

    def _forward_backward(self, inputs: tuple[Any, ...]) -> None:
        optimizer, accumulator = self.target.optimizer, self.target.accumulator
        if isinstance(optimizer, ClosureOptimizer):
            device = next((parameter.device for parameter in parameters_of(optimizer)), torch.device("cpu"))
            self._replay = Replay(lambda: self._checked_loss(inputs)[0], device)
            loss, count = self._replay.first(), None
        else:
            self._replay = None
            loss, count = self._checked_loss(inputs)
        self._last = loss.detach()
        share = loss if accumulator is None else accumulator.share(loss, count)
        if self.target.scaler is not None:
            share = self.target.scaler.scale(share)
        share.backward()

    def _checked_loss(self, inputs: tuple[Any, ...]) -> tuple[Tensor, float | None]:
        returned = self._loss(*inputs)
        loss, count = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if not isinstance(loss, Tensor) or not (count is None or type(count) in (int, float)):
            raise TypeError(
                f"the loss is a {type(returned).__name__}; a training step needs a tensor of shape (), alone or with "
                "the number of samples after it. Pass a loss_fn that computes this from the output of the model."
            )
        if loss.numel() != 1:
            raise ValueError(
                f"the loss has shape {tuple(loss.shape)}; a training step needs a single number. "
                "Reduce it (for example with .mean()) or pass a loss_fn."
            )
        return loss, count

    def _update(self) -> StepOutput:
        optimizers, scaler = (self.target.optimizer, *self.target.others), self.target.scaler
        closure = () if self._replay is None else (self._replay,)
        overflow, scale, overflowed = self._clean, self._unit_scale, False
        if scaler is None:
            for optimizer in optimizers:
                update: Callable[..., Any] = optimizer.step
                update(*closure)
        else:
            before = scaler.get_scale()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            for optimizer in optimizers:
                scaler.step(optimizer, *closure)
            scaler.update()
            after = scaler.get_scale()
            overflowed = getattr(scaler, "overflowed", after < before)
            overflow, scale = torch.tensor(overflowed, device="cpu"), torch.tensor(after, device="cpu")
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.updated = not overflowed
        return StepOutput(self._last, overflow, scale)


def _announce_untrained(target: Target) -> None:
    """Warn about trainable parameters that the optimizer does not hold, such as parameters newer than the optimizer."""
    held = set(parameters_of(target.optimizer, *target.others))
    trained = [(name, param) for name, param in unwrap(target.model).named_parameters() if param.requires_grad]
    missing = [name for name, param in trained if param not in held]
    if not missing or len(missing) == len(trained):
        return
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    warn_no_effect(
        f"{len(missing)} trainable parameters of the model are in no group of the optimizer, so nothing updates them: "
        f"{', '.join(missing[:_SHOWN])}{more}. Add them with optimizer.add_param_group, or build the optimizer after "
        "the model was changed. If they must not train, call requires_grad_(False), which saves their gradients.",
        above=2,
    )


def learns_nothing(optimizer: Optimizer) -> bool:
    """Whether all rates and gradients are zero, as in the step by which DCP finds the state of an optimizer."""
    rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
    if any((isinstance(rate, Tensor) and rate.device.type != "cpu") or rate != 0 for rate in rates):
        return False  # do not wait for a rate on an accelerator
    gradients = [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
    return bool(gradients) and not any(bool(gradient.any()) for gradient in gradients)
