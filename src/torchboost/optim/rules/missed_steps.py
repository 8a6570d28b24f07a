"""Replay the steps of dense Adam that rows without a gradient have missed, for all rows at once.

In such a step momentum still moves the weight, both moments shrink, and weight decay applies. The moments after any
number of steps are products, so the moves are a sum in which each step has its own factors. Epsilon is added to the
root of the second moment, so the sum has no closed form; its terms shrink, and those that can no longer change the
weight are not computed. With coupled (L2) weight decay the moments depend on the weight, and steps are made in turn.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["FORM", "form_of", "new_past", "record", "replay"]

FORM = ("nesterov", "amsgrad", "decoupled_weight_decay", "bias_correction", "eps_uncorrected")
"""Options that choose the formula."""

CHUNK = 32
"""Steps whose terms are summed together."""

LEAST = 1e-30
"""Shares of a second moment's root that are told apart from none."""

SMALLEST = 1e-300
"""Factors below are counted as this, so that their logarithms are finite; a power of it is 0."""


def form_of(group: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return the values of ``FORM``."""
    return tuple(bool(group[name]) for name in FORM)


def new_past(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return an empty record of past options: plain numbers, for a checkpoint."""
    return {"form": form_of(group), "options": []}


def record(past: dict[str, Any], step: int, group: Mapping[str, Any]) -> None:
    """Record the options used at a step; nothing is added while they do not change.

    Cost: about 150 bytes for each step with a change.

    Args:
        past: As returned by :func:`new_past`.
        step: Counted from 1.
        group: The options.
    """
    options = past["options"]
    values = (float(group["lr"]), float(group["weight_decay"]), *map(float, group["betas"]), float(group["eps"]))
    if not options or options[-1][1:] != values:
        options.append((step, *values))


def replay(rows: Mapping[str, Tensor], last: Tensor, step: int, past: Mapping[str, Any]) -> None:
    """Bring rows up to a step, in place, as dense Adam with a gradient of zero would.

    Equal to dense Adam up to rounding. Cost: one pass over a row per missed step until no further one can change it,
    about 200 steps with ``betas=(0.9, 0.999)``. All missed steps count with coupled (L2) weight decay, and with
    ``beta1 >= sqrt(beta2)``.

    Args:
        rows: ``"weight"``, ``"exp_avg"``, ``"exp_avg_sq"`` and with ``amsgrad`` ``"max_exp_avg_sq"``: contiguous, in
            float32 or float64, the first axis counts rows.
        last: The last step of every row, below ``step``.
        step: The step that all rows must reach.
        past: The options of all steps after the earliest of ``last``.
    """
    if not len(last):
        return
    flat = {key: value.view(len(last), -1) for key, value in rows.items()}
    history = _History.of(past, int(last.min()), step, rows["weight"])
    if history.coupled:
        _make_steps(history, flat, last.double())
    else:
        _sum_steps(history, flat, last.double())


@dataclass(frozen=True, slots=True)
class _History:
    """The options of a range of steps, for lookup by step.

    Args:
        first: The first step of each set of options.
        values: The sets, one per line: learning rate, weight decay, betas, epsilon.
        logs: Logarithms of what a step leaves of both moments and, with decoupled decay, of a weight, per set.
        before: Sums of ``logs`` over all steps before each set.
        end: The last step.
        form: Options that choose the formula, by name.
    """

    first: Tensor
    values: Tensor
    logs: Tensor
    before: Tensor
    end: int
    form: Mapping[str, Any]

    @classmethod
    def of(cls, past: Mapping[str, Any], begin: int, end: int, like: Tensor) -> _History:
        options = past["options"]
        form: dict[str, Any] = dict(zip(FORM, past["form"], strict=True))
        start = max(bisect_right(options, (begin + 1, math.inf)) - 1, 0)
        table = torch.tensor(options[start:], dtype=torch.float64, device="cpu")
        first, values = table[:, 0].contiguous(), table[:, 1:]
        lr, decay, beta1, beta2, _ = values.unbind(1)
        left = 1 - lr * decay if form["decoupled_weight_decay"] else torch.ones_like(lr)
        # Dense Adam multiplies by factors that are rounded to the precision of the rows.
        beta1, beta2, left = (factor.to(like.dtype).double() for factor in (1 - beta1, beta2, left))
        logs = torch.stack([1 - beta1, beta2, left], 1).clamp_(min=SMALLEST).log_()
        sums = (first.diff(append=first.new_full((1,), end + 1))[:, None] * logs).cumsum(0)
        before = torch.cat([sums.new_zeros(1, 3), sums[:-1]])
        near = like.device
        return cls(first.to(near), values.contiguous().to(near), logs.to(near), before.to(near), end, form)

    @property
    def coupled(self) -> bool:
        """Whether weights are added to gradients."""
        return not self.form["decoupled_weight_decay"] and bool(self.values[:, 1].any())

    def at(self, steps: Tensor) -> tuple[Tensor, ...]:
        """Return the options of steps."""
        return self.values[self._index(steps)].unbind(-1)

    def until(self, steps: Tensor) -> Tensor:
        """Return the sums of ``logs`` over all steps until these, which are included."""
        index = self._index(steps)
        return self.before[index] + (steps - self.first[index] + 1)[..., None] * self.logs[index]

    def left(self, begin: Tensor) -> Tensor:
        """Return what the steps after ``begin`` leave of both moments and of a weight."""
        return (self.until(torch.full_like(begin, self.end)) - self.until(begin)).exp_()

    def corrections(self, steps: Tensor, beta1: Tensor, beta2: Tensor) -> tuple[Tensor, Tensor]:
        """Return the corrections of the first moment and of the root of the second one."""
        if not self.form["bias_correction"]:
            return torch.ones_like(steps), torch.ones_like(steps)
        return 1 - beta1**steps, (1 - beta2**steps).sqrt()

    def terms(self, steps: Tensor, begin: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``a``, ``e`` of the moves ``a m / (sqrt(v) + e)``, with the decay of the steps after them.

        Args:
            steps: Shape ``(rows, steps)``.
            begin: The last step that each row has made.
        """
        low, high = int(steps.min()), int(steps.max())
        if high - low < steps.numel():
            table = self._factors(torch.arange(low, high + 1, dtype=steps.dtype, device=steps.device))
            size, scale, eps, mean, square = (column[(steps - low).long()] for column in table)
        else:
            size, scale, eps, mean, square = self._factors(steps)
        before = self.until(begin)
        # A step leaves shares of both moments. Below the least share the root is nothing next to epsilon.
        size = size * (mean - before[:, :1]).exp_()
        if not self.form["amsgrad"]:
            scale = scale * (square - before[:, 1:2]).div_(2).exp_()
        scale = scale.clamp(min=LEAST)
        return size / scale, eps / scale

    def _factors(self, steps: Tensor) -> tuple[Tensor, ...]:
        lr, _, beta1, beta2, eps = self.at(steps)
        first, second = self.corrections(steps, beta1, beta2)
        mean, square, fade = self.until(steps).unbind(-1)
        size = -lr / first * (self.until(steps.new_tensor([float(self.end)]))[:, 2] - fade).exp_()
        if self.form["nesterov"]:
            size *= beta1
        if self.form["eps_uncorrected"]:
            return size * second, torch.ones_like(size), eps, mean, square
        return size, 1 / second, eps, mean, square

    def reach(self, weight: Tensor, mean: Tensor, root: Tensor, begin: Tensor) -> Tensor:
        """Return the number of steps after which all further ones move a row by less than rounding."""
        missing = self.end - begin
        lr, _, beta1, beta2, eps = self.values.unbind(1)
        shrink = float((beta1 / beta2.sqrt()).max())  # of a move in units of the one before, at most
        if not shrink < 1:
            return missing
        # A first step moves at most lr / (1 - beta1**n) * |m| / max(sqrt(v), eps); the sum of all further ones counts.
        first = 1 - beta1.max() ** (begin + 1) if self.form["bias_correction"] else torch.ones_like(begin)
        farthest = lr.max() / (1 - shrink) / first
        info = torch.finfo(weight.dtype)
        travel = farthest.to(weight.dtype)[:, None] * mean.abs() / root.clamp(min=float(eps.min()))
        limit = weight.abs() * self.left(begin)[:, 2:].to(weight.dtype) * (info.eps / 8) + info.tiny
        needed = (limit / travel.clamp_(min=info.tiny)).amin(1).double().log_() / math.log(max(shrink, SMALLEST))
        return torch.minimum(needed.ceil_().nan_to_num_(math.inf, math.inf).clamp_(min=0), missing)

    def _index(self, steps: Tensor) -> Tensor:
        return (torch.searchsorted(self.first, steps, right=True) - 1).clamp_(min=0)


def _sum_steps(history: _History, rows: Mapping[str, Tensor], begin: Tensor) -> None:
    weight, mean, square = (rows[key] for key in ("weight", "exp_avg", "exp_avg_sq"))
    largest = rows.get("max_exp_avg_sq")
    if largest is not None:  # of the second moments from here on, the next one is the largest
        torch.maximum(largest, square * history.at(begin + 1)[3].to(square.dtype)[:, None], out=largest)
    root = (square if largest is None else largest).sqrt()
    reach = history.reach(weight, mean, root, begin)
    # The rows that still have steps to make are always the first ones. A copy on the host tells how many they are.
    order = reach.argsort(descending=True)
    reach, begun, root = reach[order], begin[order], root[order]
    counts, total = (-reach).cpu(), torch.zeros_like(root)
    space = root.new_empty(len(root), CHUNK, root.shape[1])  # for the terms of a chunk, again and again
    for start in range(0, -int(counts[0]), CHUNK):
        count = min(CHUNK, -int(counts[0]) - start)
        active = int(torch.searchsorted(counts, float(-start)))
        number = torch.arange(start + 1, start + count + 1, dtype=torch.float64, device=begin.device)
        size, eps = history.terms((number + begun[:active, None]).clamp_(max=history.end), begun[:active])
        size = size.masked_fill_(number > reach[:active, None], 0.0).to(root.dtype)
        terms = torch.add(root[:active, None], eps.to(root.dtype)[..., None], out=space[:active, :count])
        total[:active] += torch.bmm(size[:, None], terms.reciprocal_())[:, 0]
    left1, left2, left = history.left(begin).to(weight.dtype)[..., None].unbind(1)
    moves = torch.empty_like(total).index_copy_(0, order, total).mul_(mean)
    weight.mul_(left).add_(moves)
    mean.mul_(left1)
    square.mul_(left2)


def _make_steps(history: _History, rows: Mapping[str, Tensor], begin: Tensor) -> None:
    """Make the steps one by one, as the moments depend on the weights."""
    order = begin.argsort()
    live, begin = {key: value[order] for key, value in rows.items()}, begin[order]
    begun, earliest = begin.cpu(), int(begin[0])
    for step in range(earliest + 1, history.end + 1):
        active = int(torch.searchsorted(begun, float(step)))
        weight, mean, square = (live[key][:active] for key in ("weight", "exp_avg", "exp_avg_sq"))
        number = torch.full((), step, dtype=torch.float64, device=begin.device)
        lr, decay, beta1, beta2, eps = history.at(number)
        first, second = history.corrections(number, beta1, beta2)
        grad = weight * float(decay)
        mean.lerp_(grad, float(1 - beta1))
        square.mul_(float(beta2)).addcmul_(grad, grad, value=float(1 - beta2))
        if "max_exp_avg_sq" in live:
            largest = live["max_exp_avg_sq"][:active]
            square = torch.maximum(largest, square, out=largest)
        ahead = mean.lerp(grad, float(1 - beta1)) if history.form["nesterov"] else mean
        uncorrected = history.form["eps_uncorrected"]
        root = square.sqrt() if uncorrected else square.sqrt().div_(float(second))
        size = lr * second / first if uncorrected else lr / first
        weight.addcdiv_(ahead, root.add_(float(eps)), value=-float(size))
    for key, value in live.items():
        rows[key].index_copy_(0, order, value)
