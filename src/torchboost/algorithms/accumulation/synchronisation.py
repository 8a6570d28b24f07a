"""Switch off the exchange of gradients that DDP and FSDP2 do in every backward pass, and agree on numbers instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from torchboost.core.averaging import only_ddp
from torchboost.core.wrapping import wrapper_of
from torchboost.errors import IncompatibleError

__all__ = ["GradientSync"]


class GradientSync:
    """How the gradients of one model are averaged over the ranks: by DDP, by FSDP2, or not at all.

    Args:
        model: As the loop calls it, with DDP around it or inside it, as in ``WithLoss(DDP(model))``, or compiled.

    Attributes:
        ranks: Over how many ranks gradients are averaged; 1 for a bare model.
        sharded: Whether FSDP2 shards the model; it keeps gradients that are not reduced yet to itself.

    Raises:
        IncompatibleError: DDP with ``static_graph=True``, several DDPs, or FSDP1.
    """

    def __init__(self, model: nn.Module) -> None:
        outer = model.get_submodule("_orig_mod") if wrapper_of(model) == "torch.compile" else model
        if wrapper_of(outer) == "FullyShardedDataParallel":
            raise IncompatibleError(
                "the model is sharded by FullyShardedDataParallel (FSDP1), which this does not know; "
                "use fully_shard (FSDP2)."
            )
        self._model = model
        self._ddp = only_ddp(outer)
        if self._ddp is not None and self._ddp.static_graph:
            raise IncompatibleError(
                "DistributedDataParallel was built with static_graph=True, under which torch fails when a backward "
                "pass does not synchronise; build it without."
            )
        self._shards = [module for module in outer.modules() if hasattr(module, "set_requires_gradient_sync")]
        self._group = self._ddp.process_group if self._ddp is not None else None
        self.sharded = bool(self._shards)
        self.ranks = dist.get_world_size(self._group) if self._ddp is not None or self.sharded else 1

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context whose passes leave their gradients on their rank; the next pass outside adds them up."""
        if self._ddp is not None:
            with self._ddp.no_sync():
                yield
            return
        self._switch(False)
        try:
            yield
        finally:
            self._switch(True)

    def catch_up(self) -> None:
        """Take part in what DDP exchanges at the beginning of passes, where other ranks made some and this one none.

        On ranks that made such a pass it does nothing; all of them must call it.
        """
        if self._ddp is not None:
            # Orders of buckets and buffers, which torch exchanges in suspended passes too: all of a pass but the model.
            with torch.enable_grad(), self._ddp.no_sync():
                self._ddp._post_forward(self._ddp._pre_forward(torch.zeros(())))

    def average(self) -> None:
        """Average every gradient that any rank holds, after passes that left them on their rank; not under FSDP2.

        Parameters outside of DDP are left alone, as by DDP.
        """
        averaged = self._model if self._ddp is None else self._ddp
        parameters = [p for p in averaged.parameters() if p.requires_grad]
        if self.ranks == 1 or not parameters:
            return
        held = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
        dist.all_reduce(held, dist.ReduceOp.MAX, group=self._group)
        for parameter, somewhere in zip(parameters, held.tolist(), strict=True):
            if somewhere:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(gradient, group=self._group)
                parameter.grad = gradient.div_(self.ranks)

    def largest(self, value: float) -> float:
        """Return the largest value of all ranks."""
        return self._agreed(value, dist.ReduceOp.MAX)

    def mean(self, value: float) -> float:
        """Return the mean value of all ranks."""
        return self._agreed(value, dist.ReduceOp.SUM) / self.ranks

    def _switch(self, on: bool) -> None:
        for module in self._shards:
            module.set_requires_gradient_sync(on, recurse=False)  # pyright: ignore[reportCallIssue]

    def _agreed(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        if self.ranks == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=next(self._model.parameters()).device)
        dist.all_reduce(shared, operation, group=self._group)
        return float(shared)
