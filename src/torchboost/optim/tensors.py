"""Tensors of a step: their memory layouts, sparse values, and figures over ranks that share the parameters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from torchboost.core.torch_private import foreach, sparse_values
from torchboost.core.wrapping import living
from torchboost.errors import RankDisagreementError

__all__ = [
    "Share",
    "aligned",
    "all_finite",
    "is_dense",
    "merge_sparse",
    "same_layout",
    "share_of",
    "stand_in",
    "total_norm",
    "values_of",
    "writable",
]


_REFUSED = -1.0
"""Sent by a rank that raises, in place of its number; a norm is never negative."""


@dataclass(slots=True, eq=False)
class Share:
    """The ranks among which the parameters of one optimizer are divided.

    Args:
        group: Their process group.
        device: Device for the small tensors of a collective.
        due: Number of collectives still to come in this step, the same on all ranks.
    """

    group: Any
    device: torch.device
    due: int = 0

    def exchange(self, number: Tensor) -> Tensor:
        """Return the numbers of all ranks, in one all-gather. Cost: one read.

        Raises:
            RankDisagreementError: A rank raised before this call.
        """
        sent = number.to(self.device, torch.float32).contiguous()
        numbers = [torch.empty_like(sent) for _ in range(dist.get_world_size(self.group))]
        due, self.due = self.due - 1, 0  # after an error of the collective itself, none follows
        dist.all_gather(numbers, sent, group=self.group)
        self.due = due
        gathered = torch.stack(numbers)
        ranks = dist.get_process_group_ranks(self.group)
        refused = [str(rank) for rank, entry in zip(ranks, gathered.tolist(), strict=True) if entry == _REFUSED]
        if refused:
            raise RankDisagreementError(
                f"rank {', '.join(refused)} raised an error before the ranks compared their gradients, so this rank "
                "skipped the update too. The message of that rank says what to do."
            )
        return gathered

    def excuse(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one that it raises ``error``.

        Does nothing if no collective is due, if the other ranks raise as well (``RankDisagreementError``), or after an
        interrupt, which must not wait.
        """
        if self.due > 0 and isinstance(error, Exception) and not isinstance(error, RankDisagreementError):
            with suppress(RankDisagreementError):
                self.exchange(torch.tensor(_REFUSED, device="cpu"))


def share_of(optimizer: Optimizer) -> Share | None:
    """Return the ranks of the ``ZeroRedundancyOptimizer`` that holds an optimizer; None if there is none.

    torch gives the inner optimizer no reference to it. So the objects of this process are searched
    (:func:`~torchboost.core.wrapping.living`), once per optimizer. Cost: tens of milliseconds, nothing in a run of one
    process. FSDP2 does not need this, because a DTensor knows its ranks.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    # If there is such an optimizer, its module is imported already; importing it here would raise warnings.
    kind: Any = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    if kind is None:
        return None
    outers: Any = torch.compiler.disable(living)(kind)
    outer = next((outer for outer in outers if getattr(outer, "optim", None) is optimizer), None)
    return None if outer is None else Share(outer.process_group, outer.param_groups[0]["params"][0].device)


def total_norm(grads: Sequence[Tensor], order: float, share: Share | None) -> Tensor | None:
    """Return the joint norm of gradients, including those of the ranks of a share; None without gradients or share.

    Args:
        grads: Dense, or the values of merged sparse ones. Tensors without entries count as 0.
        order: Order of the norm; ``math.inf`` for the largest magnitude.
        share: All its ranks must call this; one all-gather of one number.

    Returns:
        Shape ``()``; a DTensor if the gradients are DTensors.
    """
    filled = [grad for grad in grads if grad.numel()]  # torch raises for the maximum of an empty tensor
    norm = get_total_norm(filled, order) if filled else None
    if share is None:
        return norm
    return torch.linalg.vector_norm(share.exchange(torch.zeros((), device="cpu") if norm is None else norm), order)


def all_finite(grads: Sequence[Tensor], share: Share | None) -> bool:
    """Whether all gradients are finite, including sparse ones and those of the other ranks of a share.

    Cost: one read, and one synchronisation per device.
    """
    norms: dict[torch.device, list[Tensor]] = {}
    filled = [values for grad in grads if (values := values_of(grad)).numel()]
    for norm in foreach.norm(filled, float("inf")) if filled else ():
        norms.setdefault(norm.device, []).append(norm)
    finite = all(bool(torch.stack([norm.float() for norm in own]).isfinite().all()) for own in norms.values())
    if share is None:
        return finite
    return bool(share.exchange(torch.tensor(float(finite), device="cpu")).all())


def values_of(grad: Tensor) -> Tensor:
    """Return the values of a gradient; of a sparse one, those of its stored rows."""
    return sparse_values(grad) if grad.layout is torch.sparse_coo else grad


def merge_sparse(grads: list[Tensor]) -> None:
    """Merge duplicate rows of sparse gradients; dense gradients are not changed."""
    for position, grad in enumerate(grads):
        if grad.layout is torch.sparse_coo:
            grads[position] = grad.coalesce()


def stand_in(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a dense tensor with the shape of ``like``, for checks; it holds one undefined number in memory."""
    return torch.empty((), dtype=dtype, device=like.device).expand(like.shape)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in any order of the axes."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((t, s) for t, s in zip(tensor.stride(), tensor.shape, strict=True) if s > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(value: Tensor, model: Tensor) -> bool:
    """Whether two tensors of equal shape have equal strides, axes of length one aside."""
    if value.stride() == model.stride():
        return True
    axes = zip(model.shape, value.stride(), model.stride(), strict=True)
    return all(stride == expected for size, stride, expected in axes if size > 1)


def aligned(value: Tensor, model: Tensor) -> Tensor:
    """Return ``value``, or a copy of it, in the memory layout of ``model``, which has the same shape.

    Kernels that take lists of tensors read all of them in the memory order of the first. A gradient in another layout
    would be read at the wrong places.
    """
    if same_layout(value, model):
        return value
    return torch.empty_like(model, dtype=value.dtype, memory_format=torch.preserve_format).copy_(value)


def writable(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy if its entries share memory, as in gradients that ``autograd.grad`` expands.

    torch refuses to change such a tensor in place. Sparse tensors are returned as they are.
    """
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return tensor
    shared = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.contiguous() if shared else tensor
