"""What one rank must know of the others' gradients where an optimizer holds its share of the parameters only."""

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

from torchboost.core.living import living
from torchboost.errors import RankDisagreementError
from torchboost.optim.tensor_lists import foreach

__all__ = ["Share", "all_finite", "joint_norm", "merge_sparse", "share_of", "stand_in", "total_norm", "values_of"]


_REFUSED = -1.0
"""What a rank gives in place of its number if it raises: no norm is negative."""


@dataclass(slots=True, eq=False)
class Share:
    """The ranks that share the parameters of one optimizer out.

    Args:
        group: Their process group.
        device: Where small tensors of a collective must be.
        due: How many collectives are still to come in this step, of all ranks alike.
    """

    group: Any
    device: torch.device
    due: int = 0

    def exchange(self, number: Tensor) -> Tensor:
        """Return the numbers of all ranks, in one all-gather. Cost: one read.

        Raises:
            RankDisagreementError: A rank raised before it came here.
        """
        own = number.to(self.device, torch.float32).contiguous()
        numbers = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        due, self.due = self.due - 1, 0  # after an error of the collective itself none is to follow
        dist.all_gather(numbers, own, group=self.group)
        self.due = due
        gathered = torch.stack(numbers)
        ranks = dist.get_process_group_ranks(self.group)
        refused = [str(rank) for rank, given in zip(ranks, gathered.tolist(), strict=True) if given == _REFUSED]
        if refused:
            raise RankDisagreementError(
                f"rank {', '.join(refused)} raised an error before the ranks compared their gradients, so this rank "
                "skipped the update too. The message of that rank says what to do."
            )
        return gathered

    def excuse(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one that it raises; to be called with what it raises.

        Nothing happens if no collective is to come, if the others raise as well (``RankDisagreementError``), or at an
        interrupt, which must not wait.
        """
        if self.due > 0 and isinstance(error, Exception) and not isinstance(error, RankDisagreementError):
            with suppress(RankDisagreementError):
                self.exchange(torch.tensor(_REFUSED))


def share_of(optimizer: Optimizer) -> Share | None:
    """Return whom an optimizer shares the parameters with: the ranks of the ``ZeroRedundancyOptimizer`` that holds it.

    torch does not tell the optimizer inside. So the objects of this process are searched
    (:func:`~torchboost.core.living.living`), once per optimizer: tens of milliseconds, and nothing in a run of one
    process. FSDP2 needs none of it, since a DTensor knows its ranks.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    # Whoever made such an optimizer has imported its module, which warns about parts of itself.
    kind: Any = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    if kind is None:
        return None
    search: Any = torch.compiler.disable(_search)
    return search(optimizer, kind)


def _search(optimizer: Optimizer, kind: Any) -> Share | None:
    for found in living(kind):
        if getattr(found, "optim", None) is optimizer:
            return Share(found.process_group, found.param_groups[0]["params"][0].device)
    return None


def total_norm(grads: Sequence[Tensor], order: float, share: Share | None) -> Tensor | None:
    """Return the joint norm of gradients, over the ranks of a share too; None if there is nothing to look at.

    Args:
        grads: Dense, or the numbers of merged sparse ones. Tensors without entries count as 0.
        order: Of the norm; ``math.inf`` for the largest magnitude.
        share: All its ranks must call; one all-gather of one number.

    Returns:
        Shape ``()``; a DTensor where the gradients are.
    """
    filled = [grad for grad in grads if grad.numel()]  # torch knows no maximum of nothing
    own = get_total_norm(filled, order) if filled else None
    if share is None:
        return own
    return joint_norm(torch.zeros(()) if own is None else own, order, share)


def joint_norm(own: Tensor, order: float, share: Share) -> Tensor:
    """Return the norm over all ranks of a share, each of which gives that of its own gradients."""
    return torch.linalg.vector_norm(share.exchange(own), order)


def all_finite(grads: Sequence[Tensor], share: Share | None) -> bool:
    """Whether all gradients are finite, sparse ones and those of the other ranks of a share too.

    Cost: one read, and one wait per device.
    """
    norms: dict[torch.device, list[Tensor]] = {}
    filled = [values for grad in grads if (values := values_of(grad)).numel()]
    for norm in foreach._foreach_norm(filled, float("inf")) if filled else ():
        norms.setdefault(norm.device, []).append(norm)
    finite = all(bool(torch.stack([norm.float() for norm in own]).isfinite().all()) for own in norms.values())
    if share is None:
        return finite
    return bool(share.exchange(torch.tensor(float(finite))).all())


def values_of(grad: Tensor) -> Tensor:
    """Return the numbers of a gradient: all of a dense one, those of the rows that a sparse one names."""
    return grad._values() if grad.layout is torch.sparse_coo else grad


def merge_sparse(grads: list[Tensor]) -> None:
    """Merge the rows that a sparse gradient names more than once; dense gradients are left alone."""
    for position, grad in enumerate(grads):
        if grad.layout is torch.sparse_coo:
            grads[position] = grad.coalesce()


def stand_in(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a dense tensor of a shape and dtype, for checks: one number in memory, undefined."""
    return torch.empty((), dtype=dtype, device=like.device).expand(like.shape)
