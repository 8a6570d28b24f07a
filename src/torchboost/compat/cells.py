"""MindSpore's training cells, built on :class:`~torchboost.core.step.TrainStep`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.adaptive_sum import AdaptiveSum
from torchboost.algorithms.adaptive_sum.algorithm import AdaptiveSumming
from torchboost.algorithms.grad_accumulation.optimizer import AccumulatingOptimizer
from torchboost.compat.wrappers import GradientAccumulation
from torchboost.core.algorithm import Scaler, Target
from torchboost.core.arguments import check_loss_fn, check_module, check_pair, check_sens
from torchboost.core.step import ClosureOptimizer, StepOutput, TrainStep
from torchboost.core.wrapping import unwrap
from torchboost.errors import IncompatibleError
from torchboost.front import boosted_of

__all__ = ["BoostTrainOneStepCell", "WithLoss"]


class WithLoss(nn.Module):
    """A training network that computes the loss of a backbone.

    Args:
        backbone: Called with all inputs except the last.
        loss_fn: Called with the output of the backbone and the last input (the labels).

    Raises:
        TypeError: ``backbone`` is not a module, or ``loss_fn`` cannot be called.

    Example:
        >>> import torch, torchboost
        >>> network = torchboost.WithLoss(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
        >>> loss = network(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    """

    def __init__(self, backbone: nn.Module, loss_fn: Callable[..., Tensor | tuple[Tensor, float]]) -> None:
        check_module(backbone, "backbone")
        check_loss_fn(loss_fn)
        super().__init__()
        self.backbone = backbone
        self.loss_fn = loss_fn

    def forward(self, *inputs: Any) -> Tensor | tuple[Tensor, float]:
        """Return ``loss_fn(backbone(*inputs[:-1]), inputs[-1])``."""
        return self.loss_fn(self.backbone(*inputs[:-1]), inputs[-1])


class _Sens:
    """MindSpore's ``sens``: the gradients are multiplied by it and not divided again."""

    def __init__(self, sens: float) -> None:
        self._sens = sens

    def scale(self, outputs: Tensor) -> Tensor:
        return outputs if self._sens == 1.0 else outputs * self._sens

    def unscale_(self, optimizer: Optimizer) -> None:
        pass

    def step(self, optimizer: Optimizer, *args: Any) -> float | None:
        optimizer.step(*args)
        return None

    def update(self) -> None:
        pass

    def get_scale(self) -> float:
        return self._sens

    def state_dict(self) -> dict[str, Any]:
        return {"sens": self._sens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sens = float(state_dict["sens"])


class BoostTrainOneStepCell:
    """A training step for a network that returns its loss.

    Args:
        network: Returns the loss, a tensor of shape ``()``, alone or followed by the number of samples or tokens, by
            which gradient accumulation weighs it; see :class:`WithLoss`. Usually the network and the optimizer come
            from :meth:`AutoBoost.network_auto_process_train`, whose algorithms then act in this step.
        optimizer: Updates the network. The optimizer that was passed to :class:`AutoBoost` is replaced by the one that
            it returned.
        sens: Multiplies the gradients, as in MindSpore. They are not divided again.

    Attributes:
        updated: Whether the last call updated the weights. With gradient accumulation, step schedulers only if it did.

    Warns:
        NoEffectWarning: The network has trainable parameters that the optimizer does not hold. The warning names them.

    Raises:
        TypeError: ``sens`` is not a number, ``network`` is not a module, or ``optimizer`` is not an optimizer.
        ValueError: None of the optimizer's parameters belongs to the network.
        IncompatibleError: Gradient accumulation does not work with the wrapper of the network; or ``sens`` is used
            together with group loss scaling.

    Example:
        >>> import torch, torchboost
        >>> network = torchboost.WithLoss(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
        >>> cell = torchboost.BoostTrainOneStepCell(network, torch.optim.SGD(network.parameters(), lr=0.1))
        >>> loss, overflow, loss_scale = cell(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    """

    def __init__(self, network: nn.Module, optimizer: Optimizer, sens: float = 1.0) -> None:
        check_sens(sens)
        self.sens = float(sens)
        scaler = None if self.sens == 1.0 else _Sens(self.sens)
        advice = f"sens={sens}: group loss scaling already scales the loss of this optimizer; leave sens at 1."
        self._build(network, optimizer, scaler, advice)

    def _build(self, network: nn.Module, optimizer: Optimizer, scaler: Scaler | None, advice: str) -> None:
        """Build the step; ``advice`` tells what to do if boosting has added another scaler than this one.

        MindSpore's API passes only the network and the optimizer from ``AutoBoost`` to the cell.
        """
        check_pair(network, optimizer, name="network")
        boosted = boosted_of(optimizer)
        self._summing: AdaptiveSumming | None = None
        if boosted is not None:
            optimizer = boosted.optimizer
            if boosted.brings_scaler and scaler is not None and scaler is not boosted.scaler:
                raise IncompatibleError(advice)
            scaler = boosted.scaler if boosted.brings_scaler else scaler
            if AdaptiveSum.name in boosted.attached:
                summing = boosted.attached[AdaptiveSum.name]
                assert isinstance(summing, AdaptiveSumming)
                summing.check_scaler(scaler)
                self._summing = summing
        self.network = network
        self.optimizer = optimizer
        self.updated = False
        self._stepping: Callable[[], AbstractContextManager[None]] = nullcontext
        target = Target(network, optimizer, scaler)
        window = 1
        if isinstance(optimizer, AccumulatingOptimizer):
            # The cell knows where a window begins, so it does not need a second copy of the gradients.
            target.optimizer, target.accumulator = optimizer.opt, optimizer.accumulator
            self._stepping = optimizer.direct.allowed
            optimizer.accumulator.model = network  # it may have been wrapped after AutoBoost
            window = optimizer.accumulator.steps
        self._step = TrainStep(target, network)
        self._window = GradientAccumulation(window, target.optimizer)
        self._at_once = GradientAccumulation(1, target.optimizer)

    def __call__(self, *inputs: Any) -> StepOutput:
        """Train on one batch and return ``(loss, overflow, loss_scale)``, tensors of shape ``()``.

        Raises:
            TypeError: The network does not accept these inputs, or does not return a loss.
        """
        try:
            with self._stepping():
                output = self._step(*inputs)
        except TypeError as error:
            _check_inputs(self.network, inputs, error)
            raise
        self.updated = self._step.updated
        return output

    def flush(self) -> bool:
        """Update with a partial accumulation window. Return whether it held any gradients."""
        with self._stepping():
            handed_over, called = self._window.flush(), self._step.flush()
        self.updated = handed_over or self._step.updated
        return handed_over or called is not None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs in addition to the network, the optimizer and ``AutoBoost.attached``."""
        return {"step": self._step.state_dict(), "given": self._window.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self._step.load_state_dict(state["step"])
        self._window.load_state_dict(state["given"])

    def check_adasum_enable(self) -> bool:
        """Whether AdaSum combines the updates of this cell: it is configured, and there are several nodes."""
        return self._summing is not None and self._summing.active

    def check_dim_reduce_enable(self) -> bool:
        """Whether dimension-reduced training acts in this cell, that is, whether its optimizer uses a line search."""
        return isinstance(self.optimizer, ClosureOptimizer)

    def adasum_process(self, loss: Tensor, grads: Any) -> Tensor:
        """Take the gradients of this rank, step, and combine the updates of all nodes.

        Args:
            loss: Returned unchanged.
            grads: One unscaled gradient per parameter of the optimizer; None for a parameter without a gradient.

        Raises:
            IncompatibleError: AdaSum does not act in this cell. Nothing is changed.
            ValueError: The number or the shapes of the gradients are not those of the parameters.
        """
        if not self.check_adasum_enable():
            raise IncompatibleError(
                "AdaSum does not act in this cell; give AutoBoost the configuration "
                '{"boost": {"mode": "manual", "adasum": true}} and start at least two nodes. AutoBoost.explain() says '
                "what is missing."
            )
        with self._stepping():
            loss = self._at_once(loss, grads)
        self.updated = self._at_once.updated
        return loss

    def gradient_accumulation_process(self, loss: Tensor, grads: Any, sens: float, *inputs: Any) -> Tensor:
        """Take gradients that were computed elsewhere, and update with their mean when the window is full.

        Args:
            loss: Returned unchanged.
            grads: One gradient per parameter of the optimizer, multiplied by ``sens``; None for a parameter without a
                gradient.
            sens: Not used. MindSpore passes it to dimension-reduced training.
            *inputs: Not used.

        Raises:
            ValueError: The number or the shapes of the gradients are not those of the parameters.
        """
        with self._stepping():
            loss = self._window(loss, grads)
        self.updated = self._window.updated
        return loss

    def gradient_freeze_process(self, *inputs: Any) -> Tensor:
        """Train on one batch and return its loss. The freezing that is attached to the optimizer decides what trains.

        Freezing comes from :class:`~torchboost.AutoBoost`, :class:`~torchboost.GradientFreeze` or
        :class:`~torchboost.FreezeOpt`. Without any of them everything trains.
        """
        return self(*inputs).loss


def _check_inputs(network: nn.Module, inputs: tuple[Any, ...], error: TypeError) -> None:
    """Raise ``TypeError`` with advice if the network's ``forward`` does not accept this number of inputs."""
    inner = unwrap(network)
    try:
        inspect.signature(inner.forward).bind(*inputs)
    except TypeError as refusal:
        raise TypeError(
            f"the forward of {type(inner).__name__} does not take {len(inputs)} inputs ({refusal}). The network of a "
            "cell must return its loss: wrap it as WithLoss(network, loss_fn), which takes the labels last."
        ) from error
    except ValueError:  # scripted modules have no signature
        return
