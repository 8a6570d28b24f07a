"""Adam and its gradient transforms in two passes over memory on the CPU; the Python side of ``adam_kernel.c``."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchboost.core.native import compiled
from torchboost.core.torch_private import foreach
from torchboost.errors import IncompatibleError
from torchboost.optim.gradient_pass import cuts_of, fills_rows
from torchboost.optim.pipeline import GradientTransform
from torchboost.optim.rules.base import Batch, Nonfinite
from torchboost.optim.shares import Share, joint_norm
from torchboost.optim.transforms import Centralize, ClipNorm, ClipValue, Decay, Unscale

__all__ = ["Pipeline", "check_walkable", "load", "prepared"]

_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")

ORDER = (Unscale, Decay, Centralize, ClipNorm, ClipValue)

POINTERS = ("weight", "mean", "square", "largest", "grad")
SIZES = ("rows", "columns", "centralize")
NUMBERS = (
    *("unscale", "decay", "limit", "coupled", "keep", "beta1", "gain1", "beta2", "gain2", "ahead"),
    *("rate", "root", "eps", "padding"),
)
BLOCK = np.dtype([*((name, np.int64) for name in (*POINTERS, *SIZES)), *((name, np.float32) for name in NUMBERS)])


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A sequence of transforms as the kernel runs it; those that are None are skipped."""

    unscale: Unscale | None = None
    decay: Decay | None = None
    centralize: Centralize | None = None
    clip_norm: ClipNorm | None = None
    clip_value: ClipValue | None = None

    @classmethod
    def of(cls, transforms: Sequence[GradientTransform]) -> Pipeline:
        """Translate transforms that come in the kernel's order, each at most once.

        Raises:
            ValueError: The kernel does not have the transform, the order differs, or the norm is not Euclidean.
        """
        kinds = [type(transform) for transform in transforms]
        places = [ORDER.index(kind) if kind in ORDER else -1 for kind in kinds]
        if -1 in places or any(a >= b for a, b in pairwise(places)):
            raise ValueError(
                f"native=True: found the transforms {', '.join(kind.__name__ for kind in kinds)}; the kernel takes "
                f"{', '.join(kind.__name__ for kind in ORDER)}, each at most once, in this order. Leave native out."
            )
        found: dict[type, Any] = dict(zip(kinds, transforms, strict=True))
        clip = found.get(ClipNorm)
        if clip is not None and clip.norm_type != 2:
            raise ValueError(f"native=True: found ClipNorm with norm_type={clip.norm_type}; the kernel takes 2 only.")
        return cls(
            unscale=found.get(Unscale),
            decay=found.get(Decay),
            centralize=found.get(Centralize),
            clip_norm=clip,
            clip_value=found.get(ClipValue),
        )


@cache
def load() -> ctypes.CDLL:
    """Compile and load the kernel.

    Raises:
        IncompatibleError: See :func:`torchboost.core.native.compiled`.
    """
    kernel = compiled(Path(__file__).with_name("adam_kernel.c"))
    kernel.sum_squares.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int]
    kernel.adam.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int]
    kernel.sum_squares.restype = kernel.adam.restype = None
    return kernel


def prepared(
    groups: Sequence[Mapping[str, Any]],
    work: Sequence[Batch],
    pipeline: Pipeline,
    *,
    grad_scale: float = 1.0,
    nonfinite: Nonfinite = "ignore",
    share: Share | None = None,
) -> Callable[[], None] | None:
    """Read the gradients once for their norm, and return a function that updates everything in place.

    Args:
        groups: Param groups of Adam.
        work: Their batches: float32 tensors on the CPU. The gradients are only read.
        pipeline: The transforms before the update.
        grad_scale: Loss scale that the gradients still contain.
        nonfinite: As in :class:`~torchboost.optim.rules.base.UpdateRule`; a norm that overflows counts as not finite.
        share: The ranks among which the parameters are divided; the norm is that of all of them.

    Returns:
        The update, or None if it must be skipped.

    Raises:
        IncompatibleError: The kernel does not support a tensor.
        FloatingPointError, RuntimeError: The gradients are not finite and the settings require an error.
    """
    for group, batch in zip(groups, work, strict=True):
        keys = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        _check_states(batch, keys)
        batch.align(keys)
    blocks = _blocks(groups, work, pipeline, grad_scale)
    threads, clip = torch.get_num_threads(), 1.0
    if (len(blocks) or share is not None) and (pipeline.clip_norm is not None or nonfinite != "ignore"):
        squares = np.zeros(len(blocks), np.float64)
        if len(blocks):
            load().sum_squares(blocks.ctypes.data, len(blocks), squares.ctypes.data, threads)
        norm = math.sqrt(squares.sum())
        if share is not None:
            norm = float(joint_norm(torch.tensor(norm, device="cpu"), 2.0, share))
        if not math.isfinite(norm):
            if nonfinite == "skip":
                return None
            _complain(pipeline, nonfinite)
        if pipeline.clip_norm is not None:
            # Not min(): a NaN norm must reach the weights, as in torch.
            factor = pipeline.clip_norm.max_norm / (norm + 1e-6)
            clip = 1.0 if factor > 1 else factor

    def update() -> None:
        for batch in work:
            if batch.params:
                foreach.add_(batch.state("step"), 1)
        if len(blocks):
            load().adam(blocks.ctypes.data, len(blocks), clip, threads)

    return update


