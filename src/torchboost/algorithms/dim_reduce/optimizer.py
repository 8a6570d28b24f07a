"""Quasi-Newton steps in a small subspace of the weights, and momentum outside of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchboost.algorithms.dim_reduce.basis import DimReduceBasis
from torchboost.core.arguments import check_number
from torchboost.core.step import Replay
from torchboost.core.torch_private import foreach
from torchboost.errors import IncompatibleError, shown

CURVATURE = 1e-20
"""If the product of a step and the change of the gradient is not above this, it is ignored, as in MindSpore."""
TRIALS = 2
"""Forward passes of one line search at most, as in MindSpore."""


class Subspace:
    """BFGS with a line search along k directions, and plain momentum for the rest of the gradient.

    With P the rows of the basis and B the BFGS estimate of the inverse Hessian (Li et al., "Low Dimensional
    Trajectory Hypothesis is True", TPAMI 2022, and MindSpore's DimReduce)::

        g = P grad;  d = -B g;  s = rho^m d for the first m with  loss(w + P's) < loss(w) + sigma g.s
        r = gamma r + grad - P'g;  w <- w + P's - alpha r

    The line search makes two trials, m = 0 and 1. If neither is accepted, s = 0 and B is as before. B starts as the
    identity, and is updated from the last accepted step and the change of the gradient since then, y, by
    ``B <- (I - s y'/y.s) B (I - y s'/y.s) + s s'/y.s`` (Nocedal and Wright, "Numerical Optimization", equation 6.17).
    On several ranks the gradients must be averaged as under DDP. The losses are averaged here.

    Args:
        weights: The parameters that the basis spans, in its order. float32 or float64, on one device.
        basis: The directions. They are moved to the weights.
        alpha, rho, gamma, sigma: See :class:`torchboost.algorithms.DimReduction`.
        buffers: Restored after trial passes. Pass ``model.buffers()`` if a model has BatchNorms, whose statistics a
            trial in training mode would change.

    Attributes:
        accepted: Updates so far in which a trial was accepted.
        trial: The trial that the last update accepted, from 1. It is 0 if none was, or a number was not finite.

    Raises:
        ValueError: A setting out of range, or the basis spans another number of weights.
        IncompatibleError: Weights in other precisions, on several devices, or sharded. At the first step: the ranks
            that share the basis have different gradients.

    Cost: an update reads the rows of the basis twice and does one forward pass per trial. Memory besides the basis: six
    vectors of the size of the weights (gradient, two lifted vectors, residual, weights before and in a trial).
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        basis: DimReduceBasis,
        *,
        alpha: float = 0.001,
        rho: float = 0.55,
        gamma: float = 0.9,
        sigma: float = 0.4,
        buffers: Iterable[Tensor] = (),
    ) -> None:
        check_settings(alpha=alpha, rho=rho, sigma=sigma, gamma=gamma)
        length = sum(weight.numel() for weight in weights)
        if length != basis.length:
            raise ValueError(
                f"basis: spans {basis.length} weights, the parameters have {length}; make the basis from checkpoints "
                "of this model, with the same parameters trained."
            )
        check_weights(weights)
        self.weights, self.basis = list(weights), basis
        self.alpha, self.rho, self.gamma, self.sigma = alpha, rho, gamma, sigma
        basis.rows = basis.rows.to(weights[0])
        matrix = torch.eye(basis.components, dtype=torch.float64, device="cpu")
        self._inverse_hessian: dict[str, Any] = {
            "matrix": matrix,
            "gradient": None,
            "step": torch.zeros_like(matrix[0]),
        }
        self.accepted = self.trial = 0
        self._alike = basis.group is None
        self._buffers = tuple(buffers)
        self._residual = torch.zeros(length, dtype=weights[0].dtype, device=weights[0].device)
        self._lifted = self._residual.new_zeros(2, length)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Tensor:
        """Update once and return the loss before the update, shape ``()``.

        Args:
            closure: Returns the loss of the batch and does nothing else. Existing gradients of a loss that a
                :class:`~torchboost.core.step.Replay` has seen are used. Otherwise the step runs the backward pass
                itself, and clears the gradients at its end.

        An error of the closure in a trial passes through. Weights, buffers and state are then as before the step,
        except for changes by the first pass.
        """
        if any(not weight.requires_grad for weight in self.weights):
            raise IncompatibleError(
                "steps in a subspace: a parameter of the basis was frozen after the basis was made; freeze before."
            )
        with evaluated(closure, self.weights) as (replay, loss):
            self._update(replay, loss)
        return loss

    def _update(self, replay: Replay, loss: Tensor) -> None:
        gradient = torch.cat([_gradient(weight).reshape(-1) for weight in self.weights])
        if not self._alike:
            self._check_alike(gradient)
        projected = self.basis.project(gradient)
        start = self._mean(loss)
        self.trial = 0
        if not (projected.isfinite().all() and math.isfinite(start)):
            return
        before = torch.cat([weight.reshape(-1) for weight in self.weights])
        inverse = _updated(self._inverse_hessian, projected)
        direction = -(inverse @ projected)
        along, inside = self.basis.lift(torch.stack([direction, projected]), self._lifted)
        slope = float(projected @ direction)
        try:
            with self._buffers_kept():
                length = self._search(replay, before, along, start, slope)
        except BaseException:
            self._place(before)
            raise
        if length:
            self._inverse_hessian = {"matrix": inverse, "gradient": projected, "step": direction * length}
            self.accepted += 1
        self._residual.mul_(self.gamma).add_(gradient).sub_(inside)
        self._place(before.add_(along, alpha=length).sub_(self._residual, alpha=self.alpha))

    def _search(self, replay: Replay, before: Tensor, along: Tensor, start: float, slope: float) -> float:
        """Return the step length along the direction, 0 if no trial is good enough. Moves the weights."""
        length = 1.0
        for trial in range(1, TRIALS + 1):
            self._place(torch.add(before, along, alpha=length))
            if self._mean(replay()) < start + self.sigma * length * slope:
                self.trial = trial
                return length
            length *= self.rho
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is kept between updates."""
        return {
            "inverse_hessian": dict(self._inverse_hessian),
            "residual": self._residual.clone(),
            "accepted": self.accepted,
            "mark": self.basis.fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of :meth:`state_dict`, or raise ``ValueError`` if it belongs to other directions."""
        self.loading(state)()

    def loading(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a checkpoint as :meth:`load_state_dict` does, and return the function that resumes from it."""
        estimate, mark = state["inverse_hessian"], state["mark"]
        found, own = (len(estimate["matrix"]), len(state["residual"])), (self.basis.components, self.basis.length)
        if found != own or not self._has_mark(mark):
            raise ValueError(
                "the checkpoint holds a subspace of {} directions of {} weights, and this one has {} of {}, or other "
                "directions; load it with the model and the files that its basis was made from.".format(*found, *own)
            )
        shapes = {"matrix": (own[0], own[0]), "step": own[:1], "gradient": own[:1], "residual": own[1:]}
        vectors = {name: estimate.get(name) for name in self._inverse_hessian} | {"residual": state["residual"]}
        for name, value in vectors.items():
            none_yet = name == "gradient" and value is None
            if not none_yet and not (isinstance(value, Tensor) and value.shape == shapes[name]):
                raise ValueError(
                    f"the checkpoint's {name!r} of a subspace is damaged: found {shown(value)}, needed is a tensor of "
                    f"shape {shapes[name]}; load a whole file, or begin without it."
                )
        kept = {name: _on_host(vectors[name]) for name in self._inverse_hessian}
        accepted = int(state["accepted"])

        def load() -> None:
            self._inverse_hessian, self.accepted = kept, accepted
            self._residual.copy_(vectors["residual"])

        return load

    def _has_mark(self, mark: Tensor | None) -> bool:
        """Whether a basis with this fingerprint has the directions of this one. The version before wrote none."""
        if mark is None:
            return True
        theirs, own = mark.to("cpu", torch.float64), self.basis.fingerprint()
        return theirs.shape == own.shape and not ((theirs - own).abs() > 1e-3 * (1 + theirs.abs())).any()

    def _check_alike(self, gradient: Tensor) -> None:
        """Check once that the ranks have the same gradient. Otherwise their weights would diverge."""
        total = gradient.to(torch.float64).sum().reshape(1)
        totals = [torch.empty_like(total) for _ in range(self.basis.ranks)]
        dist.all_gather(totals, total, group=self.basis.group)
        if not torch.cat(totals).isfinite().all():
            return
        if any(other != totals[0] for other in totals):
            raise IncompatibleError(
                "steps in a subspace: the ranks have different gradients, so their weights would diverge; wrap the "
                "model in DistributedDataParallel, which averages them."
            )
        self._alike = True

    def _mean(self, loss: Tensor) -> float:
        """Return the mean of the losses of all ranks."""
        value = loss.detach().to(torch.float64)
        if self.basis.group is not None:
            value = value.clone()
            dist.all_reduce(value, group=self.basis.group)
        return float(value) / self.basis.ranks

    def _place(self, vector: Tensor) -> None:
        """Write a vector of all weights into the parameters."""
        parts = vector.split([weight.numel() for weight in self.weights])
        foreach.copy_(self.weights, [part.view_as(weight) for part, weight in zip(parts, self.weights, strict=True)])

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        kept = [buffer.clone() for buffer in self._buffers]
        try:
            yield
        finally:
            for buffer, value in zip(self._buffers, kept, strict=True):
                buffer.copy_(value)


@contextmanager
def evaluated(closure: Callable[[], Any] | None, parameters: Sequence[Tensor]) -> Iterator[tuple[Replay, Tensor]]:
    """Yield a function that repeats a closure, and the loss of its first pass. The gradients are computed.

    A closure that is not a :class:`~torchboost.core.step.Replay` is called here, and its gradients are cleared at
    the end. ``TypeError`` or ``ValueError``: there is none, or it does not return a loss, or does more than that.
    """
    if closure is None:
        raise TypeError(
            "step() found no closure, but its line search evaluates the loss again. In your own loop, call "
            "optimizer.step(lambda: loss_fn(model(inputs), labels)) in place of backward() and step(); TrainStep and "
            "BoostTrainOneStepCell do so themselves."
        )
    replay = closure if isinstance(closure, Replay) else Replay(closure, parameters[0].device)
    first_here = replay.loss is None
    if first_here:
        replay.backward(parameters)
    assert replay.loss is not None
    yield replay, replay.loss
    if first_here:
        for parameter in parameters:
            parameter.grad = None


def check_settings(*, alpha: float, rho: float, sigma: float, gamma: float) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless all are 0 or more, rho and sigma more, all but alpha below 1."""
    check_number("alpha", alpha)
    for name, value in (("rho", rho), ("sigma", sigma), ("gamma", gamma)):
        check_number(name, value, above=name != "gamma")
        if value >= 1:
            raise ValueError(f"{name}: found {value}; give a number below 1.")


def check_weights(parameters: Sequence[Tensor]) -> None:
    """Refuse weights of several precisions or devices, of another one than float32 and float64, and shards."""
    kinds = {(p.dtype, p.device) for p in parameters}
    if len(kinds) != 1 or parameters[0].dtype not in (torch.float32, torch.float64):
        text = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "no parameters"
        raise IncompatibleError(f"steps in a subspace: found {text}; train in float32 (or float64) on one device.")
    if any(type(p.data) is not Tensor for p in parameters):
        raise IncompatibleError(
            "steps in a subspace: found sharded parameters, but whole ones are needed: use DistributedDataParallel."
        )


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad if parameter.grad.layout is torch.strided else parameter.grad.to_dense()


def _updated(estimate: dict[str, Any], gradient: Tensor) -> Tensor:
    """Return the estimate of the inverse Hessian after the last step, given the gradient after it."""
    matrix, step = estimate["matrix"], estimate["step"]
    if estimate["gradient"] is None:
        return matrix
    change = gradient - estimate["gradient"]
    curvature = change @ step
    if not curvature > CURVATURE:
        return matrix
    shift = torch.eye(len(step), dtype=torch.float64, device="cpu") - torch.outer(change, step) / curvature
    return shift.T @ matrix @ shift + torch.outer(step, step) / curvature


def _on_host(loaded: Tensor | None) -> Tensor | None:
    """Return a copy on the host, whatever device the checkpoint was mapped to."""
    return None if loaded is None else loaded.to("cpu", torch.float64, copy=True)
