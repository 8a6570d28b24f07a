"""Unscale, decay, centralise and measure the norm in one pass over the gradients; the Python side of its C kernel."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from operator import attrgetter, is_
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchboost.core.native import compiled
from torchboost.core.torch_private import foreach
from torchboost.errors import IncompatibleError
from torchboost.optim.memory_layout import is_dense
from torchboost.optim.pipeline import Gradients, GradientTransform
from torchboost.optim.shares import joint_norm
from torchboost.optim.transforms import Centralize, ClipNorm, Decay, Unscale, wish

__all__ = ["BLOCK_ENTRIES", "Pass", "cuts_of", "fills_rows"]

ORDER = (Unscale, Decay, Centralize, ClipNorm)

BLOCK_ENTRIES = 2**17
"""Entries per block: half a megabyte of each array, and a few hundred blocks for 25 million weights."""

BLOCK = np.dtype(
    [
        *((name, np.int64) for name in ("grad", "weight", "rows", "columns", "centralize")),
        *((name, np.float32) for name in ("unscale", "decay", "measure", "padding")),
    ]
)


_Plan = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The first transforms of a chain, as many as the kernel runs in their order.

    The gradients differ from those of the transforms one by one only by rounding.
    Cost: one read of the gradients, and one write if they change; one more of each if they are clipped and nothing
    later divides them.

    Args:
        length: Number of transforms.
    """

    length: int
    unscale: Unscale | None = None
    decay: Decay | None = None
    centralize: Centralize | None = None
    clip_norm: ClipNorm | None = None
    last: _Last = field(default_factory=lambda: _Last(), compare=False, repr=False)

    @classmethod
    def of(cls, transforms: Sequence[GradientTransform]) -> Pass | None:
        """Return the transforms at the start of a chain that the kernel runs; None if there is none."""
        found: dict[type, Any] = {}
        for transform in transforms:
            kind = type(transform)
            later = kind in ORDER and all(ORDER.index(kind) > ORDER.index(earlier) for earlier in found)
            if not later or (isinstance(transform, ClipNorm) and transform.norm_type != 2):
                break
            found[kind] = transform
        if not found:
            return None
        return cls(
            length=len(found),
            unscale=found.get(Unscale),
            decay=found.get(Decay),
            centralize=found.get(Centralize),
            clip_norm=found.get(ClipNorm),
        )

    def fits(self, gradients: Gradients) -> bool:
        """Whether the kernel can work on these gradients; False without a C compiler, and while torch compiles.

        They must be ordinary float32 tensors on the CPU that fill their memory row by row, and with a decay they must
        lie as their parameters do.
        """
        if not gradients.grads or torch.compiler.is_compiling() or _kernel() is None:
            return False
        if not set(map(type, gradients.grads)) | set(map(type, gradients.params)) <= {Tensor, nn.Parameter}:
            return False  # others may keep their data elsewhere
        if set(map(_KIND, gradients.grads)) != {_WANTED}:
            return False
        if not all(map(fills_rows, gradients.grads)):
            return False
        if self.decay is None:
            return True
        pairs = zip(gradients.params, gradients.grads, strict=True)
        return all(_KIND(param) == _WANTED and param.stride() == grad.stride() for param, grad in pairs)

    def run(self, gradients: Gradients, *, hand_over: bool, grad_scale: float) -> float:
        """Change the gradients in place, and return what they are still to be divided by.

        Args:
            gradients: For which :meth:`fits` holds.
            hand_over: Whether the caller divides. If not, clipping takes one more pass, and the result is 1.
            grad_scale: Loss scale that the gradients contain. With ``hand_over`` and no decay it stays in them.
        """
        scale = grad_scale * (1.0 if self.unscale is None else self.unscale.scale)
        inside = 1.0 if self.decay is None and hand_over else scale
        left = scale / inside
        blocks = self._blocks(gradients, inside, left)
        changes = self.decay is not None or self.centralize is not None or inside != 1
        if changes or self.clip_norm is not None:
            squares = np.zeros(len(blocks), np.float64)
            kernel = _kernel()
            if len(blocks) and kernel is not None:
                kernel.prepare(blocks.ctypes.data, len(blocks), squares.ctypes.data, torch.get_num_threads())
            if changes:
                torch.autograd.graph.increment_version(gradients.grads)
        else:
            squares = np.zeros(0)
        if self.clip_norm is None:
            return left
        norm = math.sqrt(squares.sum())
        if gradients.share is not None:
            norm = float(joint_norm(torch.tensor(norm, device="cpu"), 2.0, gradients.share))
        return self._clipped(gradients, norm, left, hand_over=hand_over)

    def _clipped(self, gradients: Gradients, norm: float, left: float, *, hand_over: bool) -> float:
        clip = self.clip_norm
        if clip is None or norm <= clip.max_norm - 1e-6:
            return left
        if clip.error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"{clip!r} found a non-finite norm, {norm}.")
        over = (norm + 1e-6) / clip.max_norm  # NaN must reach the weights, as in torch
        if hand_over:
            return left * over
        foreach.div_(gradients.grads, over)
        return left

    def _blocks(self, gradients: Gradients, scale: float, left: float) -> np.ndarray:
        if not self.last.holds(gradients, self._flags(gradients)):
            self.last.note(gradients, self._planned(gradients), self._flags(gradients))
        plan, owner, offsets = self.last.plan
        count = len(gradients.grads)
        blocks = plan.copy()
        blocks["grad"] = np.fromiter(map(Tensor.data_ptr, gradients.grads), np.int64, count)[owner] + offsets
        blocks["unscale"], blocks["measure"] = 1.0 / scale, 1.0 / left
        if self.decay is None:
            blocks["weight"] = blocks["grad"]  # never read
            return blocks
        blocks["weight"] = np.fromiter(map(Tensor.data_ptr, gradients.params), np.int64, count)[owner] + offsets
        blocks["decay"] = np.array([self.decay.of(group) for group in gradients.groups], np.float32)[owner]
        return blocks

    def _flags(self, gradients: Gradients) -> list[Any]:
        """Return what decides about each group, and whether the kernel centralises it."""
        flag = None if self.centralize is None else self.centralize.flag
        groups = {id(group): group for group in gradients.groups}.values()
        return [(wish(group), flag is None or bool(group.get(flag))) for group in groups]

    def _planned(self, gradients: Gradients) -> _Plan:
        """Return blocks without addresses, the tensor of each block, and its offset in bytes."""
        central = [
            self.centralize is not None and self.centralize.applies(param, group)
            for param, group in zip(gradients.params, gradients.groups, strict=True)
        ]
        cuts = [
            cuts_of(grad.numel(), grad.shape[0] if flag else 1, flag)
            for grad, flag in zip(gradients.grads, central, strict=True)
        ]
        owner = np.repeat(np.arange(len(cuts)), [len(cut) for cut in cuts])
        lines = np.concatenate(cuts)
        blocks = np.zeros(len(owner), BLOCK)
        blocks["rows"], blocks["columns"] = lines[:, 1], lines[:, 2]
        blocks["centralize"] = np.array(central, np.int64)[owner]
        return blocks, owner, 4 * lines[:, 0]


