"""Gradient transforms: unscale, merge sparse rows, decay, centralise, clip by norm, clip by value."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchboost.core.arguments import check_number, is_integer
from torchboost.errors import IncompatibleError
from torchboost.optim.groups import CENTRALIZE
from torchboost.optim.pipeline import Gradients, GradientTransform, refuse_sparse
from torchboost.optim.shares import all_finite, merge_sparse, stand_in, total_norm, values_of
from torchboost.optim.tensor_lists import foreach

__all__ = ["Centralize", "ClipNorm", "ClipValue", "Coalesce", "Decay", "Unscale"]


@dataclass(frozen=True, kw_only=True)
class Centralize:
    """Give every filter's gradient zero mean: ``g -= mean(g over all axes but the first)``.

    Parameters without rows are left alone (:func:`has_rows`): those of fewer than two axes, and those with one entry
    per row, whose gradient would be zero. A param group decides by its key ``"grad_centralization"``: if False, its
    parameters are left alone. Cost: one read and one write of the gradients. In place, in any memory format and dtype;
    sparse gradients of embeddings are centralised row by row; a DTensor sharded over its rows is centralised locally.

    Args:
        skip: Parameters that are left alone.
        flag: Key in the param group that must be true; None centralises in every group that does not say False.
        multiple_of: Centralise only where the size of axis 1 is a multiple of this (MindSpore: 16).

    Raises:
        TypeError: ``skip`` holds something that is not a tensor, or a setting has the wrong type.
        ValueError: ``multiple_of`` is below 1.
    """

    scale_free = True
    skip: Collection[Tensor] = field(default=(), repr=False)
    flag: str | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.skip, (str, Tensor)) or not isinstance(self.skip, Collection):
            raise TypeError(f"skip: found {type(self.skip).__name__}; give a collection of parameters.")
        for param in self.skip:
            if not isinstance(param, Tensor):
                raise TypeError(f"skip: found {param!r}; give the parameters themselves, not their names or modules.")
        if self.flag is not None and not isinstance(self.flag, str):
            raise TypeError(f"flag: found {self.flag!r}; give the name of a param-group key, or None.")
        if not is_integer(self.multiple_of):
            raise TypeError(f"multiple_of: found {self.multiple_of!r}; give a whole number, at least 1.")
        if self.multiple_of < 1:
            raise ValueError(f"multiple_of: found {self.multiple_of}; give a whole number, at least 1.")
        object.__setattr__(self, "skip", frozenset(self.skip))

    def applies(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        """Whether the gradient of a parameter is centralised.

        Raises:
            TypeError: The group's ``"grad_centralization"`` is not a boolean.
        """
        if wish(group) is False or not has_rows(param) or param in self.skip or param.shape[1] % self.multiple_of:
            return False
        return self.flag is None or bool(group.get(self.flag))

    def check(self, gradients: Gradients) -> None:
        """Refuse sparse gradients of single entries, and a group's word that is no boolean."""
        for param, grad, group in zip(gradients.params, gradients.grads, gradients.groups, strict=True):
            if self.applies(param, group) and grad.layout is not torch.strided:
                _rows(grad)

    def __call__(self, gradients: Gradients) -> None:
        """Centralise in place."""
        for param, grad, group in zip(gradients.params, gradients.grads, gradients.groups, strict=True):
            if self.applies(param, group):
                rows = grad if type(grad) is Tensor and grad.layout is torch.strided else _rows(grad)
                # Tensor by tensor: the gradient is still in the cache when the mean is subtracted. Lists of
                # tensors (foreach) are slower here, because they broadcast one by one and come back to cold memory.
                rows.sub_(rows.mean(tuple(range(1, rows.ndim)), keepdim=True))


@dataclass(frozen=True)
class Unscale:
    """Divide the gradients by a fixed loss scale: ``g *= 1 / scale``, sparse ones too.

    For losses that are multiplied by hand; ``GradScaler`` does it by itself. Cost: a read and a write.

    Args:
        scale: What the loss was multiplied by, above 0.

    Raises:
        TypeError: Not a number.
        ValueError: Not above 0, or not finite.
    """

    scale_free = True
    scale: float

    def __post_init__(self) -> None:
        check_number("scale", self.scale, above=True)
        if not math.isfinite(1.0 / self.scale):
            raise ValueError(f"scale: found {self.scale!r}; give a finite number above 0 whose inverse is finite.")

    def __call__(self, gradients: Gradients) -> None:
        """Divide in place."""
        grads = [values_of(grad) for grad in gradients.grads]
        if grads:
            foreach._foreach_mul_(grads, 1.0 / self.scale)


