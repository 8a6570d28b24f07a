"""Optimizers that evaluate the loss again during a step, and the forward pass that they repeat."""

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
    """Call ``act`` when the gradients of a step exist: now, or after the closure that computes them inside ``step``.

    For step pre-hooks of optimizers: it takes their arguments and returns their result.

    Args:
        args: The optimizer and the positional arguments of ``step``.
        kwargs: The keyword arguments of ``step``.
        act: Called once without a closure, and after every call of a closure.

    Returns:
        The arguments with the closure wrapped; None without a closure.
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

    :class:`~torchboost.core.step.TrainStep` computes the loss and the gradients as usual, then calls ``step(closure)``
    with a :class:`Replay`.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights. ``closure`` is called under ``no_grad`` after each trial move of the weights."""
        raise NotImplementedError


class Replay:
    """Repeats a forward pass with the same random numbers, so that dropout drops the same entries.

    Args:
        forward: Returns the loss.
        device: The device whose generator is restored in addition to the host's.

    Attributes:
        loss: The detached loss of the first pass; None before it.
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
        """Run the pass and its backward pass. Gradients start at None.

        Raises:
            TypeError, ValueError: As for :meth:`first`; also if the closure ran the backward pass itself.
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
        self._note_generators()
        self.loss = loss.detach()

    def _note_generators(self) -> None:
        self._generators = [torch.get_rng_state()]
        self._generators += [torch.get_device_module(d).get_rng_state(d) for d in self._devices]

    def __call__(self) -> Tensor:
        """Return the loss of another pass. The states of the generators are restored afterwards."""
        with torch.random.fork_rng(self._devices, device_type=self._kind):
            torch.set_rng_state(self._generators[0])
            for device, state in zip(self._devices, self._generators[1:], strict=True):
                torch.get_device_module(device).set_rng_state(state, device)
            # If autocast surrounds the step, its cache holds casts of the weights from before the move.
            torch.clear_autocast_cache()
            return self._forward()
