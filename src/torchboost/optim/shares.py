"""Figures of all ranks' gradients, for an optimizer that holds only one rank's share of the parameters."""

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

__all__ = ["Share", "all_finite", "joint_norm", "merge_sparse", "share_of", "stand_in", "total_norm", "values_of"]


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
    search: Any = torch.compiler.disable(_search)
    return search(optimizer, kind)


def _search(optimizer: Optimizer, kind: Any) -> Share | None:
    for outer in living(kind):
        if getattr(outer, "optim", None) is optimizer:
            return Share(outer.process_group, outer.param_groups[0]["params"][0].device)
    return None


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
    return joint_norm(torch.zeros((), device="cpu") if norm is None else norm, order, share)


def joint_norm(norm: Tensor, order: float, share: Share) -> Tensor:
    """Return the norm over all ranks of a share; each rank passes the norm of its own gradients."""
    return torch.linalg.vector_norm(share.exchange(norm), order)


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