@dataclass(frozen=True, kw_only=True)
class Coalesce:
    """Merge the rows a sparse gradient names more than once; dense gradients are left alone.

    Cost: sorts the row numbers; with ``dense`` a tensor of the parameter's size.

    Args:
        dense: Make the sparse gradient a dense one, for optimizers and transforms that take no other.

    Raises:
        TypeError: ``dense`` is not a bool.
    """

    scale_free = True
    dense: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dense, bool):
            raise TypeError(f"dense: found {self.dense!r}; give True or False.")

    def check(self, gradients: Gradients) -> None:
        """Announce the layout to come."""
        if self.dense:
            gradients.grads[:] = [
                stand_in(grad, grad.dtype) if grad.layout is torch.sparse_coo else grad for grad in gradients.grads
            ]

    def __call__(self, gradients: Gradients) -> None:
        """Replace sparse gradients."""
        for position, grad in enumerate(gradients.grads):
            if grad.layout is torch.sparse_coo and self.dense:
                gradients.grads[position] = grad.to_dense()
        merge_sparse(gradients.grads)


@dataclass(frozen=True)
class Decay:
    """Add coupled (L2) weight decay to the gradients: ``g += weight_decay * w``.

    For decay that must come before another transform, as in MindSpore, where it is centralised too. Give the optimizer
    itself ``weight_decay=0``, or the weights decay twice. A param group may hold its own ``"coupled_weight_decay"``.

    Args:
        weight_decay: Factor, at least 0.

    Raises:
        TypeError: Not a number.
        ValueError: Negative or not finite.
    """

    scale_free = False
    weight_decay: float

    def __post_init__(self) -> None:
        check_number("weight_decay", self.weight_decay)

    def of(self, group: Mapping[str, Any]) -> float:
        """Return the factor of a param group."""
        factor = group.get("coupled_weight_decay", self.weight_decay)
        if factor is not self.weight_decay:
            check_number("coupled_weight_decay", factor)
        # An optimizer with maximize=True goes along -g, where a decay must not grow the weights.
        return -factor if group.get("maximize") else factor

    def check(self, gradients: Gradients) -> None:
        """Refuse sparse gradients, since all rows decay, and a group's factor that is none."""
        refuse_sparse(self, gradients)
        for group in gradients.groups:
            if "coupled_weight_decay" in group:
                self.of(group)

    def __call__(self, gradients: Gradients) -> None:
        """Add the decay in place."""
        by_factor: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for param, grad, group in zip(gradients.params, gradients.grads, gradients.groups, strict=True):
            factor = self.of(group)
            if factor:
                params, grads = by_factor.setdefault(factor, ([], []))
                params.append(param)
                grads.append(grad)
        for factor, (params, grads) in by_factor.items():
            foreach._foreach_add_(grads, params, alpha=factor)


@dataclass(frozen=True)
class ClipNorm:
    """Scale all gradients down together so that their joint norm is at most ``max_norm``.

    Equals ``torch.nn.utils.clip_grad_norm_`` over all parameters of the optimizer. The norm is global under FSDP2, and
    inside an optimizer of this package under ``ZeroRedundancyOptimizer``, where each rank gives the others one number.
    Sparse gradients count with the rows that they name twice merged, as if they were dense. Parameters without entries
    count as 0.

    Args:
        max_norm: Largest norm, above 0.
        norm_type: Order of the norm, above 0; ``math.inf`` for the largest magnitude.
        error_if_nonfinite: Raise ``RuntimeError`` when the norm is not finite. Costs a device synchronisation.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A number is out of range; an infinite ``max_norm`` would clip nothing.
    """

    scale_free = False
    max_norm: float
    norm_type: float = 2.0
    error_if_nonfinite: bool = False

    def __post_init__(self) -> None:
        if self.max_norm == math.inf:
            raise ValueError(
                "max_norm: found inf, which clips nothing; leave ClipNorm out. The norm of the largest magnitude is "
                "ClipNorm(max_norm, norm_type=math.inf)."
            )
        check_number("max_norm", self.max_norm, above=True)
        if self.norm_type != math.inf:
            check_number("norm_type", self.norm_type, above=True)
        if not isinstance(self.error_if_nonfinite, bool):
            raise TypeError(f"error_if_nonfinite: found {self.error_if_nonfinite!r}; give True or False.")

    @property
    def collectives(self) -> int:
        """How often a step asks the other ranks of a share."""
        return 1 + self.error_if_nonfinite

    def check(self, gradients: Gradients) -> None:
        """Refuse gradients that are not finite, where that is asked for."""
        if self.error_if_nonfinite and not all_finite(gradients.grads, gradients.share):
            raise RuntimeError(
                f"{self!r} found inf or nan in the gradients; find the cause, or set error_if_nonfinite=False."
            )

    def __call__(self, gradients: Gradients) -> None:
        """Clip in place; sparse gradients are merged."""
        merge_sparse(gradients.grads)
        grads = [values_of(grad) for grad in gradients.grads]
        norm = total_norm(grads, float(self.norm_type), gradients.share)
        if norm is None:
            return
        if self.error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"{self!r} found a non-finite norm, {float(norm)}.")
        factor = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
        for device, own in _by_device(grads).items():
            foreach._foreach_mul_(own, factor.to(device))


