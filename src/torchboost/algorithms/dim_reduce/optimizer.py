"""Quasi-Newton steps in a small subspace of the weights, and momentum outside of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchboost.algorithms.dim_reduce.basis import SubspaceBasis
from torchboost.algorithms.dim_reduce.quasi_newton import InverseHessian
from torchboost.core.arguments import check_number, is_integer
from torchboost.core.closure import ClosureOptimizer, Replay
from torchboost.core.torch_private import foreach
from torchboost.errors import IncompatibleError

__all__ = ["LineSearch", "SubspaceOptimizer", "check_weights"]

LineSearch = Literal["backtracking", "parabola"]


class SubspaceOptimizer(ClosureOptimizer):
    """BFGS with a line search along k directions, and plain momentum for the rest of the gradient.

    With P the rows of the basis and B the BFGS estimate of the inverse Hessian (Li et al., "Low Dimensional
    Trajectory Hypothesis is True", TPAMI 2022, and MindSpore's DimReduce)::

        g = P grad;  d = -B g;  s = rho^m d for the first m with  loss(w + P's) < loss(w) + sigma g.s
        r = gamma r + grad - P'g;  w <- w + P's - lr r

    and s = 0 if no trial is accepted. On several ranks the gradients must be averaged as under DDP; the losses are
    averaged here.

    Args:
        params: The parameters whose weights the basis spans, in its order; float32 or float64, one device.
        basis: The directions.
        lr: Step along the residual momentum (MindSpore's ``alpha``); schedulers may change it.
        rho: Factor between two trials.
        gamma: Momentum of the residual.
        sigma: Share of the decrease that the slope promises which a trial must reach.
        trials: Forward passes of one line search at most.
        line_search: ``"backtracking"`` is MindSpore's; ``"parabola"`` puts the second trial at the lowest point of the
            parabola through the first, takes the better of both, and so is exact on a quadratic function.
        buffers: Restored after trial passes: pass ``model.buffers()`` if a model has BatchNorms, whose statistics a
            trial in training mode would change.

    Attributes:
        accepted: Updates so far in which a trial was accepted.
        trial: The trial that the last update accepted, from 1; 0 if none was, or a number was not finite.
        loss: The loss before the last update, averaged over the ranks.

    Raises:
        ValueError: A setting out of range, or the basis spans another number of weights.
        IncompatibleError: Parameters in other precisions, on several devices, or sharded; from
            the first step: the ranks that share the basis have different gradients.

    Cost: an update reads the rows of the basis twice and does one forward pass per trial. Memory besides the basis: six
    vectors of the size of the weights (gradient, two lifted vectors, residual, weights before and in a trial).

    Example:
        >>> import torch
        >>> from torchboost.algorithms.dim_reduce import SubspaceBasis, SubspaceOptimizer
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> optimizer = SubspaceOptimizer(model.parameters(), SubspaceBasis.of(torch.eye(2, 3)), lr=0.1)
        >>> x = torch.randn(8, 3)
        >>> loss = optimizer.step(lambda: model(x).square().mean())
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        basis: SubspaceBasis,
        *,
        lr: float = 0.001,
        rho: float = 0.55,
        gamma: float = 0.9,
        sigma: float = 0.4,
        trials: int = 2,
        line_search: LineSearch = "backtracking",
        buffers: Iterable[Tensor] = (),
    ) -> None:
        _check_settings(lr, rho, gamma, sigma, trials, line_search)
        super().__init__(params, {"lr": lr})
        if len(self.param_groups) != 1:
            raise IncompatibleError("SubspaceOptimizer: found several param groups; give one list of parameters.")
        self.rho, self.gamma, self.sigma = rho, gamma, sigma
        self.trials, self.line_search = trials, line_search
        first = self._checked_parameters(basis)
        self.basis = basis.to(first.device, first.dtype)
        self.inverse_hessian = InverseHessian(basis.components)
        self.accepted = self.trial = 0
        self.loss = math.nan
        self._alike = basis.group is None
        self._buffers = tuple(buffers)
        self._residual = torch.zeros(basis.length, dtype=first.dtype, device=first.device)
        self._lifted = self._residual.new_zeros(2, basis.length)
        self._mark: Tensor | None = None
        self._wanted: Tensor | None = None
        if basis.group is None:
            self._find_mark()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Tensor:
        """Update once and return the loss before the update, shape ``()``.

        Args:
            closure: Returns the loss of the batch and does nothing else. Gradients that are there, of a loss that a
                :class:`~torchboost.core.closure.Replay` has seen, are used; otherwise the step runs the backward pass
                itself, and clears the gradients at its end.

        Raises:
            TypeError, ValueError: There is no closure, or it does not return a loss, or does more than that.
            IncompatibleError: A parameter was frozen after the basis was made.

        What the closure raises in a trial passes through; weights, buffers and state are then as before the step, but
        for what the first pass moved.
        """
        if closure is None:
            raise TypeError(
                "SubspaceOptimizer.step: found no closure, but its line search evaluates the loss again: call "
                "optimizer.step(lambda: loss_fn(model(inputs), labels)) in place of backward() and step()."
            )
        parameters = self.param_groups[0]["params"]
        replay = closure if isinstance(closure, Replay) else Replay(closure, parameters[0].device)
        ours = replay.loss is None
        if any(not parameter.requires_grad for parameter in parameters):
            raise IncompatibleError(
                "steps in a subspace: a parameter of the basis was frozen (requires_grad=False) after the basis was "
                "made; freeze before."
            )
        if ours:
            replay.backward(parameters)
        assert replay.loss is not None
        self._update(replay, replay.loss)
        if ours:
            self.zero_grad()
        return replay.loss

    def _update(self, replay: Replay, loss: Tensor) -> None:
        parameters = self.param_groups[0]["params"]
        gradient = torch.cat([_gradient(parameter).reshape(-1) for parameter in parameters])
        if self._mark is None:
            self._find_mark()
            self._check_mark(self._wanted)
        if not self._alike:
            self._check_alike(gradient)
        projected = self.basis.project(gradient)
        self.loss = start = self._mean(loss)
        self.trial = 0
        if not (projected.isfinite().all() and math.isfinite(start)):
            return
        before = self._gathered()
        direction = self.inverse_hessian.direction(projected)
        along, inside = self.basis.lift(torch.stack([direction, projected]), self._lifted)
        slope = float(projected @ direction)
        try:
            with self._buffers_kept():
                length = self._search(replay, before, along, start, slope)
        except BaseException:
            self._place(before)
            self.inverse_hessian.reject()
            raise
        if length:
            self.inverse_hessian.accept(direction * length)
            self.accepted += 1
        else:
            self.inverse_hessian.reject()
        self._residual.mul_(self.gamma).add_(gradient).sub_(inside)
        self._place(before.add_(along, alpha=length).sub_(self._residual, alpha=self.param_groups[0]["lr"]))

    def _search(self, replay: Replay, before: Tensor, along: Tensor, start: float, slope: float) -> float:
        """Return the step length along the direction, 0 if no trial is good enough. The weights may have changed."""

        def loss_at(length: float) -> float:
            self._place(torch.add(before, along, alpha=length))
            return self._mean(replay())

        best, lowest = 0.0, start
        length = 1.0
        for trial in range(1, self.trials + 1):
            loss = loss_at(length)
            enough = loss < start + self.sigma * length * slope
            if enough and loss < lowest:
                best, lowest, self.trial = length, loss, trial
            if self.line_search == "parabola" and trial == 1:
                curvature = 2 * (loss - start - slope)
                if not curvature > 0:
                    break
                length = -slope / curvature
            elif best:
                break
            else:
                length *= self.rho
        return best

    def state_dict(self) -> dict[str, Any]:
        """Return torch's layout, with the state kept between updates under ``"subspace"``."""
        own = {
            "inverse_hessian": self.inverse_hessian.state_dict(),
            "residual": self._residual.clone(),
            "accepted": self.accepted,
            "mark": self._wanted if self._mark is None else self._mark.clone(),
        }
        return {**super().state_dict(), "subspace": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned.

        Raises:
            ValueError: The checkpoint belongs to other directions; nothing was loaded. If ranks share the rows, the
                first step may raise this.
        """
        own = state_dict.get("subspace")
        if own is None or own["residual"].shape != self._residual.shape:
            found = "none" if own is None else f"one of {len(own['residual'])} weights"
            raise ValueError(
                f"the checkpoint holds the state of a subspace: found {found}, wanted one of {self.basis.length} "
                "weights; load it into the optimizer that it was saved from."
            )
        mark = own["mark"]
        wanted = None if mark is None else mark.to("cpu", torch.float64, copy=True)
        self._check_mark(wanted)
        self._wanted = wanted
        self.inverse_hessian.load_state_dict(own["inverse_hessian"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "subspace"})
        self._residual.copy_(own["residual"])
        self.accepted = int(own["accepted"])

    def _find_mark(self) -> None:
        """Project a fixed vector, to compare directions; ranks that share the rows must call this together."""
        vector = torch.arange(self.basis.length, device=self._residual.device).to(self._residual.dtype).cos()
        self._mark = self.basis.project(vector)

    def _check_mark(self, wanted: Tensor | None) -> None:
        found = self._mark
        if found is None or wanted is None or found.shape != wanted.shape:
            return
        if not torch.allclose(found, wanted, rtol=1e-3, atol=1e-3):
            raise ValueError(
                "the checkpoint holds the state of another basis with as many directions; load it with the files that "
                "its basis was made from."
            )

    def _check_alike(self, gradient: Tensor) -> None:
        """Check once that the ranks have the same gradient; otherwise their weights would diverge."""
        mine = gradient.to(torch.float64).sum().reshape(1)
        sums = [torch.empty_like(mine) for _ in range(self.basis.ranks)]
        dist.all_gather(sums, mine, group=self.basis.group)
        found = torch.cat(sums)
        if not found.isfinite().all():
            return
        if not (found == found[0]).all():
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

    def _gathered(self) -> Tensor:
        return torch.cat([parameter.reshape(-1) for parameter in self.param_groups[0]["params"]])

    def _place(self, vector: Tensor) -> None:
        """Write a vector of all weights into the parameters."""
        parameters = self.param_groups[0]["params"]
        parts = vector.split([parameter.numel() for parameter in parameters])
        foreach.copy_(parameters, [p.view_as(q) for p, q in zip(parts, parameters, strict=True)])

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        kept = [buffer.clone() for buffer in self._buffers]
        try:
            yield
        finally:
            for buffer, value in zip(self._buffers, kept, strict=True):
                buffer.copy_(value)

    def _checked_parameters(self, basis: SubspaceBasis) -> Tensor:
        parameters: list[Tensor] = self.param_groups[0]["params"]
        length = sum(parameter.numel() for parameter in parameters)
        if length != basis.length:
            raise ValueError(
                f"basis: spans {basis.length} weights, the parameters have {length}; make the basis from checkpoints "
                "of this model, with the same parameters trained."
            )
        check_weights(parameters)
        return parameters[0]


def check_weights(parameters: Sequence[Tensor]) -> None:
    """Refuse weights that a step in a subspace cannot move.

    Raises:
        IncompatibleError: Several precisions or devices, or other than float32 and float64; shards.
    """
    kinds = {(p.dtype, p.device) for p in parameters}
    if len(kinds) != 1 or parameters[0].dtype not in (torch.float32, torch.float64):
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "no parameters"
        raise IncompatibleError(f"steps in a subspace: found {found}; train in float32 (or float64) on one device.")
    if any(type(p.data) is not Tensor for p in parameters):
        raise IncompatibleError(
            "steps in a subspace: found sharded parameters, but whole ones are needed: use DistributedDataParallel."
        )


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad if parameter.grad.layout is torch.strided else parameter.grad.to_dense()


def _check_settings(lr: float, rho: float, gamma: float, sigma: float, trials: int, line_search: str) -> None:
    check_number("lr", lr)
    for name, value in (("rho", rho), ("sigma", sigma), ("gamma", gamma)):
        check_number(name, value, above=name != "gamma")
        if value >= 1:
            raise ValueError(f"{name}: found {value}; give a number below 1.")
    if not is_integer(trials) or trials < 1:
        raise ValueError(f"trials: found {trials!r}; give an integer of 1 or more.")
    if line_search not in ("backtracking", "parabola"):
        raise ValueError(f"line_search={line_search!r}: allowed are 'backtracking' and 'parabola'.")