class _Last:
    """The plan of the last step, which holds while the parameters, their shapes and the flags of their groups do."""

    def __init__(self) -> None:
        self._params: list[Tensor] = []
        self._shapes: list[torch.Size] = []
        self._groups: list[dict[str, Any]] = []
        self._flags: list[Any] = []
        self.plan: _Plan = (np.zeros(0, BLOCK), np.zeros(0, np.int64), np.zeros(0, np.int64))

    def holds(self, gradients: Gradients, flags: list[Any]) -> bool:
        """Whether the plan is that of these gradients."""
        return (
            len(self._params) == len(gradients.params)
            and all(map(is_, self._params, gradients.params))
            and self._shapes == list(map(_SHAPE, gradients.grads))
            and all(map(is_, self._groups, gradients.groups))
            and self._flags == flags
        )

    def note(self, gradients: Gradients, plan: _Plan, flags: list[Any]) -> None:
        """Keep a plan. The parameters are kept too, so that no other takes the place of one that is gone."""
        self._params, self._shapes = list(gradients.params), list(map(_SHAPE, gradients.grads))
        self._groups, self._flags, self.plan = list(gradients.groups), flags, plan


def fills_rows(tensor: Tensor) -> bool:
    """Whether the tensor fills its memory without gaps, row after row."""
    if tensor.is_contiguous():
        return True
    rows = tensor.shape[0] if tensor.ndim > 1 else 1
    return is_dense(tensor) and (rows <= 1 or tensor.stride(0) * rows == tensor.numel())


@lru_cache(maxsize=4096)
def cuts_of(entries: int, rows: int, centralize: bool) -> np.ndarray:
    """Return one line per block of a tensor: offset in entries, rows, columns."""
    if not centralize or not entries:  # no row to keep together
        starts = np.arange(0, entries, BLOCK_ENTRIES)
        return np.stack([starts, np.ones_like(starts), np.minimum(BLOCK_ENTRIES, entries - starts)], axis=1)
    columns = entries // rows
    per_block = max(1, BLOCK_ENTRIES // columns)
    starts = np.arange(0, rows, per_block)
    return np.stack([starts * columns, np.minimum(per_block, rows - starts), np.full_like(starts, columns)], axis=1)


_KIND, _SHAPE = attrgetter("dtype", "device.type", "layout"), attrgetter("shape")
_WANTED = (torch.float32, "cpu", torch.strided)


@cache
def _kernel() -> ctypes.CDLL | None:
    """Compile and load the kernel; None if that is not possible here."""
    try:
        kernel = compiled(Path(__file__).with_name("gradient_kernel.c"))
    except IncompatibleError:
        return None
    kernel.prepare.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int]
    kernel.prepare.restype = None
    return kernel