def _complain(pipeline: Pipeline, nonfinite: Nonfinite) -> None:
    if nonfinite == "raise":
        raise FloatingPointError("the gradients contain inf or nan; the update was skipped.")
    if pipeline.clip_norm is not None and pipeline.clip_norm.error_if_nonfinite:
        raise RuntimeError("the norm of the gradients is not finite; the update was skipped.")


def check_walkable(param: Tensor) -> None:
    """Refuse a parameter, or its float32 master, whose memory layout the kernel does not support.

    Raises:
        IncompatibleError: Not a dense float32 tensor on the CPU.
    """
    plain = type(param) in (Tensor, nn.Parameter)  # a sharded tensor keeps its data elsewhere
    if not plain or param.dtype is not torch.float32 or param.device.type != "cpu" or not fills_rows(param):
        raise IncompatibleError(
            f"native=True needs dense float32 parameters on the CPU (master_weights=True makes them float32), "
            f"found a {type(param).__name__} of {param.dtype} on {param.device}, shape {tuple(param.shape)}, "
            f"strides {param.stride()}. Leave native out."
        )


def _check_states(batch: Batch, keys: Sequence[str]) -> None:
    """Refuse states that the kernel would read or write beyond their ends."""
    sizes, devices = list(map(Tensor.numel, batch.params)), {torch.device("cpu")}
    for key in keys:
        entries = batch.state(key)
        if not entries or (
            list(map(Tensor.numel, entries)) == sizes
            and set(map(_DTYPE, entries)) == {torch.float32}
            and set(map(_DEVICE, entries)) == devices
        ):
            continue
        for param, entry in zip(batch.params, entries, strict=True):
            if entry.shape != param.shape or entry.dtype is not torch.float32 or entry.device.type != "cpu":
                raise IncompatibleError(
                    f"native=True needs states in float32 on the CPU with the shape of their parameter, found {key!r} "
                    f"in {entry.dtype} on {entry.device}, shape {tuple(entry.shape)}, for a parameter of shape "
                    f"{tuple(param.shape)}. Load the state with load_state_dict, or leave native out."
                )


def _blocks(
    groups: Sequence[Mapping[str, Any]], work: Sequence[Batch], pipeline: Pipeline, grad_scale: float
) -> np.ndarray:
    parts = [
        _blocks_of(group, batch, pipeline, grad_scale)
        for group, batch in zip(groups, work, strict=True)
        if any(param.numel() for param in batch.params)
    ]
    return np.concatenate(parts) if parts else np.empty(0, BLOCK)


def _blocks_of(group: Mapping[str, Any], batch: Batch, pipeline: Pipeline, grad_scale: float) -> np.ndarray:
    center = pipeline.centralize
    central = [center is not None and center.applies(param, group) for param in batch.params]
    cuts = [
        cuts_of(param.numel(), param.shape[0] if flag else 1, flag)
        for param, flag in zip(batch.params, central, strict=True)
    ]
    owner = np.repeat(np.arange(len(cuts)), [len(cut) for cut in cuts])
    cut = np.concatenate(cuts)
    blocks = np.zeros(len(owner), BLOCK)
    blocks["rows"], blocks["columns"], blocks["centralize"] = cut[:, 1], cut[:, 2], np.array(central)[owner]
    tensors = {
        "weight": batch.params,
        "grad": batch.grads,
        "mean": batch.state("exp_avg"),
        "square": batch.state("exp_avg_sq"),
    }
    if group["amsgrad"]:
        tensors["largest"] = batch.state("max_exp_avg_sq")
    for name, listed in tensors.items():
        blocks[name] = np.array([tensor.data_ptr() for tensor in listed])[owner] + 4 * cut[:, 0]
    for name, value in _numbers(group, batch, pipeline, grad_scale).items():
        blocks[name] = value if np.ndim(value) == 0 else np.asarray(value)[owner]
    return blocks


def _numbers(group: Mapping[str, Any], batch: Batch, pipeline: Pipeline, grad_scale: float) -> dict[str, Any]:
    """Return the numbers of the update; those that depend on the step are arrays, one entry per parameter."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr, weight_decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
    steps = torch.stack(batch.state("step")).double().numpy() + 1
    first, root = np.ones(len(steps)), np.ones(len(steps))
    if group["bias_correction"]:
        first, root = 1 - beta1**steps, 1 / np.sqrt(1 - beta2**steps)
    scale = grad_scale * (pipeline.unscale.scale if pipeline.unscale is not None else 1.0)
    decoupled = group["decoupled_weight_decay"]
    sign = -1.0 if group["maximize"] else 1.0
    return {
        "unscale": sign / scale,
        "decay": 0.0 if pipeline.decay is None else sign * pipeline.decay.of(group),
        "limit": math.inf if pipeline.clip_value is None else pipeline.clip_value.value,
        "coupled": 0.0 if decoupled else weight_decay,
        "keep": 1 - lr * weight_decay if decoupled else 1.0,
        "beta1": beta1,
        "gain1": 1 - beta1,
        "beta2": beta2,
        "gain2": 1 - beta2,
        "ahead": 1 - beta1 if group["nesterov"] else 0.0,
        "rate": lr / first,
        "root": root,
        "eps": eps * root if group["eps_uncorrected"] else eps,
    }