@dataclass(frozen=True)
class ClipValue:
    """Limit every entry of every gradient to ``[-value, value]``, as ``torch.nn.utils.clip_grad_value_`` does.

    The rows that a sparse gradient names twice are merged first, as if it were dense.

    Args:
        value: Limit, above 0.

    Raises:
        TypeError: Not a number.
        ValueError: Not above 0, or not finite.
    """

    scale_free = False
    value: float

    def __post_init__(self) -> None:
        check_number("value", self.value, above=True)

    def __call__(self, gradients: Gradients) -> None:
        """Clip in place; sparse gradients are merged."""
        merge_sparse(gradients.grads)
        for grads in _by_device([values_of(grad) for grad in gradients.grads]).values():
            foreach._foreach_clamp_min_(grads, -self.value)
            foreach._foreach_clamp_max_(grads, self.value)


def has_rows(param: Tensor) -> bool:
    """Whether the rows of a parameter, one per index of its first axis, have a mean that may go.

    False for fewer than two axes, and for one entry per row, such as ``(n, 1)``, ``(n, 1, 1)``, or the kernel of a
    pointwise convolution of one channel: an entry minus the mean of its row is zero there, so it would never train.
    """
    return param.ndim >= 2 and param.numel() > param.shape[0]


def wish(group: Mapping[str, Any]) -> bool | None:
    """Return what a param group says about centralisation, None if nothing.

    Raises:
        TypeError: Something other than a boolean.
    """
    value = group.get(CENTRALIZE)
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{CENTRALIZE}: found {value!r}; give True or False.")
    return value


def with_centralization(
    transforms: tuple[GradientTransform, ...], groups: Iterable[Mapping[str, Any]]
) -> tuple[GradientTransform, ...]:
    """Return the transforms, with centralisation among them if a group asks for it and they leave it out.

    It comes after the decay, as in MindSpore, and before everything else, such as clipping.

    Raises:
        TypeError: A group's ``"grad_centralization"`` is not a boolean.
    """
    if not any(wish(group) for group in groups):
        return transforms
    if any(isinstance(t, Centralize) and t.flag in (None, CENTRALIZE) for t in transforms):
        return transforms
    place = next(
        (i for i, t in enumerate(transforms) if not isinstance(t, (Unscale, Coalesce, Decay))), len(transforms)
    )
    return (*transforms[:place], Centralize(flag=CENTRALIZE), *transforms[place:])


def _rows(grad: Tensor) -> Tensor:
    """Return the tensor whose rows are whole rows of ``grad``, sharing its memory."""
    if grad.layout is not torch.strided:
        if grad.layout is not torch.sparse_coo or grad.sparse_dim() != 1:
            raise IncompatibleError(
                f"Centralize needs dense gradients or sparse rows, found layout {grad.layout} and shape "
                f"{tuple(grad.shape)}. Add the parameter to 'skip'."
            )
        # Centralising is linear, so duplicates of a row need not be merged first.
        return grad._values()
    placements: Any = getattr(grad, "placements", None)
    if placements is not None and all(not p.is_shard() or p.dim == 0 for p in placements):
        local: Any = grad
        return local.to_local()
    return grad


def _by_device(grads: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    devices: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        devices.setdefault(grad.device, []).append(grad)
    return devices
