"""Transforms of the gradients before a rule."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from torchboost.core.arguments import check_count, check_flag, check_number
from torchboost.core.torch_private import foreach, sparse_values
from torchboost.errors import IncompatibleError
from torchboost.optim.pipeline import Gradients, GradientTransform, refuse_sparse
from torchboost.optim.tensors import by_device, is_rows, merge_sparse, places_by, stand_in, values_of

CENTRALIZE = "grad_centralization"
"""Key of a group that says whether its gradients are centralised: True, False, or absent (MindSpore's convention)."""

_LAYOUT = attrgetter("layout")


@dataclass(frozen=True, kw_only=True)
class Centralize:
    """Give every filter's gradient zero mean: ``g -= mean(g over all axes but the first)``.

    Parameters without rows are skipped (:func:`has_rows`), and param groups with ``"grad_centralization": False``.
    Works in place, in any memory format and dtype. Sparse gradients of embeddings are centralised row by row, and a
    DTensor sharded over its rows locally. Cost: one read and one write of the gradients.

    Args:
        skip: Parameters to skip.
        flag: Key in the param group that must be true. None centralises every group that does not say False.
        multiple_of: Centralise only if the size of axis 1 is a multiple of this (MindSpore: 16).

    Raises:
        TypeError: ``skip`` holds something that is not a tensor, or a setting has the wrong type.
        ValueError: ``multiple_of`` is below 1.
    """

    scale_free = True
    skip: Collection[Tensor] = field(default=(), repr=False)
    flag: str | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        given = () if isinstance(self.skip, (str, Tensor)) or not isinstance(self.skip, Collection) else self.skip
        if given is not self.skip or not all(isinstance(param, Tensor) for param in given):
            raise TypeError(
                f"skip: found {reprlib.repr(self.skip)}; give a collection of parameters, not of names or modules."
            )
        if self.flag is not None and not isinstance(self.flag, str):
            raise TypeError(f"flag: found {self.flag!r}; give the name of a param-group key, or None.")
        check_count("multiple_of", self.multiple_of, of="entries that axis 1 is divided by")
        object.__setattr__(self, "skip", frozenset(self.skip))

    def applies(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        """Whether the gradient of a parameter is centralised."""
        if wish(group) is False or not has_rows(param) or param in self.skip or param.shape[1] % self.multiple_of:
            return False
        return self.flag is None or bool(group.get(self.flag))

    def check(self, gradients: Gradients) -> None:
        """Refuse sparse gradients of single entries, and a group's setting that is not a boolean."""
        for group in {id(group): group for group in gradients.groups}.values():
            wish(group)
        if set(map(_LAYOUT, gradients.grads)) <= {torch.strided}:
            return
        for param, grad, group in zip(gradients.params, gradients.grads, gradients.groups, strict=True):
            if self.applies(param, group) and grad.layout is not torch.strided:
                _rows(grad)

    def __call__(self, gradients: Gradients) -> None:
        """Centralise in place."""
        for param, grad, group in zip(gradients.params, gradients.grads, gradients.groups, strict=True):
            if self.applies(param, group):
                rows = grad if type(grad) is Tensor and grad.layout is torch.strided else _rows(grad)
                # Tensor by tensor: the gradient is still in the cache when the mean is subtracted. Lists of
                # tensors (foreach) are slower here: they broadcast one by one and return to memory out of the cache.
                rows.sub_(rows.mean(tuple(range(1, rows.ndim)), keepdim=True))


@dataclass(frozen=True)
class Unscale:
    """Divide the gradients by a fixed loss scale: ``g *= 1 / scale``, sparse ones too.

    For losses that are multiplied by hand. ``GradScaler`` unscales itself. Cost: one read and one write.

    Args:
        scale: The factor of the loss, above 0.

    Raises:
        TypeError, ValueError: Not a number, not above 0, or not finite.
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
            foreach.mul_(grads, 1.0 / self.scale)


@dataclass(frozen=True, kw_only=True)
class Coalesce:
    """Merge duplicate rows of sparse gradients, or with ``dense`` convert them to dense ones.

    Cost: a sort of the row numbers, and with ``dense`` a tensor of the parameter's size.

    Raises:
        TypeError: ``dense`` is not a bool.
    """

    scale_free = True
    dense: bool = False

    def __post_init__(self) -> None:
        check_flag("dense", self.dense)

    def check(self, gradients: Gradients) -> None:
        """Put stand-ins of the new layout into the list."""
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

    For decay that must come before another transform, as in MindSpore, which also centralises the decay. Set the
    optimizer's ``weight_decay=0``, or the weights decay twice. A param group may set ``"coupled_weight_decay"``.

    Args:
        weight_decay: Factor, at least 0.

    Raises:
        TypeError, ValueError: Not a number, negative or not finite.
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
        # An optimizer with maximize=True negates the gradient, but the decay must still shrink the weights.
        return -factor if group.get("maximize") else factor

    def check(self, gradients: Gradients) -> None:
        """Refuse sparse gradients, because all rows decay, and an invalid factor of a group."""
        refuse_sparse(self, gradients)
        for group in gradients.groups:
            if "coupled_weight_decay" in group:
                self.of(group)

    def __call__(self, gradients: Gradients) -> None:
        """Add the decay in place."""
        for factor, places in places_by(map(self.of, gradients.groups)).items():
            if factor:
                grads, params = ([listed[at] for at in places] for listed in (gradients.grads, gradients.params))
                foreach.add_(grads, params, alpha=factor)


@dataclass(frozen=True)
class ClipNorm:
    """Scale all gradients down together so that their joint norm is at most ``max_norm``.

    Equals ``torch.nn.utils.clip_grad_norm_`` over all parameters of the optimizer. The norm is global under FSDP2.
    Duplicate rows of sparse gradients are merged first, so they count as if they were dense. Parameters without
    entries count as 0.

    Args:
        max_norm: Largest norm, above 0.
        norm_type: Order of the norm, above 0, or ``math.inf`` for the largest magnitude.

    Raises:
        TypeError, ValueError: A setting has the wrong type or is out of range.
    """

    scale_free = False
    joint = True
    max_norm: float
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        if self.max_norm == math.inf:
            raise ValueError("max_norm: found inf, which clips nothing; leave ClipNorm out, or set norm_type=inf.")
        check_number("max_norm", self.max_norm, above=True)
        if self.norm_type != math.inf:
            check_number("norm_type", self.norm_type, above=True)

    def __call__(self, gradients: Gradients) -> None:
        """Clip in place. Sparse gradients are merged."""
        merge_sparse(gradients.grads)
        grads = [values_of(grad) for grad in gradients.grads]
        filled = [grad for grad in grads if grad.numel()]  # torch raises for the maximum of an empty tensor
        if not filled:
            return
        factor = torch.clamp(self.max_norm / (get_total_norm(filled, float(self.norm_type)) + 1e-6), max=1.0)
        for device, part in by_device(grads).items():
            foreach.mul_(part, factor.to(device))


@dataclass(frozen=True)
class ClipValue:
    """Limit every entry of every gradient to ``[-value, value]``, as ``torch.nn.utils.clip_grad_value_`` does.

    Duplicate rows of sparse gradients are merged first, as if they were dense.

    Args:
        value: Limit, above 0.

    Raises:
        TypeError, ValueError: Not a number, not above 0, or not finite.
    """

    scale_free = False
    value: float

    def __post_init__(self) -> None:
        check_number("value", self.value, above=True)

    def check(self, gradients: Gradients) -> None:
        """Refuse complex gradients, which have no order."""
        for param, grad in zip(gradients.params, gradients.grads, strict=True):
            if grad.is_complex():
                raise IncompatibleError(
                    f"ClipValue needs real gradients, found {grad.dtype} of shape {tuple(param.shape)}; use ClipNorm."
                )

    def __call__(self, gradients: Gradients) -> None:
        """Clip in place. Sparse gradients are merged."""
        merge_sparse(gradients.grads)
        for grads in by_device([values_of(grad) for grad in gradients.grads]).values():
            foreach.clamp_min_(grads, -self.value)
            foreach.clamp_max_(grads, self.value)


def has_rows(param: Tensor) -> bool:
    """Whether the mean of each row of a parameter (one per index of its first axis) can be removed.

    False for fewer than two axes, and for one entry per row, such as ``(n, 1)``, ``(n, 1, 1)``, or the kernel of a
    pointwise convolution of one channel: an entry minus the mean of its row would be zero, so it would never train.
    False also for a vector with three or more axes, such as ``(1, n, 1, 1)``: a scale per channel is one, and its mean
    would never change. ``(1, n)`` is a row, as in a linear layer with one output.
    """
    if param.ndim < 2 or param.numel() <= param.shape[0]:
        return False
    return param.ndim == 2 or sum(size > 1 for size in param.shape) > 1


def wish(group: Mapping[str, Any]) -> bool | None:
    """Return the ``"grad_centralization"`` of a param group, a boolean, or None if it is not set."""
    value = group.get(CENTRALIZE)
    if value is not None:
        check_flag(CENTRALIZE, value)
    return value


def with_centralization(
    transforms: tuple[GradientTransform, ...], groups: Iterable[Mapping[str, Any]]
) -> tuple[GradientTransform, ...]:
    """Return the transforms, with :class:`Centralize` added if a group requires it and it is missing.

    It is placed after the decay, as in MindSpore, and before everything else, such as clipping.
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
        if not is_rows(grad):
            raise IncompatibleError(
                f"Centralize needs dense gradients or sparse rows, found layout {grad.layout} and shape "
                f"{tuple(grad.shape)}. Add the parameter to 'skip'."
            )
        # Centralisation is linear, so duplicate rows need not be merged first.
        return sparse_values(grad)
    placements: Any = getattr(grad, "placements", None)
    if placements is not None and all(not p.is_shard() or p.dim == 0 for p in placements):
        local: Any = grad
        return local.to_local()
    return grad
