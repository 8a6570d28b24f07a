"""Optimizers that look at the loss again while they step, and the forward pass they repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["ClosureOptimizer", "Replay", "after_closure"]


def after_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], act: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call ``act`` when the gradients of a step are there: now, or after the closure that makes them inside ``step``.

    For step pre-hooks of optimizers, whose arguments these are and whose result this is.

    Args:
        args: The optimizer, and what ``step`` was called with.
        kwargs: The same by name.
        act: Called once without a closure, and after every call of a closure.

    Returns:
        The arguments with the closure covered; None without one.
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


class ClosureOptimizer(Optimizer):
    """An optimizer whose ``step`` needs a function that returns the loss of the batch, without a backward pass.

    :class:`~torchboost.core.step.TrainStep` computes loss and gradients as always, then calls
    ``step(closure)`` with a :class:`Replay`.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update; ``closure`` is called under ``no_grad`` after the weights were moved on trial."""
        raise NotImplementedError


class Replay:
    """Repeats a forward pass with the random numbers of the first time, so that dropout drops the same.

    Args:
        forward: Returns the loss.
        device: Whose generator is used besides that of the host.

    Attributes:
        loss: What the first pass returned, detached; None before it.
    """

    def __init__(self, forward: Callable[[], Tensor], device: torch.device) -> None:
        self._forward = forward
        self._device = device
        self._devices = [device] if device.type not in ("cpu", "meta") else []
        self._kind = device.type if self._devices else "cuda"
        self._generators: list[Tensor] = []
        self.loss: Tensor | None = None

    def first(self) -> Tensor:
        """Run the pass, with autograd, and remember where the generators stood.

        Raises:
            TypeError: It returns no tensor.
            ValueError: It returns more than one number, or one without a gradient.
        """
        self._note_generators()
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
        """Run the pass and its backward pass, with gradients that begin at None.

        Raises:
            TypeError, ValueError: As :meth:`first`; or the closure ran the backward pass itself.
        """
        for parameter in parameters:
            parameter.grad = None
        with torch.enable_grad():
            loss = self.first()
            if any(parameter.grad is not None for parameter in parameters):
                raise ValueError(
                    "the closure called backward(), as one for torch.optim.LBFGS does; it must only return the loss, "
                    "which is looked at several times."
                )
            with torch.autocast(self._device.type, enabled=False):  # backward ops take the precisions of the forward
                loss.backward()

    def told(self, loss: Tensor) -> None:
        """Take the loss of a first pass that others ran; the random numbers are those from here on."""
        self._note_generators()
        self.loss = loss.detach()

    def _note_generators(self) -> None:
        self._generators = [torch.get_rng_state()]
        self._generators += [torch.get_device_module(d).get_rng_state(d) for d in self._devices]

    def __call__(self) -> Tensor:
        """Return the loss again; the generators are left as they are."""
        with torch.random.fork_rng(self._devices, device_type=self._kind):
            torch.set_rng_state(self._generators[0])
            for device, state in zip(self._devices, self._generators[1:], strict=True):
                torch.get_device_module(device).set_rng_state(state, device)
            # Where autocast surrounds the step it keeps casts of the weights from before they were moved.
            torch.clear_autocast_cache()
            return self._forward()
