"""Replay the steps of dense Adam that rows without a gradient have missed, for all rows at once.

In such a step momentum still moves the weight, both moments shrink, and weight decay applies. Because of epsilon the
sum of the moves has no closed form, so the steps are replayed one by one. A row leaves the loop once no further move
can change its weight; the rest of its moments and of decoupled weight decay is a product, computed in one operation.

Float32 on the CPU is replayed by a C kernel, row by row in the cache; anything else, and if there is no C compiler, by
tensor operations on all rows at once.
"""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchboost.core.native import compiled
from torchboost.errors import IncompatibleError

__all__ = ["FORM", "form_of", "new_past", "record", "replay"]

FORM = ("nesterov", "amsgrad", "decoupled_weight_decay", "bias_correction", "eps_uncorrected")
"""Options that choose the formula."""

CHUNK = 32
"""Missed steps between two checks for rows that have come to rest."""


MOST = 2**17
"""Missed steps whose factors are kept in one table for the C kernel: 5 MiB."""


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

    Equal to dense Adam up to rounding. Cost: one pass over the rows per missed step until a row rests, about 250 steps
    with ``betas=(0.9, 0.999)``. Rows never rest with coupled (L2) weight decay, with ``beta1 >= sqrt(beta2)``, or if
    the betas changed meanwhile.

    Args:
        rows: ``"weight"``, ``"exp_avg"``, ``"exp_avg_sq"`` and with ``amsgrad`` ``"max_exp_avg_sq"``: contiguous, in
            float32 or float64, the first axis counts rows.
        last: The last step of every row.
        step: The step that all rows must reach.
        past: The options of all steps after the earliest of ``last``.
    """
    # Oldest first: the rows that still have steps to make are then always the first ones. The copies on the host tell
    # which ones these are, so that a GPU is waited for once in a chunk.
    order = torch.argsort(last, stable=True)
    begin = last[order].double()
    begun = begin.cpu()
    late = int(torch.count_nonzero(begun < step))
    if not late:
        return
    order, begin, begun = order[:late], begin[:late], begun[:late]
    steps = _Steps.window(past, int(begun[0]), step, rows["weight"])
    live = {key: value.flatten(1)[order] if value.ndim > 1 else value[order, None] for key, value in rows.items()}
    if steps.fits_kernel(live["weight"], int(begun[0])):
        steps.run_kernel(live, begin)
        for key, value in live.items():
            rows[key].index_copy_(0, order, value.view(-1, *rows[key].shape[1:]))
        return
    while len(order):
        rest = steps.at_rest(live, begin).cpu()
        if bool(rest.any()):
            ended, going = (mask.nonzero().flatten().to(order.device) for mask in (rest, ~rest))
            done = {key: value[ended] for key, value in live.items()}
            steps.finish(done, begin[ended])
            for key, value in done.items():
                rows[key].index_copy_(0, order[ended], value.view(-1, *rows[key].shape[1:]))
            live = {key: value[going] for key, value in live.items()}
            order, begin, begun = order[going], begin[going], begun[~rest]
        steps.advance(live, begin, begun)
        begin, begun = ((numbers + CHUNK).clamp_(max=step) for numbers in (begin, begun))


@dataclass(frozen=True, slots=True)
class _Steps:
    """The options of a range of steps, for lookup by step.

    Args:
        first: The first step of each set of options.
        values: The sets, one per line: learning rate, weight decay, betas, epsilon.
        faded: Logarithm of the fraction of a weight that one step of decoupled decay leaves, per set.
        end: The last step.
        dtype: That of the rows; factors are rounded to it.
        form: As returned by :func:`form_of`.
        decays: Whether a step has weight decay.
        least: The smallest epsilon.
        shrink: Size of a move in units of the one before.
        can_rest: Whether the moves shrink from step to step.
    """

    first: Tensor
    values: Tensor
    faded: Tensor
    end: int
    dtype: torch.dtype
    form: tuple[bool, ...]
    decays: bool
    least: float
    shrink: float
    can_rest: bool

    @classmethod
    def window(cls, past: Mapping[str, Any], begin: int, end: int, like: Tensor) -> _Steps:
        options, form = past["options"], tuple(past["form"])
        start = max(bisect_right(options, (begin + 1, math.inf)) - 1, 0)
        table = torch.tensor(options[start:], dtype=torch.float64, device="cpu")
        _, _, decay, beta1, beta2, eps = table.unbind(1)
        shrink = float(beta1[0]) / math.sqrt(float(beta2[0])) if beta2[0] else math.inf
        varied, decays = bool((beta1 != beta1[0]).any() or (beta2 != beta2[0]).any()), bool(decay.any())
        can_rest = not (varied or shrink >= 1 or (decays and not form[2]))
        least, table = float(eps.min()), table.to(like.device)
        values = table[:, 1:].contiguous()
        faded = (1 - values[:, 0] * values[:, 1]).to(like.dtype).double().log()
        first = table[:, 0].contiguous()
        return cls(first, values, faded, end, like.dtype, form, decays, least, shrink, can_rest)

    def at_rest(self, rows: Mapping[str, Tensor], begin: Tensor) -> Tensor:
        """Return a mask of the rows that further steps move by less than rounding."""
        missing = self.end - begin
        if not self.can_rest:
            return missing <= 0
        square = rows["exp_avg_sq"]
        if "max_exp_avg_sq" in rows:
            square = torch.maximum(square, rows["max_exp_avg_sq"])
        reach, left = self._reach(begin)
        travel = reach[:, None] * rows["exp_avg"].abs() / square.sqrt().clamp_(min=self.least)
        info = torch.finfo(self.dtype)
        limit = rows["weight"].abs() * (left[:, None] * (info.eps / 8)) + info.tiny
        return (missing <= 0) | (travel <= limit).all(1)

    def _reach(self, begin: Tensor) -> tuple[Tensor, Tensor]:
        """Return a bound of all moves after a step in units of ``|m| / sqrt(v)``, and what decay leaves of a weight."""
        # The first step moves at most lr / (1 - beta1**n) * |m| / max(sqrt(v), eps), every later one at most
        # beta1 / sqrt(beta2) times the one before; what counts is their sum.
        _, _, decoupled, corrected, _ = self.form
        beta1 = self.values[0, 2]
        reach = self.values[:, 0].max() * self.shrink / (1 - self.shrink)
        reach = (reach / (1 - beta1 ** (begin + 1)) if corrected else reach.expand_as(begin)).to(self.dtype)
        return reach, self._left(begin).to(self.dtype) if decoupled else torch.ones_like(reach)

    def finish(self, rows: Mapping[str, Tensor], begin: Tensor) -> None:
        """Take resting rows to the end."""
        missing = (self.end - begin)[:, None]
        _, _, decoupled, _, _ = self.form
        beta1, beta2 = self.values[0, 2], self.values[0, 3]
        # The loop multiplies by factors rounded to the precision of the rows.
        kept1 = 1 - (1 - beta1).to(self.dtype).double()
        kept2 = beta2.to(self.dtype).double()
        if decoupled:
            rows["weight"].mul_(torch.where(missing > 0, self._left(begin)[:, None], 1.0).to(self.dtype))
        if "max_exp_avg_sq" in rows:
            next_square = rows["exp_avg_sq"] * torch.where(missing > 0, kept2, 0.0).to(self.dtype)
            torch.maximum(rows["max_exp_avg_sq"], next_square, out=rows["max_exp_avg_sq"])
        rows["exp_avg"].mul_((kept1**missing).to(self.dtype))
        rows["exp_avg_sq"].mul_((kept2**missing).to(self.dtype))

    def advance(self, rows: Mapping[str, Tensor], begin: Tensor, begun: Tensor) -> None:
        """Make the next steps, at most ``CHUNK``. ``begun`` is ``begin``, in ascending order, on the host."""
        if not len(begin):
            return
        nesterov, _, decoupled, _, uncorrected = self.form
        count = min(CHUNK, self.end - int(begun[0]))
        numbers = torch.arange(1, count + 1, dtype=torch.float64, device=begin.device)[:, None] + begin
        latest = self.end - torch.arange(1, count + 1, dtype=torch.float64, device="cpu")
        active = torch.searchsorted(begun, latest, right=True).tolist()
        factors = self._factors(numbers)
        by_step = zip(*(factor[..., None] for factor in factors), strict=True)
        nothing = torch.zeros_like(rows["weight"])
        for n, (new1, kept2, new2, floor, root2, scale, fade, pull) in zip(active, by_step, strict=True):
            weight, mean, square, grad = (t[:n] for t in (rows["weight"], rows["exp_avg"], rows["exp_avg_sq"], nothing))
            if self.decays and decoupled:
                weight.mul_(fade[:n])
            elif self.decays:
                grad = weight * pull[:n]
            mean.lerp_(grad, new1[:n])
            square.mul_(kept2[:n])
            if self.decays and not decoupled:
                square.addcmul_(grad, grad * new2[:n])
            if "max_exp_avg_sq" in rows:
                largest = rows["max_exp_avg_sq"][:n]
                square = torch.maximum(largest, square, out=largest)
            ahead = mean.lerp(grad, new1[:n]) if nesterov else mean
            root = square.sqrt() + floor[:n] if uncorrected else square.sqrt().div_(root2[:n]).add_(floor[:n])
            weight.addcdiv_(ahead * scale[:n], root)

    def _factors(self, numbers: Tensor) -> list[Tensor]:
        """Return the eight factors of steps, rounded to the precision of the rows."""
        _, _, _, corrected, uncorrected = self.form
        lr, decay, beta1, beta2, eps = self.values[self._index(numbers)].unbind(-1)
        first = 1 - beta1**numbers if corrected else torch.ones_like(numbers)
        second = (1 - beta2**numbers).sqrt() if corrected else torch.ones_like(numbers)
        size = -lr * second / first if uncorrected else -lr / first
        factors = (1 - beta1, beta2, 1 - beta2, eps, second, size, 1 - lr * decay, decay)
        return [factor.to(self.dtype) for factor in factors]

    def fits_kernel(self, weight: Tensor, begin: int) -> bool:
        """Whether the C kernel takes these rows; False without a C compiler."""
        usual = weight.dtype is torch.float32 and weight.device.type == "cpu" and self.end - begin <= MOST
        return usual and not torch.compiler.is_compiling() and _kernel() is not None

    def run_kernel(self, rows: Mapping[str, Tensor], begin: Tensor) -> None:
        """Take all rows to the end, in place."""
        kernel = _kernel()
        if kernel is None:
            return
        first = int(begin[0])
        numbers = torch.arange(first, self.end + 1, dtype=torch.float64, device="cpu")
        rests = self.can_rest
        after = self._reach(numbers) if rests else [torch.zeros_like(numbers).float()] * 2
        table = torch.stack([*self._factors(numbers), *after], dim=1)
        starts, stops = begin.long(), torch.empty(len(begin), dtype=torch.int64, device="cpu")
        nesterov, amsgrad, decoupled, _, uncorrected = self.form
        decays, info = self.decays, torch.finfo(torch.float32)
        pointers = [rows[name].data_ptr() for name in ("weight", "exp_avg", "exp_avg_sq")]
        pointers.append(rows["max_exp_avg_sq"].data_ptr() if amsgrad else 0)
        job = _Job(
            *pointers,
            *(tensor.data_ptr() for tensor in (starts, stops, table)),
            *(len(starts), rows["weight"].shape[1], first, self.end),
            *(nesterov, decays and decoupled, decays and not decoupled, uncorrected, rests),
            *(self.least, info.eps / 8, info.tiny),
        )
        kernel.replay(ctypes.byref(job), torch.get_num_threads())
        self.finish(dict(rows), stops.double())

    def _index(self, steps: Tensor) -> Tensor:
        return (torch.searchsorted(self.first, steps, right=True) - 1).clamp_(min=0)

    def _left(self, begin: Tensor) -> Tensor:
        """Return the fraction of a weight that decoupled decay leaves between a step and the end."""
        lengths = self.first.diff(append=self.first.new_full((1,), self.end + 1))
        before = (lengths * self.faded).cumsum(0) - lengths * self.faded
        index = self._index(begin)
        until_begin = before[index] + (begin - self.first[index] + 1) * self.faded[index]
        return ((lengths * self.faded).sum() - until_begin).exp()


class _Job(ctypes.Structure):
    """The argument of the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "mean", "square", "largest", "begin", "stop", "steps")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "first", "end")),
        *((name, ctypes.c_int64) for name in ("nesterov", "fades", "pulls", "uncorrected", "rests")),
        *((name, ctypes.c_float) for name in ("least", "fraction", "tiny")),
    )


@cache
def _kernel() -> ctypes.CDLL | None:
    """Compile and load the kernel; None if that is not possible here."""
    try:
        kernel = compiled(Path(__file__).with_name("missed_steps_kernel.c"))
    except IncompatibleError:
        return None
    kernel.replay.argtypes = [ctypes.c_void_p, ctypes.c_int]
    kernel.replay.restype = None
    return kernel
