"""The one training step: forward, backward and, when the accumulation window is full, the update."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchboost.core.algorithm import Attached, MicroSteps, Target
from torchboost.core.closure import ClosureOptimizer, Replay
from torchboost.core.wrapping import unwrap
from torchboost.errors import NoEffectWarning

__all__ = ["StepOutput", "TrainStep"]

_SHOWN = 5
"""Names of parameters in a warning."""


class StepOutput(NamedTuple):
    """What one step tells its caller; every entry is a tensor of shape ``()``, detached.

    Attributes:
        loss: The loss of this call, not scaled, in its own dtype.
        overflow: Whether the update was skipped because a gradient was not finite (bool).
        loss_scale: The loss scale after the step (float32); 1 without a scaler.
    """

    loss: Tensor
    overflow: Tensor
    loss_scale: Tensor


class TrainStep:
    """One call trains one batch. It is an ordinary loop body and knows no algorithm.

    What a call does, with ``s`` the scaler and ``a`` the accumulator::

        loss = loss_fn(*inputs);  s.scale(a.share(loss)).backward()
        when the window is full:  s.unscale_(opt); s.step(opt); s.update(); opt.zero_grad()

    An optimizer that searches along the loss (:class:`~torchboost.core.closure.ClosureOptimizer`) is handed the
    forward pass of the batch.

    An algorithm acts through the hooks it attached to the model and the optimizer, so the same weights come
    out of this step and of the same lines written by hand. Gradients are always unscaled before the hooks of
    the optimizer see them. Learning-rate schedulers stay with the caller: step them after this step, where
    ``updated`` says that it moved the weights.

    Args:
        target: The handles of the loop; read again at every call, so algorithms may exchange them.
        loss: Called with the inputs of the step; returns the loss, a tensor of shape ``()``, or the loss and the number
            of samples or tokens it is the mean of, by which an accumulator weighs it (ignored where there is none).
        attached: What :meth:`state_dict` saves besides the scaler and the accumulator.

    Attributes:
        updated: Whether the last call moved the weights: the window was full and no gradient had overflowed.

    Warns:
        NoEffectWarning: The model has trainable parameters that the optimizer does not hold; names them.

    Cost: a few microseconds per call over the same loop written by hand. The scalers of this package wait
    for the device once per update, ``GradScaler`` once more for each reading of its scale; without a scaler nothing
    does.
    """

    def __init__(
        self,
        target: Target,
        loss: Callable[..., Tensor | tuple[Tensor, float]],
        *,
        attached: Attached | None = None,
    ) -> None:
        _announce_untrained(target)
        self.target = target
        self.attached = attached if attached is not None else Attached()
        self.updated = False
        self._loss = loss
        self._replay: Replay | None = None
        self._last = torch.full((), torch.nan)
        self._clean = torch.zeros((), dtype=torch.bool)
        self._unit_scale = torch.ones(())

    def __call__(self, *inputs: Any) -> StepOutput:
        """Train on one batch.

        Args:
            *inputs: Handed to the loss function as they are.

        Raises:
            TypeError: The loss is not a tensor; nothing was changed.
            ValueError: The loss is not a single number; nothing was changed.
        """
        accumulator = self.target.accumulator
        if accumulator is None:
            self._forward_backward(inputs, None)
        else:
            with accumulator.micro_step():
                self._forward_backward(inputs, accumulator)
        if accumulator is None or accumulator.ready:
            return self._update()
        self.updated = False
        return StepOutput(self._last, self._clean, self._scale_tensor())

    def flush(self) -> StepOutput | None:
        """Update with what a window holds that is not full, as at the end of an epoch; None where there is nothing.

        The loss is that of the last call. On several ranks all must flush together.
        """
        accumulator, scaler = self.target.accumulator, self.target.scaler
        if accumulator is not None and accumulator.flush():
            if scaler is not None:
                scaler.scale(self._last)  # it must know a scale where only other ranks held something
            return self._update()
        self.updated = False
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the attachments and, where there are any, of the scaler and the accumulator."""
        state: dict[str, Any] = {"attached": self.attached.state_dict()}
        for name in ("scaler", "accumulator"):
            part = getattr(self.target, name)
            if part is not None:
                state[name] = part.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned.

        Raises:
            ValueError: The checkpoint belongs to a step with other parts; nothing was loaded.
        """
        present = {"attached"} | {n for n in ("scaler", "accumulator") if getattr(self.target, n) is not None}
        if set(state) != present:
            raise ValueError(
                f"the checkpoint of the step holds {sorted(state)}, this step has {sorted(present)}; "
                "build the step with the same scaler and accumulation before loading."
            )
        self.attached.load_state_dict(state["attached"])
        for name in sorted(present - {"attached"}):
            getattr(self.target, name).load_state_dict(state[name])

    def _forward_backward(self, inputs: tuple[Any, ...], accumulator: MicroSteps | None) -> None:
        optimizer = self.target.optimizer
        if isinstance(optimizer, ClosureOptimizer):
            device = optimizer.param_groups[0]["params"][0].device
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
                "the number of samples behind it: pass a loss_fn that makes this of what the model returns."
            )
        if loss.numel() != 1:
            raise ValueError(
                f"the loss has shape {tuple(loss.shape)}; a training step needs a single number: "
                "reduce it (for instance with .mean()) or pass a loss_fn."
            )
        return loss, count

    def _update(self) -> StepOutput:
        optimizer, scaler = self.target.optimizer, self.target.scaler
        closure = () if self._replay is None else (self._replay,)
        if scaler is None:
            update: Callable[..., Any] = optimizer.step
            update(*closure)
            optimizer.zero_grad()
            self.updated = True
            return StepOutput(self._last, self._clean, self._unit_scale)
        before = scaler.get_scale()
        scaler.unscale_(optimizer)
        scaler.step(optimizer, *closure)
        scaler.update()
        optimizer.zero_grad()
        after = scaler.get_scale()
        overflow = getattr(scaler, "overflowed", after < before)
        self.updated = not overflow
        return StepOutput(self._last, torch.tensor(overflow), torch.tensor(after))

    def _scale_tensor(self) -> Tensor:
        scaler = self.target.scaler
        return self._unit_scale if scaler is None else torch.tensor(scaler.get_scale())


def _announce_untrained(target: Target) -> None:
    """Warn if a backward pass makes gradients that nobody uses, as of parameters that are newer than the optimizer."""
    held = {id(param) for group in target.optimizer.param_groups for param in group["params"]}
    trained = [(name, param) for name, param in unwrap(target.model).named_parameters() if param.requires_grad]
    missing = [name for name, param in trained if id(param) not in held]
    if not missing or len(missing) == len(trained):
        return
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    warnings.warn(
        f"{len(missing)} trainable parameters of the model are in no group of the optimizer, so nothing updates them: "
        f"{', '.join(missing[:_SHOWN])}{more}. Add them with optimizer.add_param_group, or build the optimizer after "
        "the model was changed; if they are to stay as they are, requires_grad_(False) saves their gradients.",
        NoEffectWarning,
        stacklevel=3,
    )
